// Operators kernel_pytorch_cuda::{rms_norm, add_rms_norm, rms_norm_backward}: schemas, checks, allocation, threads.

#include "kernel_pytorch/operator.h"
#include "rms_norm.h"

namespace kernel_pytorch {
namespace rms_norm {

namespace {

const char* const kCastings[] = {"llama", "gemma", "none"};

void check_casting(const char* name, const std::string& casting) {
  for (const char* allowed : kCastings) {
    if (casting == allowed) return;
  }
  fail(name, ": casting: given '", casting, "'; allowed are 'llama', 'gemma', 'none'");
}

// Checks that the shape of a weight is the end of x's shape: (columns,) or (heads, columns).
void check_weight(const char* name, const Tensor& weight, const Tensor& x) {
  check_beside("weight", weight, x);
  check_floating("weight", weight);
  bool fits = weight.dim() >= 1 && weight.dim() <= 2 && weight.dim() <= x.dim();
  for (int64_t i = 1; fits && i <= weight.dim(); ++i) fits = weight.size(weight.dim() - i) == x.size(x.dim() - i);
  check(fits, name, ": weight: shape is ", shape(weight), "; it must be the end of that of x, ", shape(x));
}

Input optional_input(const char* name, const OptionalTensor& tensor) {
  return tensor.has_value() ? input(name, *tensor) : Input{};
}

// Largest number of weight rows whose gradient is summed on CUDA: the limit of a grid's second dimension.
constexpr int64_t kMostWeightRows = 65535;

// Number of partial sums of dweight. On the CPU each covers 16 rows, so that float32 sums stay short, or more rows if
// they would take over half the memory of x; each has all rows of the weight. On CUDA each partial sum has one row of
// the weight.
int64_t parts_of(const Tensor& h, Rows rows, int64_t weight_rows) {
  if (!h.is_cuda()) return larger(1, smaller(ceil_divide(rows.rows, 16), rows.rows / larger(1, 2 * weight_rows)));
  const int64_t size = size_of(dtype_of("h", h));
  const RowLayout layout = layout_of(rows.columns * size / 16, backward_lengths(size));
  const int64_t parts = shares_of(rows.rows, layout, layout.each == 1 ? 1024 : 512);
  return larger(1, parts / weight_rows) * weight_rows;
}

// Converts a weight to a dtype that the kernels support for x of dtype `type`.
OptionalTensor weight_beside(const OptionalTensor& weight, DType type, bool cuda) {
  if (!weight.has_value() || dtype_of("weight", *weight) == type) return weight;
  const DType compute = compute_type({type});
  const bool taken = !cuda && compute_type({dtype_of("weight", *weight)}) == compute;
  return taken ? weight : OptionalTensor(in_type(*weight, compute));
}

struct Normalized {
  Tensor y;
  Tensor h;
  Tensor rstd;
};

Normalized run_forward(const char* name, const Tensor& x_given, const OptionalTensor& residual_given,
                       const OptionalTensor& weight_given, double eps, double offset, const std::string& casting) {
  const Rows rows = rows_of("x", x_given);
  check_floating("x", x_given);
  check_cuda_size(name, "x", x_given, rows);
  check_casting(name, casting);
  Tensor x = as_contiguous(x_given);
  OptionalTensor weight = as_contiguous(weight_given);
  if (weight.has_value()) check_weight(name, *weight, x);
  OptionalTensor residual = as_contiguous(residual_given);
  DType type = dtype_of("x", x);
  if (residual.has_value()) {
    check_beside("residual", *residual, x);
    check_floating("residual", *residual);
    check(sizes(*residual) == sizes(x), name, ": residual: shape is ", shape(*residual), "; it must be that of x, ",
          shape(x));
    type = promote(type, dtype_of("residual", *residual));
    residual = in_type(*residual, type);
    x = in_type(x, type);
  }
  DType y_type = type;
  if (weight.has_value() && casting != "gemma") y_type = promote(type, dtype_of("weight", *weight));
  OptionalTensor sum;
  if (y_type == DType::kFloat64 && type != DType::kFloat64) {  // float64 weight: all in float64 except the sum
    if (residual.has_value()) sum = torch::stable::subtract(x, *residual, -1.0);
    x = in_type(sum.has_value() ? *sum : x, y_type);
    residual = std::nullopt;
    type = y_type;
  }
  weight = weight_beside(weight, type, x.is_cuda());

  std::vector<int64_t> rstd_size = sizes(x);
  rstd_size.pop_back();
  const Tensor y = empty(x, sizes(x), y_type);
  const Tensor h = residual.has_value() ? empty(x, sizes(x), type) : sum.has_value() ? *sum : x;
  const Tensor rstd = empty(x, rstd_size, compute_type({type}));

  Forward forward{};
  forward.x = input("x", x);
  forward.residual = optional_input("residual", residual);
  forward.weight = optional_input("weight", weight);
  forward.y = output(y);
  if (residual.has_value()) forward.h = output(h);
  forward.rstd = output(rstd);
  forward.rows = rows.rows;
  forward.columns = rows.columns;
  forward.weight_rows = weight.has_value() && weight->dim() == 2 ? weight->size(0) : 1;
  forward.eps = eps;
  forward.offset = offset;
  if (x.is_cuda()) {
    on_cuda(name, x, [&](auto stream) { return launch_forward(forward, rung(), stream); });
  } else {
    const auto kernel = KP_BEST(forward);
    for_rows(rows.rows, rows.columns, [&](int64_t begin, int64_t end) { kernel(forward, begin, end); });
  }
  return {y, h, rstd};
}

std::tuple<Tensor, Tensor> rms_norm(const Tensor& x, const OptionalTensor& weight, double eps, double offset,
                                    std::string casting) {
  const Normalized result = run_forward("rms_norm", x, std::nullopt, weight, eps, offset, casting);
  return {result.y, result.rstd};
}

std::tuple<Tensor, Tensor, Tensor> add_rms_norm(const Tensor& x, const Tensor& residual, const OptionalTensor& weight,
                                                double eps, double offset, std::string casting) {
  const Normalized result = run_forward("add_rms_norm", x, residual, weight, eps, offset, casting);
  return {result.y, result.h, result.rstd};
}

void check_backward(const char* name, const Tensor& dy, const OptionalTensor& dh, const Tensor& h,
                    const OptionalTensor& weight, const Tensor& rstd) {
  check_floating("h", h);
  check_floating("dy", dy);
  check(sizes(dy) == sizes(h), name, ": dy: shape is ", shape(dy), "; it must be that of h, ", shape(h));
  check_beside("dy", dy, h);
  if (dh.has_value()) {
    check_floating("dh", *dh);
    check(sizes(*dh) == sizes(h), name, ": dh: shape is ", shape(*dh), "; it must be that of h, ", shape(h));
    check_beside("dh", *dh, h);
  }
  check_beside("rstd", rstd, h);
  check(rstd.numel() == rows_of("h", h).rows, name, ": rstd: shape is ", shape(rstd), "; it needs one number a row of h");
  if (weight.has_value()) check_weight(name, *weight, h);
  const DType compute = compute_type({dtype_of("h", h), dtype_of("dy", dy)});
  check(dtype_of("rstd", rstd) == compute, name, ": rstd: dtype is not the one that h and dy are computed in");
}

std::tuple<Tensor, Tensor> rms_norm_backward(const Tensor& dy_given, const OptionalTensor& dh_given,
                                             const Tensor& h_given, const OptionalTensor& weight_given,
                                             const Tensor& rstd_given, double, double offset, bool need_dx,
                                             bool need_dweight) {
  const char* const name = "rms_norm_backward";
  const Rows rows = rows_of("h", h_given);
  check_cuda_size(name, "h", h_given, rows);
  Tensor h = as_contiguous(h_given);
  Tensor dy = as_contiguous(dy_given);
  OptionalTensor dh = as_contiguous(dh_given);
  OptionalTensor weight = as_contiguous(weight_given);
  const Tensor rstd = as_contiguous(rstd_given);
  check_backward(name, dy, dh, h, weight, rstd);
  need_dweight = need_dweight && weight.has_value();
  const DType h_type = dtype_of("h", h);
  const DType weight_type = weight.has_value() ? dtype_of("weight", *weight) : h_type;
  const DType compute = dtype_of("rstd", rstd);
  const DType type = compute == DType::kFloat64 ? compute : h_type;
  h = in_type(h, type);
  if (dh.has_value()) dh = in_type(*dh, type);
  if (dtype_of("dy", dy) != DType::kFloat32 || size_of(type) != 2) dy = in_type(dy, type);
  weight = weight_beside(weight, type, h.is_cuda());

  Backward backward{};
  backward.dy = input("dy", dy);
  backward.dh = optional_input("dh", dh);
  backward.h = input("h", h);
  backward.weight = optional_input("weight", weight);
  backward.rstd = input("rstd", rstd);
  backward.rows = rows.rows;
  backward.columns = rows.columns;
  backward.weight_rows = weight.has_value() && weight->dim() == 2 ? larger(1, weight->size(0)) : 1;
  backward.parts = parts_of(h, rows, backward.weight_rows);
  backward.offset = offset;
  const int64_t weight_size = backward.weight_rows * rows.columns;

  const bool direct = compute_type({weight_type}) == compute;
  const Tensor dx = empty(h, need_dx ? sizes(h) : std::vector<int64_t>{0}, type);
  const Tensor dweight =
      empty(h, need_dweight ? sizes(*weight) : std::vector<int64_t>{0}, direct ? weight_type : compute);
  const bool sums = need_dweight && dweight.numel() > 0;
  if (!need_dx && !sums) return {in_type(dx, h_type), in_type(dweight, weight_type)};
  check(!sums || !h.is_cuda() || backward.weight_rows <= kMostWeightRows, name, ": weight: shape is ",
        shape(dweight), "; on CUDA its gradient may have at most ", kMostWeightRows, " rows");
  const int64_t share_size = h.is_cuda() ? rows.columns : weight_size;
  const Tensor shares = empty(h, {sums ? backward.parts * share_size : 0}, compute);
  if (need_dx) backward.dx = output(dx);
  if (sums) {
    backward.dweight = output(dweight);
    backward.shares = output(shares);
  }
  if (h.is_cuda()) {
    on_cuda(name, h, [&](auto stream) { return launch_backward(backward, stream); });
  } else {
    const auto kernel = KP_BEST(backward);
    const auto sum = KP_BEST(add_shares);
    const int64_t elements = ceil_divide(rows.rows, backward.parts) * rows.columns;
    for_rows(backward.parts, elements, [&](int64_t begin, int64_t end) { kernel(backward, begin, end); });
    if (sums) {
      for_rows(weight_size, backward.parts, [&](int64_t begin, int64_t end) { sum(backward, begin, end); });
    }
  }
  return {in_type(dx, h_type), in_type(dweight, weight_type)};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(kernel_pytorch_cuda, library) {
  library.def(
      "rms_norm(Tensor x, Tensor? weight, float eps, float offset, str casting)"
      " -> (Tensor y, Tensor rstd)");
  library.def(
      "add_rms_norm(Tensor x, Tensor residual, Tensor? weight, float eps, float offset, str casting)"
      " -> (Tensor y, Tensor h, Tensor rstd)");
  library.def(
      "rms_norm_backward(Tensor dy, Tensor? dh, Tensor h, Tensor? weight, Tensor rstd, float eps, float offset,"
      " bool need_dx, bool need_dweight) -> (Tensor dx, Tensor dweight)");
}

KP_IMPLEMENT(library) {
  library.impl("rms_norm", TORCH_BOX(&rms_norm));
  library.impl("add_rms_norm", TORCH_BOX(&add_rms_norm));
  library.impl("rms_norm_backward", TORCH_BOX(&rms_norm_backward));
}

}  // namespace rms_norm
}  // namespace kernel_pytorch
