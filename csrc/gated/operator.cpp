// Operators kernel_pytorch_cuda::{gated, gated_backward}: schemas, checks, allocation, threads.

#include "gated.h"

#include <limits>

#include "kernel_pytorch/operator.h"

namespace kernel_pytorch {
namespace gated {

namespace {

Function function_of(const char* name, const std::string& activation, double alpha, std::optional<double> limit,
                     double offset) {
  const double most = limit.value_or(std::numeric_limits<double>::infinity());
  check(most > 0.0, name, ": limit: given ", most, "; it must be positive, or None");
  for (const Activation allowed : {Activation::kSilu, Activation::kGelu, Activation::kGeluTanh, Activation::kRelu}) {
    if (activation == kActivationNames[static_cast<int>(allowed)]) return {allowed, alpha, most, offset};
  }
  fail(name, ": activation: given '", activation, "'; allowed are 'silu', 'gelu', 'gelu_tanh', 'relu'");
}

// Gate and up for the kernels: contiguous, of one dtype; without `up`, gate holds both.
struct Halves {
  Tensor gate;
  OptionalTensor up;
  DType type;
  Shape shape;
  std::vector<int64_t> size;  // of the result

  int64_t up_offset() const { return up.has_value() ? 0 : shape.columns * size_of(type); }
};

Halves halves_of(const char* name, const Tensor& gate, const OptionalTensor& up) {
  const Rows rows = rows_of("gate", gate);
  check_floating("gate", gate);
  DType type = dtype_of("gate", gate);
  std::vector<int64_t> size = sizes(gate);
  if (!up.has_value()) {
    check(rows.columns % 2 == 0, name, ": gate: shape is ", shape(gate), "; packed with up, its last dimension must be even");
    const int64_t columns = rows.columns / 2;
    size.back() = columns;
    return {as_contiguous(gate), std::nullopt, type, {rows.rows, columns, rows.columns}, size};
  }
  check_beside("up", *up, gate);
  check_floating("up", *up);
  check(sizes(*up) == size, name, ": up: shape is ", shape(*up), "; it must be that of gate, ", shape(gate));
  type = promote(type, dtype_of("up", *up));
  // The function is elementwise, so the tensors are treated as one row.
  const Shape flat = {rows.rows == 0 ? 0 : 1, gate.numel(), gate.numel()};
  return {in_type(as_contiguous(gate), type), in_type(as_contiguous(*up), type), type, flat, size};
}

Input behind(const Tensor& tensor, DType type, int64_t bytes) {
  return {static_cast<const char*>(data_of("gate", tensor)) + bytes, type};
}

Output output_behind(const Tensor& tensor, DType type, int64_t bytes) {
  return {static_cast<char*>(tensor.mutable_data_ptr()) + bytes, type};
}

Tensor gated(const Tensor& gate, const OptionalTensor& up, std::string activation, double alpha,
             std::optional<double> limit, double offset) {
  const char* const name = "gated";
  const Halves halves = halves_of(name, gate, up);
  const Function function = function_of(name, activation, alpha, limit, offset);
  const Tensor y = empty(gate, halves.size, halves.type);
  Forward forward{};
  forward.gate = behind(halves.gate, halves.type, 0);
  forward.up = behind(halves.up.has_value() ? *halves.up : halves.gate, halves.type, halves.up_offset());
  forward.y = output(y);
  forward.shape = halves.shape;
  forward.function = function;
  if (gate.is_cuda()) {
    on_cuda(name, gate, [&](auto stream) { return launch_forward(forward, rung(), stream); });
  } else {
    const auto kernel = KP_BEST(forward);
    for_tiles(halves.shape.rows, halves.shape.columns, kTileColumns,
              [&](int64_t begin, int64_t end) { kernel(forward, begin, end); });
  }
  return y;
}

std::tuple<Tensor, Tensor> gated_backward(const Tensor& dy_given, const Tensor& gate, const OptionalTensor& up,
                                          std::string activation, double alpha, std::optional<double> limit,
                                          double offset, bool need_dgate, bool need_dup) {
  const char* const name = "gated_backward";
  const Halves halves = halves_of(name, gate, up);
  const Function function = function_of(name, activation, alpha, limit, offset);
  const bool packed = !up.has_value();
  need_dup = need_dup && !packed;
  check_beside("dy", dy_given, gate);
  check_floating("dy", dy_given);
  check(sizes(dy_given) == halves.size, name, ": dy: shape is ", shape(dy_given), "; it must be that of the result");
  const Tensor dy = in_type(as_contiguous(dy_given), halves.type);
  const Tensor dgate = empty(gate, need_dgate ? sizes(gate) : std::vector<int64_t>{0}, halves.type);
  const Tensor dup = empty(gate, need_dup ? sizes(gate) : std::vector<int64_t>{0}, halves.type);
  Backward backward{};
  backward.dy = input("dy", dy);
  backward.gate = behind(halves.gate, halves.type, 0);
  backward.up = behind(packed ? halves.gate : *halves.up, halves.type, halves.up_offset());
  if (need_dgate) backward.dgate = output(dgate);
  if (need_dup) backward.dup = output(dup);
  if (packed && need_dgate) backward.dup = output_behind(dgate, halves.type, halves.up_offset());
  backward.shape = halves.shape;
  backward.function = function;
  if (gate.is_cuda()) {
    on_cuda(name, gate, [&](auto stream) { return launch_backward(backward, stream); });
  } else {
    const auto kernel = KP_BEST(backward);
    for_tiles(halves.shape.rows, halves.shape.columns, kTileColumns,
              [&](int64_t begin, int64_t end) { kernel(backward, begin, end); });
  }
  const DType up_type = packed ? halves.type : dtype_of("up", *up);
  return {in_type(dgate, dtype_of("gate", gate)), in_type(dup, up_type)};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(kernel_pytorch_cuda, library) {
  library.def(
      "gated(Tensor gate, Tensor? up, str activation, float alpha, float? limit, float offset)"
      " -> Tensor");
  library.def(
      "gated_backward(Tensor dy, Tensor gate, Tensor? up, str activation, float alpha, float? limit, float offset,"
      " bool need_dgate, bool need_dup) -> (Tensor dgate, Tensor dup)");
}

KP_IMPLEMENT(library) {
  library.impl("gated", TORCH_BOX(&gated));
  library.impl("gated_backward", TORCH_BOX(&gated_backward));
}

}  // namespace gated
}  // namespace kernel_pytorch
