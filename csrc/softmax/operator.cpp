// Operators kernel_pytorch_cuda::{softmax, softmax_backward}: schemas, checks, allocation, threads.

#include "kernel_pytorch/operator.h"
#include "softmax.h"

namespace kernel_pytorch {
namespace softmax {

namespace {

void check_mask(const char* name, const Tensor& mask, const Tensor& x) {
  check_beside("mask", mask, x);
  dtype_of("mask", mask);
  bool fits = mask.dim() <= x.dim();
  for (int64_t i = 1; fits && i <= mask.dim(); ++i) {
    const int64_t size = mask.size(mask.dim() - i);
    fits = size == 1 || size == x.size(x.dim() - i);
  }
  check(fits, name, ": mask: shape is ", shape(mask), "; it must broadcast to that of x, ", shape(x));
}

// Describes how a contiguous mask is broadcast to the rows of x.
Broadcast broadcast_of(const Tensor& mask, const Tensor& x) {
  Broadcast b{};
  const int64_t missing = x.dim() - mask.dim();
  const int64_t last = mask.dim() > 0 ? mask.size(mask.dim() - 1) : 1;
  b.column_step = last == x.size(x.dim() - 1) ? 1 : 0;
  for (int64_t i = 0; i + 1 < x.dim(); ++i) {
    const bool repeated = i < missing || mask.size(i - missing) == 1;
    int64_t step = repeated ? 0 : 1;
    for (int64_t j = i - missing + 1; !repeated && j < mask.dim(); ++j) step *= mask.size(j);
    append_dimension(b, x.size(i), step);
  }
  return b;
}

// Converts a mask to a dtype that the kernels support for x of dtype `type`.
OptionalTensor mask_beside(const OptionalTensor& mask, DType type) {
  if (!mask.has_value()) return mask;
  const DType given = dtype_of("mask", *mask);
  const bool taken = given == DType::kBool || given == type || given == compute_type({type});
  return as_contiguous(taken ? *mask : in_type(*mask, compute_type({type})));
}

Tensor softmax(const Tensor& x_given, const OptionalTensor& mask_given, double scale) {
  const char* const name = "softmax";
  const Rows rows = rows_of("x", x_given);
  check_floating("x", x_given);
  check_cuda_size(name, "x", x_given, rows);
  DType type = dtype_of("x", x_given);
  DType y_type = type;
  if (mask_given.has_value()) {
    check_mask(name, *mask_given, x_given);
    const DType given = dtype_of("mask", *mask_given);
    if (given != DType::kBool) y_type = promote(type, given);
  }
  if (y_type == DType::kFloat64) type = y_type;  // due to a float64 mask
  const Tensor x = in_type(as_contiguous(x_given), type);
  const OptionalTensor mask = mask_beside(mask_given, type);
  const Tensor y = empty(x, sizes(x), y_type);
  Forward forward{};
  forward.x = input("x", x);
  if (mask.has_value()) {
    forward.mask = input("mask", *mask);
    forward.broadcast = broadcast_of(*mask, x);
  }
  forward.y = output(y);
  forward.rows = rows.rows;
  forward.columns = rows.columns;
  forward.scale = scale;
  if (x.is_cuda()) {
    on_cuda(name, x, [&](auto stream) { return launch_forward(forward, rung(), stream); });
  } else {
    const auto kernel = KP_BEST(forward);
    for_rows(rows.rows, rows.columns, [&](int64_t begin, int64_t end) { kernel(forward, begin, end); });
  }
  return y;
}

void run_backward(const char* name, const Backward& backward, const Tensor& y) {
  if (y.is_cuda()) {
    on_cuda(name, y, [&](auto stream) { return launch_backward(backward, stream); });
    return;
  }
  const auto kernel = KP_BEST(backward);
  const auto sum = KP_BEST(mask_gradient);
  for_rows(backward.rows, backward.columns, [&](int64_t begin, int64_t end) { kernel(backward, begin, end); });
  if (!backward.dmask) return;
  const int64_t mask_rows = broadcast_rows(backward.broadcast);
  const int64_t elements = larger(1, broadcast_uses(backward.broadcast)) * smaller(backward.columns, kTileColumns);
  for_rows(tiles_of(mask_rows, backward.columns, kTileColumns), elements,
           [&](int64_t begin, int64_t end) { sum(backward, begin, end); });
}

std::tuple<Tensor, Tensor> softmax_backward(const Tensor& dy_given, const Tensor& y_given,
                                            const OptionalTensor& mask, double scale, bool need_dx, bool need_dmask) {
  const char* const name = "softmax_backward";
  const Rows rows = rows_of("y", y_given);
  check_floating("y", y_given);
  check_cuda_size(name, "y", y_given, rows);
  check_beside("dy", dy_given, y_given);
  check_floating("dy", dy_given);
  check(sizes(dy_given) == sizes(y_given), name, ": dy: shape is ", shape(dy_given), "; it must be that of y, ",
        shape(y_given));
  if (mask.has_value()) check_mask(name, *mask, y_given);
  need_dmask = need_dmask && mask.has_value();
  if (need_dmask) check_floating("mask", *mask);
  const DType type = dtype_of("y", y_given), compute = compute_type({type});
  const Tensor y = as_contiguous(y_given);
  const Tensor dy = in_type(as_contiguous(dy_given), type);
  const Tensor dx = empty(y, need_dx ? sizes(y) : std::vector<int64_t>{0}, type);
  Backward backward{};
  backward.dy = input("dy", dy);
  backward.y = input("y", y);
  backward.rows = rows.rows;
  backward.columns = rows.columns;
  backward.scale = scale;
  if (need_dx) backward.dx = output(dx);
  if (need_dmask) backward.broadcast = broadcast_of(*mask, y);
  // dz sums to zero along a row, since y sums to one: a mask that is broadcast along the row has a zero gradient.
  const bool summed = need_dmask && rows.rows > 0 && backward.broadcast.column_step != 0;
  const Tensor dots = empty(y, {summed ? rows.rows : 0}, compute);
  // On CUDA the kernel writes the dtype of the mask, since a conversion would take another launch.
  const bool direct = y.is_cuda() && need_dmask && dtype_of("mask", *mask) == type;
  const Tensor dmask = empty(y, need_dmask ? sizes(*mask) : std::vector<int64_t>{0}, direct ? type : compute);
  if (summed) {
    backward.dots = output(dots);
    backward.dmask = output(dmask);
  } else if (need_dmask) {
    torch::stable::fill_(dmask, 0.0);
  }
  if (rows.rows > 0 && (need_dx || summed)) run_backward(name, backward, y);
  return {dx, in_type(dmask, mask.has_value() ? dtype_of("mask", *mask) : type)};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(kernel_pytorch_cuda, library) {
  library.def("softmax(Tensor x, Tensor? mask, float scale) -> Tensor");
  library.def(
      "softmax_backward(Tensor dy, Tensor y, Tensor? mask, float scale, bool need_dx, bool need_dmask)"
      " -> (Tensor dx, Tensor dmask)");
}

KP_IMPLEMENT(library) {
  library.impl("softmax", TORCH_BOX(&softmax));
  library.impl("softmax_backward", TORCH_BOX(&softmax_backward));
}

}  // namespace softmax
}  // namespace kernel_pytorch
