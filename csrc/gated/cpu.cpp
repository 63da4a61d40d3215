// CPU backend of the gated linear units.

#include "kernel_pytorch/cpu/activations.h"
#include "kernel_pytorch/cpu/types.h"
#include "gated.h"

namespace kernel_pytorch {
namespace gated {

namespace {

template <Activation A, bool kLimited, typename T>
void forward_tiles(const Forward& f, int64_t begin, int64_t end) {
  using Compute = ComputeFor<T>;
  const Compute alpha = static_cast<Compute>(f.function.alpha);
  [[maybe_unused]] const Compute limit = static_cast<Compute>(f.function.limit);
  const Compute offset = static_cast<Compute>(f.function.offset);
  for (int64_t index = begin; index < end; ++index) {
    const Tile tile = tile_at(index, f.shape.columns, kTileColumns);
    const int64_t start = row_offset(tile.row, f.shape.stride) + tile.columns.begin;
    const T* gate = static_cast<const T*>(f.gate.data) + start;
    const T* up = static_cast<const T*>(f.up.data) + start;
    T* y = static_cast<T*>(f.y.data) + row_offset(tile.row, f.shape.columns) + tile.columns.begin;
    for_vectors<Compute>(tile.columns.end - tile.columns.begin, [&](int64_t column, auto lanes) {
      Vector<Compute> z = load(gate + column, lanes), u = load(up + column, lanes);
      if constexpr (kLimited) {
        z = at_most(z, limit);
        u = at_least(at_most(u, limit), -limit);
      }
      store(y + column, activate<A, Compute>(z, alpha).value * (u + offset), lanes);
    });
  }
}

template <Activation A, bool kLimited, typename T>
void backward_tiles(const Backward& b, int64_t begin, int64_t end) {
  using Compute = ComputeFor<T>;
  const Compute alpha = static_cast<Compute>(b.function.alpha);
  [[maybe_unused]] const Compute limit = static_cast<Compute>(b.function.limit);
  const Compute offset = static_cast<Compute>(b.function.offset);
  [[maybe_unused]] const Vector<Compute> limits = broadcast(limit), zero = {};
  for (int64_t index = begin; index < end; ++index) {
    const Tile tile = tile_at(index, b.shape.columns, kTileColumns);
    const int64_t start = row_offset(tile.row, b.shape.stride) + tile.columns.begin;
    const T* gate = static_cast<const T*>(b.gate.data) + start;
    const T* up = static_cast<const T*>(b.up.data) + start;
    const T* dy = static_cast<const T*>(b.dy.data) + row_offset(tile.row, b.shape.columns) + tile.columns.begin;
    T* dgate = b.dgate ? static_cast<T*>(b.dgate.data) + start : nullptr;
    T* dup = b.dup ? static_cast<T*>(b.dup.data) + start : nullptr;
    for_vectors<Compute>(tile.columns.end - tile.columns.begin, [&](int64_t column, auto lanes) {
      const Vector<Compute> incoming = load(dy + column, lanes);
      const Vector<Compute> given_gate = load(gate + column, lanes), given_up = load(up + column, lanes);
      Vector<Compute> z = given_gate, u = given_up;
      if constexpr (kLimited) {
        z = at_most(z, limit);
        u = at_least(at_most(u, limit), -limit);
      }
      const Activated<Compute> activated = activate<A, Compute>(z, alpha);
      Vector<Compute> gate_gradient = incoming * (u + offset) * activated.slope;
      Vector<Compute> up_gradient = incoming * activated.value;
      // As in PyTorch, clamped numbers have zero gradient, and with a limit NaN does too. relu's gradient is set to
      // zero below zero, where zero times an infinite up would be NaN.
      if constexpr (kLimited) {
        gate_gradient = given_gate <= limits ? gate_gradient : zero;
        up_gradient = absolute<Compute>(given_up) <= limits ? up_gradient : zero;
      }
      if constexpr (A == Activation::kRelu) gate_gradient = given_gate <= zero ? zero : gate_gradient;
      if (dgate != nullptr) store(dgate + column, gate_gradient, lanes);
      if (dup != nullptr) store(dup + column, up_gradient, lanes);
    });
  }
}

// Calls `run(activation, limited, type)` with compile-time arguments.
template <typename Run>
void with_choices(DType dtype, const Function& function, const Run& run) {
  with_type(dtype, [&](auto type) {
    with_gate(function.activation, [&](auto a) {
      if (function.limit < __builtin_inf()) return run(a, std::true_type{}, type);
      return run(a, std::false_type{}, type);
    });
  });
}

}  // namespace

namespace KP_ISA {

void forward(const Forward& f, int64_t begin, int64_t end) {
  with_choices(f.gate.dtype, f.function, [&](auto a, auto limited, auto type) {
    forward_tiles<decltype(a)::value, decltype(limited)::value, typename decltype(type)::type>(f, begin, end);
  });
}

void backward(const Backward& b, int64_t begin, int64_t end) {
  with_choices(b.gate.dtype, b.function, [&](auto a, auto limited, auto type) {
    backward_tiles<decltype(a)::value, decltype(limited)::value, typename decltype(type)::type>(b, begin, end);
  });
}

}  // namespace KP_ISA
}  // namespace gated
}  // namespace kernel_pytorch
