// Operators kernel_pytorch_cuda::{bias_dropout_add, bias_dropout_add_backward}: schemas, checks, allocation, threads.

#include "kernel_pytorch/operator.h"

#include "bias_dropout_add.h"
#include "kernel_pytorch/parameters.h"

namespace kernel_pytorch {
namespace bias_dropout_add {

namespace {

Tensor bias_dropout_add(const Tensor& x_given, const OptionalTensor& bias_given, const Tensor& residual_given,
                        const OptionalTensor& seed, double p) {
  const char* const name = "bias_dropout_add";
  const Rows rows = rows_of("x", x_given);
  check_floating("x", x_given);
  check_parameter(name, "bias", bias_given, x_given);
  check_like(name, "residual", residual_given, "x", x_given);
  const DType type = promote(dtype_of("x", x_given), dtype_of("residual", residual_given));
  Tensor x = as_contiguous(x_given), residual = as_contiguous(residual_given);
  if (!x.is_cuda()) {
    x = in_type(x, type);
    residual = in_type(residual, type);
  }
  const OptionalTensor bias = parameter_in("bias", bias_given, compute_type({type}));
  const Tensor y = empty(x, sizes(x), type);
  Forward forward{};
  forward.x = input("x", x);
  forward.bias = optional_input("bias", bias);
  forward.residual = input("residual", residual);
  forward.y = output(y);
  forward.dropout = dropout_of(name, "p", p, seed, x);
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

// Number of partial sums of dbias: each covers 16 rows, on CUDA more if there would be more partial sums than a large
// GPU needs.
int64_t parts_of(const Tensor& dy, Rows rows) {
  const int64_t parts = larger(1, ceil_divide(rows.rows, 16));
  return dy.is_cuda() ? smaller(parts, 512) : parts;
}

std::tuple<Tensor, Tensor> bias_dropout_add_backward(const Tensor& dy_given, const OptionalTensor& bias,
                                                     const OptionalTensor& seed, double p, std::string x_dtype,
                                                     bool need_dx, bool need_dbias) {
  const char* const name = "bias_dropout_add_backward";
  const Rows rows = rows_of("dy", dy_given);
  check_cuda_size(name, "dy", dy_given, rows);
  check_floating("dy", dy_given);
  check_parameter(name, "bias", bias, dy_given);
  const DType x_type = dtype_named(name, "x_dtype", x_dtype);
  need_dbias = need_dbias && bias.has_value();
  const Tensor dy = as_contiguous(dy_given);
  const DType type = dtype_of("dy", dy), compute = compute_type({type});
  const DType bias_type = bias.has_value() ? dtype_of("bias", *bias) : type;
  Backward backward{};
  backward.dy = input("dy", dy);
  backward.dropout = dropout_of(name, "p", p, seed, dy);
  backward.rows = rows.rows;
  backward.columns = rows.columns;
  backward.parts = parts_of(dy, rows);
  // CUDA kernels write gradients in the requested dtypes; those of the CPU backend may have to be converted.
  const Tensor dx = empty(dy, need_dx ? sizes(dy) : std::vector<int64_t>{0}, dy.is_cuda() ? x_type : type);
  const Tensor dbias = empty(dy, {need_dbias ? rows.columns : 0}, compute_type({bias_type}) == compute ? bias_type : compute);
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
  return {in_type(dx, x_type), in_type(dbias, bias_type)};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(kernel_pytorch_cuda, library) {
  library.def(
      "bias_dropout_add(Tensor x, Tensor? bias, Tensor residual, Tensor? seed, float p) -> Tensor");
  library.def(
      "bias_dropout_add_backward(Tensor dy, Tensor? bias, Tensor? seed, float p, str x_dtype, bool need_dx,"
      " bool need_dbias) -> (Tensor dx, Tensor dbias)");
}

KP_IMPLEMENT(library) {
  library.impl("bias_dropout_add", TORCH_BOX(&bias_dropout_add));
  library.impl("bias_dropout_add_backward", TORCH_BOX(&bias_dropout_add_backward));
}

}  // namespace bias_dropout_add
}  // namespace kernel_pytorch
