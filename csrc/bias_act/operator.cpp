// Operators kernel_pytorch_cuda::{bias_act, bias_act_backward}: schemas, checks, allocation, threads.

#include "bias_act.h"
#include "kernel_pytorch/operator.h"
#include "kernel_pytorch/parameters.h"

namespace kernel_pytorch {
namespace bias_act {

namespace {

// Converts a bias to a dtype that the kernels support for x of dtype `type`.
OptionalTensor bias_beside(const OptionalTensor& bias, DType type, bool cuda) {
  if (!bias.has_value()) return bias;
  const DType given = dtype_of("bias", *bias), compute = compute_type({type});
  if (given == type || given == compute || (!cuda && compute_type({given}) == compute)) return as_contiguous(bias);
  return as_contiguous(in_type(*bias, compute));
}

// Number of partial sums of dbias: on the CPU each covers about 64 rows; on CUDA 16 rows, or more if there would be
// more partial sums than a large GPU needs.
int64_t parts_of(const Tensor& x, Rows rows) {
  if (!x.is_cuda()) return larger(1, ceil_divide(rows.rows, 64));
  return smaller(larger(1, ceil_divide(rows.rows, 16)), 512);
}

Tensor bias_act(const Tensor& x_given, const OptionalTensor& bias_given, std::string activation) {
  const char* const name = "bias_act";
  Rows rows = rows_of("x", x_given);
  check_floating("x", x_given);
  check_parameter(name, "bias", bias_given, x_given);
  const Tensor x = as_contiguous(x_given);
  const DType type = dtype_of("x", x);
  const OptionalTensor bias = bias_beside(bias_given, type, x.is_cuda());
  // Without a bias the function is elementwise, so the tensor is treated as one row.
  if (!bias.has_value() && rows.rows > 0) rows = {1, x.numel()};
  const Tensor y = empty(x, sizes(x), type);
  Forward forward{};
  forward.activation = activation_of(name, activation);
  forward.x = input("x", x);
  if (bias.has_value()) forward.bias = input("bias", *bias);
  forward.y = output(y);
  forward.rows = rows.rows;
  forward.columns = rows.columns;
  if (x.is_cuda()) {
    on_cuda(name, x, [&](auto stream) { return launch_forward(forward, rung(), stream); });
  } else {
    const auto kernel = KP_BEST(forward);
    for_tiles(rows.rows, rows.columns, kTileColumns, [&](int64_t begin, int64_t end) { kernel(forward, begin, end); });
  }
  return y;
}

void check_backward(const char* name, const Tensor& dy, const OptionalTensor& x, const OptionalTensor& bias,
                    const std::string& activation) {
  check_floating("dy", dy);
  check(x.has_value() || activation == "identity", name, ": x: given None; only 'identity' needs none");
  if (x.has_value()) {
    check_beside("x", *x, dy);
    check_floating("x", *x);
    check(sizes(*x) == sizes(dy), name, ": x: shape is ", shape(*x), "; it must be that of dy, ", shape(dy));
  }
  check_parameter(name, "bias", bias, dy);
}

std::tuple<Tensor, Tensor> bias_act_backward(const Tensor& dy_given, const OptionalTensor& x_given,
                                             const OptionalTensor& bias_given, std::string activation, bool need_dx,
                                             bool need_dbias) {
  const char* const name = "bias_act_backward";
  const Rows rows = rows_of("dy", dy_given);
  check_cuda_size(name, "dy", dy_given, rows);
  check_backward(name, dy_given, x_given, bias_given, activation);
  need_dbias = need_dbias && bias_given.has_value();
  const DType type = x_given.has_value() ? dtype_of("x", *x_given) : dtype_of("dy", dy_given);
  const DType compute = compute_type({type});
  const Tensor dy = in_type(as_contiguous(dy_given), type);
  const OptionalTensor x = as_contiguous(x_given);
  const OptionalTensor bias = bias_beside(bias_given, type, dy.is_cuda());
  const DType bias_type = bias_given.has_value() ? dtype_of("bias", *bias_given) : type;
  const bool direct = compute_type({bias_type}) == compute;
  Backward backward{};
  backward.activation = activation_of(name, activation);
  backward.dy = input("dy", dy);
  if (x.has_value()) backward.x = input("x", *x);
  if (bias.has_value()) backward.bias = input("bias", *bias);
  backward.rows = rows.rows;
  backward.columns = rows.columns;
  backward.parts = parts_of(dy, rows);
  const Tensor dx = empty(dy, need_dx ? sizes(dy) : std::vector<int64_t>{0}, type);
  const Tensor dbias = empty(dy, {need_dbias ? rows.columns : 0}, direct ? bias_type : compute);
  const Tensor shares = empty(dy, {need_dbias ? backward.parts * rows.columns : 0}, compute);
  if (need_dx) backward.dx = output(dx);
  if (need_dbias) {
    backward.dbias = output(dbias);
    backward.shares = output(shares);
  }
  if (dy.is_cuda()) {
    on_cuda(name, dy, [&](auto stream) { return launch_backward(backward, stream); });
  } else {
    const auto kernel = KP_BEST(backward);
    const auto sum = KP_BEST(add_shares);
    const int64_t elements = ceil_divide(rows.rows, backward.parts) * rows.columns;
    for_rows(backward.parts, elements, [&](int64_t begin, int64_t end) { kernel(backward, begin, end); });
    if (need_dbias) {
      for_rows(rows.columns, backward.parts, [&](int64_t begin, int64_t end) { sum(backward, begin, end); });
    }
  }
  return {dx, in_type(dbias, bias_type)};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(kernel_pytorch_cuda, library) {
  library.def("bias_act(Tensor x, Tensor? bias, str activation) -> Tensor");
  library.def(
      "bias_act_backward(Tensor dy, Tensor? x, Tensor? bias, str activation, bool need_dx, bool need_dbias)"
      " -> (Tensor dx, Tensor dbias)");
}

KP_IMPLEMENT(library) {
  library.impl("bias_act", TORCH_BOX(&bias_act));
  library.impl("bias_act_backward", TORCH_BOX(&bias_act_backward));
}

}  // namespace bias_act
}  // namespace kernel_pytorch
