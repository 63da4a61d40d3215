// The activations on the device, each with its derivative; whoever does not use that does not compute it.
#pragma once

#include "kernel_pytorch/activation.h"

namespace kernel_pytorch {

struct Activated {
  float value;
  float slope;
};

// A sigmoid and its derivative s (1 - s), both made of e = exp(-|x|), which neither overflows nor cancels.
__device__ __forceinline__ Activated sigmoid(float x) {
  const float e = expf(-fabsf(x));
  const float reciprocal = __frcp_rn(1.0f + e);
  const float small = e * reciprocal;
  return {x < 0.0f ? small : reciprocal, small * reciprocal};
}

// z sigmoid(alpha z)
__device__ __forceinline__ Activated swish(float z, float alpha) {
  const Activated s = sigmoid(alpha * z);
  return {z * s.value, s.value + z * (alpha * s.slope)};
}

// Not above a limit; NaN stays, which fminf would drop.
__device__ __forceinline__ float at_most(float x, float limit) { return x > limit ? limit : x; }

__device__ __forceinline__ float at_least(float x, float limit) { return x < limit ? limit : x; }

// `alpha` is the slope of the sigmoid of silu, and nothing to the others.
template <Activation A>
__device__ __forceinline__ Activated activate(float z, float alpha = 1.0f) {
  if constexpr (A == Activation::kGelu) {
    const float distribution = 0.5f * erfcf(z * -0.70710678f);
    return {z * distribution, distribution + z * (0.39894228f * expf(-0.5f * z * z))};
  } else if constexpr (A == Activation::kGeluTanh) {
    constexpr float kTwice = 1.59576912f;  // 2 sqrt(2 / pi)
    // At 64 the sigmoid has long been 0 or 1; a square must not overflow.
    const float x = at_least(at_most(z, 64.0f), -64.0f);
    const float squares = 0.044715f * x * x;
    const Activated s = sigmoid(kTwice * (x + squares * x));
    return {z * s.value, s.value + z * s.slope * (kTwice * (1.0f + 3.0f * squares))};
  } else if constexpr (A == Activation::kSilu) {
    return swish(z, alpha);
  } else if constexpr (A == Activation::kRelu) {
    return {at_least(z, 0.0f), z > 0.0f ? 1.0f : 0.0f};
  } else if constexpr (A == Activation::kReluSquared) {
    const float r = at_least(z, 0.0f);
    return {r * r, r + r};
  } else if constexpr (A == Activation::kQuickGelu) {
    return swish(z, 1.702f);
  } else if constexpr (A == Activation::kTanh) {
    const float t = tanhf(z);
    return {t, 1.0f - t * t};
  } else if constexpr (A == Activation::kSigmoid) {
    return sigmoid(z);
  } else {
    return {z, 1.0f};
  }
}

}  // namespace kernel_pytorch
