// Activations on vectors, each with its derivative; the compiler removes the derivative where it is not used.
//
// Their papers are listed in packages/fused-ln-act/src/kernel_pytorch/fused_ln_act/activations.py. `gelu_tanh` computes
// x (1 + tanh(y)) / 2 as x sigmoid(2 y), which avoids cancellation.
#pragma once

#include "kernel_pytorch/activation.h"
#include "kernel_pytorch/cpu/math.h"

namespace kernel_pytorch {
namespace {

template <typename Compute>
struct Activated {
  Vector<Compute> value;
  Vector<Compute> slope;
};

// z sigmoid(alpha z)
template <typename Compute>
KP_INLINE Activated<Compute> swish(Vector<Compute> z, Compute alpha) {
  const Sigmoid<Compute> s = sigmoid<Compute>(alpha * z);
  return {z * s.value, s.value + z * (alpha * s.slope)};
}

// `alpha` is the slope in silu's sigmoid; other activations ignore it.
template <Activation A, typename Compute>
KP_INLINE Activated<Compute> activate(Vector<Compute> z, Compute alpha = Compute{1}) {
  const Vector<Compute> zero = {};
  const Vector<Compute> one = broadcast(Compute{1});
  if constexpr (A == Activation::kGelu) {
    const Normal<Compute> n = normal(z);
    return {z * n.distribution, n.distribution + z * n.density};
  } else if constexpr (A == Activation::kGeluTanh) {
    constexpr Compute kTwice = static_cast<Compute>(2 * 0.7978845608028654);
    // Far below 64 the sigmoid is already 0 or 1; the clamp keeps the squares from overflowing.
    const Vector<Compute> x = at_least(at_most(z, Compute{64}), Compute{-64});
    const Vector<Compute> squares = static_cast<Compute>(0.044715) * x * x;
    const Sigmoid<Compute> s = sigmoid<Compute>(kTwice * (x + squares * x));
    return {z * s.value, s.value + z * s.slope * (kTwice * (one + Compute{3} * squares))};
  } else if constexpr (A == Activation::kSilu) {
    return swish<Compute>(z, alpha);
  } else if constexpr (A == Activation::kRelu) {
    return {at_least(z, Compute{0}), z <= zero ? zero : one};  // the slope at NaN is one, as in PyTorch
  } else if constexpr (A == Activation::kReluSquared) {
    const Vector<Compute> r = at_least(z, Compute{0});
    return {r * r, r + r};
  } else if constexpr (A == Activation::kQuickGelu) {
    return swish<Compute>(z, static_cast<Compute>(1.702));
  } else if constexpr (A == Activation::kTanh) {
    const Tanh<Compute> t = tanh(z);
    return {t.value, t.slope};
  } else if constexpr (A == Activation::kSigmoid) {
    const Sigmoid<Compute> s = sigmoid<Compute>(z);
    return {s.value, s.slope};
  } else {
    return {z, one};
  }
}

}  // namespace
}  // namespace kernel_pytorch
