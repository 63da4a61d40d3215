// Operators kernel_pytorch_cuda::{norm_act, norm_act_backward}: schemas, checks, allocation, threads.

#include "kernel_pytorch/operator.h"

#include "kernel_pytorch/parameters.h"
#include "norm_act.h"

namespace kernel_pytorch {
namespace norm_act {

namespace {

// Sets all fields except `adds`.
Norm norm_of(const char* name, Rows rows, double eps, double dropout_p, const OptionalTensor& seed, const Tensor& x,
             const std::string& norm, const std::string& activation) {
  check(norm == "layer" || norm == "rms", name, ": norm: given '", norm, "'; allowed are 'layer', 'rms'");
  Norm found{};
  found.rows = rows.rows;
  found.columns = rows.columns;
  found.eps = eps;
  found.layer = norm == "layer";
  found.activation = activation_of(name, activation);
  found.dropout = dropout_of(name, "dropout_p", dropout_p, seed, x);
  return found;
}

// Locates mean and rstd in the statistics, whose shape is `(2, ...)`, or `(1, ...)` without a mean.
template <typename Data>
void place_statistics(Data whole, Rows rows, bool layer, Data* mean, Data* rstd) {
  *rstd = whole;
  if (!layer) return;
  *mean = whole;
  const int64_t bytes = rows.rows * size_of(whole.dtype);
  if constexpr (std::is_same_v<Data, Output>) {
    rstd->data = static_cast<char*>(whole.data) + bytes;
  } else {
    rstd->data = static_cast<const char*>(whole.data) + bytes;
  }
}

std::tuple<Tensor, Tensor, Tensor> norm_act(const Tensor& x_given, const OptionalTensor& residual_given,
                                            const OptionalTensor& weight_given, const OptionalTensor& bias_given,
                                            const OptionalTensor& seed, double eps, double dropout_p, std::string norm,
                                            std::string activation) {
  const char* const name = "norm_act";
  const Rows rows = rows_of("x", x_given);
  check_floating("x", x_given);
  check_cuda_size(name, "x", x_given, rows);
  check_like(name, "residual", residual_given, "x", x_given);
  check_parameter(name, "weight", weight_given, x_given);
  check_parameter(name, "bias", bias_given, x_given);
  DType type = dtype_of("x", x_given);
  if (residual_given.has_value()) type = promote(type, dtype_of("residual", *residual_given));
  const DType compute = compute_type({type});
  Tensor x = as_contiguous(x_given);
  OptionalTensor residual = as_contiguous(residual_given);
  if (!x.is_cuda()) {
    x = in_type(x, type);
    if (residual.has_value()) residual = in_type(*residual, type);
  }
  const OptionalTensor weight = parameter_in("weight", weight_given, compute);
  const OptionalTensor bias = parameter_in("bias", bias_given, compute);

  Forward forward{};
  forward.norm = norm_of(name, rows, eps, dropout_p, seed, x, norm, activation);
  forward.norm.adds = residual.has_value();
  std::vector<int64_t> size = sizes(x);
  const Tensor y = empty(x, size, type);
  const Tensor h = empty(x, residual.has_value() ? size : std::vector<int64_t>{0}, type);
  size.pop_back();
  size.insert(size.begin(), forward.norm.layer ? 2 : 1);
  const Tensor statistics = empty(x, size, compute);
  forward.x = input("x", x);
  forward.residual = optional_input("residual", residual);
  forward.weight = optional_input("weight", weight);
  forward.bias = optional_input("bias", bias);
  forward.y = output(y);
  if (residual.has_value()) forward.h = output(h);
  place_statistics(output(statistics), rows, forward.norm.layer, &forward.mean, &forward.rstd);
  if (x.is_cuda()) {
    on_cuda(name, x, [&](auto stream) { return launch_forward(forward, rung(), stream); });
  } else {
    const auto kernel = KP_BEST(forward);
    for_rows(rows.rows, rows.columns, [&](int64_t begin, int64_t end) { kernel(forward, begin, end); });
  }
  return {y, h, statistics};
}

// Number of partial sums. On the CPU each covers 16 rows: float32 sums stay short, and take no more memory than x.
int64_t parts_of(const Tensor& h, const Norm& norm) {
  return h.is_cuda() ? shares_on_cuda(norm, size_of(dtype_of("h", h))) : larger(1, ceil_divide(norm.rows, 16));
}

void check_backward(const char* name, const Tensor& dy, const OptionalTensor& dh, const Tensor& h,
                    const OptionalTensor& weight, const OptionalTensor& bias, const Tensor& statistics,
                    const std::string& norm) {
  check_floating("h", h);
  check_like(name, "dy", dy, "h", h);
  check_like(name, "dh", dh, "h", h);
  check_parameter(name, "weight", weight, h);
  check_parameter(name, "bias", bias, h);
  check_beside("statistics", statistics, h);
  const int64_t wanted = rows_of("h", h).rows * (norm == "layer" ? 2 : 1);
  check(statistics.numel() == wanted, name, ": statistics: shape is ", shape(statistics), "; it needs ", wanted,
        " numbers");
  check(dtype_of("statistics", statistics) == compute_type({dtype_of("h", h)}), name,
        ": statistics: dtype is not the one that h is computed in");
}

void run_backward(const char* name, const Backward& backward, const Tensor& h) {
  if (h.is_cuda()) {
    on_cuda(name, h, [&](auto stream) { return launch_backward(backward, rung(), stream); });
    return;
  }
  const auto kernel = KP_BEST(backward);
  const auto sum = KP_BEST(add_shares);
  const int64_t columns = backward.norm.columns;
  const int64_t elements = ceil_divide(backward.norm.rows, backward.parts) * columns;
  for_rows(backward.parts, elements, [&](int64_t begin, int64_t end) { kernel(backward, begin, end); });
  if (backward.dweight || backward.dbias) {
    for_rows(columns, backward.parts, [&](int64_t begin, int64_t end) { sum(backward, begin, end); });
  }
}

std::tuple<Tensor, Tensor, Tensor, Tensor> norm_act_backward(
    const Tensor& dy_given, const OptionalTensor& dh_given, const Tensor& h_given, const OptionalTensor& weight_given,
    const OptionalTensor& bias_given, const OptionalTensor& seed, const Tensor& statistics_given, double eps,
    double dropout_p, std::string norm, std::string activation, std::string x_dtype, std::string residual_dtype,
    bool need_dx, bool need_dresidual, bool need_dweight, bool need_dbias) {
  const char* const name = "norm_act_backward";
  const Rows rows = rows_of("h", h_given);
  check_cuda_size(name, "h", h_given, rows);
  check_backward(name, dy_given, dh_given, h_given, weight_given, bias_given, statistics_given, norm);
  const bool adds = !residual_dtype.empty();
  const DType x_type = dtype_named(name, "x_dtype", x_dtype);
  const DType residual_type = adds ? dtype_named(name, "residual_dtype", residual_dtype) : x_type;
  need_dresidual = need_dresidual && adds;
  need_dweight = need_dweight && weight_given.has_value();
  need_dbias = need_dbias && bias_given.has_value();
  const DType type = dtype_of("h", h_given);
  check(promote(x_type, residual_type) == type, name, ": x_dtype: given '", x_dtype, "', and residual_dtype '",
        residual_dtype, "'; promoted they must be the dtype of h");
  const DType compute = compute_type({type});
  const bool cuda = h_given.is_cuda();
  const Tensor h = as_contiguous(h_given), statistics = as_contiguous(statistics_given);
  const Tensor dy = as_contiguous(in_type(dy_given, type));
  const OptionalTensor dh = dh_given.has_value() ? OptionalTensor(as_contiguous(in_type(*dh_given, type))) : dh_given;
  const OptionalTensor weight = parameter_in("weight", weight_given, compute);
  const OptionalTensor bias = parameter_in("bias", bias_given, compute);

  Backward backward{};
  backward.norm = norm_of(name, rows, eps, dropout_p, seed, h, norm, activation);
  backward.norm.adds = adds;
  backward.dy = input("dy", dy);
  backward.dh = optional_input("dh", dh);
  backward.h = input("h", h);
  backward.weight = optional_input("weight", weight);
  backward.bias = optional_input("bias", bias);
  place_statistics(input("statistics", statistics), rows, backward.norm.layer, &backward.mean, &backward.rstd);
  backward.parts = parts_of(h, backward.norm);

  // CUDA kernels write gradients in the requested dtypes; those of the CPU backend may have to be converted.
  const auto of_rows = [&](bool need, DType wanted) {
    return empty(h, need ? sizes(h) : std::vector<int64_t>{0}, cuda ? wanted : type);
  };
  const auto of_columns = [&](bool need, const OptionalTensor& parameter) {
    const DType own = parameter.has_value() ? dtype_of("parameter", *parameter) : type;
    return empty(h, {need ? rows.columns : 0}, compute_type({own}) == compute ? own : compute);
  };
  const Tensor dx = of_rows(need_dx, x_type), dresidual = of_rows(need_dresidual, residual_type);
  const Tensor dweight = of_columns(need_dweight, weight_given), dbias = of_columns(need_dbias, bias_given);
  const Tensor weight_shares = empty(h, {need_dweight ? backward.parts * rows.columns : 0}, compute);
  const Tensor bias_shares = empty(h, {need_dbias ? backward.parts * rows.columns : 0}, compute);
  if (need_dx) backward.dx = output(dx);
  if (need_dresidual) backward.dresidual = output(dresidual);
  if (need_dweight) backward.dweight = output(dweight);
  if (need_dbias) backward.dbias = output(dbias);
  if (need_dweight) backward.weight_shares = output(weight_shares);
  if (need_dbias) backward.bias_shares = output(bias_shares);
  run_backward(name, backward, h);
  const DType weight_type = weight_given.has_value() ? dtype_of("weight", *weight_given) : type;
  const DType bias_type = bias_given.has_value() ? dtype_of("bias", *bias_given) : type;
  return {in_type(dx, x_type), in_type(dresidual, residual_type), in_type(dweight, weight_type),
          in_type(dbias, bias_type)};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(kernel_pytorch_cuda, library) {
  library.def(
      "norm_act(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, Tensor? seed, float eps, float dropout_p,"
      " str norm, str activation) -> (Tensor y, Tensor h, Tensor statistics)");
  library.def(
      "norm_act_backward(Tensor dy, Tensor? dh, Tensor h, Tensor? weight, Tensor? bias, Tensor? seed, Tensor statistics,"
      " float eps, float dropout_p, str norm, str activation, str x_dtype, str residual_dtype, bool need_dx,"
      " bool need_dresidual, bool need_dweight, bool need_dbias)"
      " -> (Tensor dx, Tensor dresidual, Tensor dweight, Tensor dbias)");
}

KP_IMPLEMENT(library) {
  library.impl("norm_act", TORCH_BOX(&norm_act));
  library.impl("norm_act_backward", TORCH_BOX(&norm_act_backward));
}

}  // namespace norm_act
}  // namespace kernel_pytorch
