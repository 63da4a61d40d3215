// Activations on the device, each with its derivative; the compiler removes the derivative where it is not used.
#pragma once

#include "kernel_pytorch/activation.h"
#include "kernel_pytorch/cuda/math.cuh"

namespace kernel_pytorch {

struct Activated {
  float value;
  float slope;
};

// A sigmoid and its derivative s (1 - s). kHalf, here and below: results are rounded to 16 bits. Then 1 - s is accurate
// enough for s near one, and only the derivative uses e = exp(-|x|), which neither overflows nor cancels.
template <bool kHalf>
__device__ __forceinline__ Activated sigmoid(float x) {
  const float e = exponential<kHalf>(-fabsf(x));
  const float reciprocal = kHalf ? reciprocal_once(1.0f + e) : __frcp_rn(1.0f + e);
  const float small = e * reciprocal;
  if constexpr (kHalf) return {reciprocal_once(1.0f + exponential<kHalf>(-x)), small * reciprocal};
  return {x < 0.0f ? small : reciprocal, small * reciprocal};
}

// z sigmoid(u), where `slope` is the derivative of u. With kHalf, u may be infinite for a finite z.
template <bool kHalf>
__device__ __forceinline__ Activated gated_by_sigmoid(float z, float u, float slope) {
  const Activated s = sigmoid<kHalf>(u);
  const float value = z * s.value;
  if constexpr (kHalf) return {value, s.value + value * ((1.0f - s.value) * slope)};
  return {value, s.value + z * s.slope * slope};
}

// z sigmoid(alpha z)
template <bool kHalf>
__device__ __forceinline__ Activated swish(float z, float alpha) {
  return gated_by_sigmoid<kHalf>(z, alpha * z, alpha);
}

// min(x, limit), except that NaN is kept, which fminf would drop.
__device__ __forceinline__ float at_most(float x, float limit) { return x > limit ? limit : x; }

__device__ __forceinline__ float at_least(float x, float limit) { return x < limit ? limit : x; }

// gelu for results that are rounded to 16 bits. With a = |z| and e = exp(-a^2 / 2) the normal distribution is
// Phi(-a) = e ratio. The ratio (Mills' ratio times the density at zero) falls slowly from 1/2, and is a polynomial in
// a / (1 + 0.35 a), the substitution of Hastings (Approximations for Digital Computers, 1955; Abramowitz and Stegun
// 7.1.26). Its coefficients minimize the largest relative error: 1e-5 up to 4.4, 8e-5 up to 13.4, where only bfloat16
// is relevant. The error is relative, so the tails stay accurate. From 20 on e is zero; the ratio is that of 20, since
// it would be NaN at infinity. At minus infinity it is NaN, as is PyTorch's gelu (infinity times zero).
__device__ __forceinline__ Activated gelu_rounded(float z) {
  const float a = fabsf(fminf(z, 20.0f));
  const float e = exp2_once(-0.72134752f * a * a);
  const float v = a * reciprocal_once(1.0f + 0.35f * a);
  float ratio = -0.005882052034941875f + v * (-0.0033635242181831795f + v * 0.0005465117877280249f);
  ratio = 0.49999678379646084f + v * (-0.3988568750021885f + v * (0.10991961169320379f + v * ratio));
  const float slope = e * (0.39894228f * fabsf(z) - ratio);  // Phi(z) + z phi(z) = [z > 0] + sign(z) slope
  return {(z < 0.0f ? 0.0f : z) - a * (e * ratio), z > 0.0f ? 1.0f + slope : -slope};
}

// tanh for results that are rounded to 16 bits: below 1/8 by its series, with a relative error of 4e-7.
__device__ __forceinline__ float tanh_rounded(float z) {
  const float t = z * z;
  const float small = z * (1.0f + t * (-0.33333333f + t * 0.13333333f));
  const float large = 1.0f - 2.0f * reciprocal_once(1.0f + exp2_once(2.88539008f * z));
  return fabsf(z) < 0.125f ? small : large;
}

// `alpha` is the slope in silu's sigmoid; other activations ignore it.
template <Activation A, bool kHalf>
__device__ __forceinline__ Activated activate(float z, float alpha = 1.0f) {
  if constexpr (A == Activation::kGelu && kHalf) {
    return gelu_rounded(z);
  } else if constexpr (A == Activation::kGelu) {
    const float distribution = 0.5f * erfcf(z * -0.70710678f);
    return {z * distribution, distribution + z * (0.39894228f * expf(-0.5f * z * z))};
  } else if constexpr (A == Activation::kGeluTanh) {
    constexpr float kTwice = 1.59576912f, kCubed = 0.07135481f;  // 2 sqrt(2 / pi), and the same times 0.044715
    // From 20 on the sigmoid is 0 or 1. A square multiplied by its remainder must not overflow.
    if constexpr (kHalf) {
      const float square = z * z;
      return gated_by_sigmoid<kHalf>(z, z * (kTwice + kCubed * square), kTwice + 3.0f * kCubed * at_most(square, 4096.0f));
    }
    const float x = at_least(at_most(z, 64.0f), -64.0f);
    const float squares = 0.044715f * x * x;
    return gated_by_sigmoid<kHalf>(z, kTwice * (x + squares * x), kTwice * (1.0f + 3.0f * squares));
  } else if constexpr (A == Activation::kSilu) {
    return swish<kHalf>(z, alpha);
  } else if constexpr (A == Activation::kRelu) {
    return {at_least(z, 0.0f), z <= 0.0f ? 0.0f : 1.0f};  // the slope at NaN is one, as in PyTorch
  } else if constexpr (A == Activation::kReluSquared) {
    const float r = at_least(z, 0.0f);
    return {r * r, r + r};
  } else if constexpr (A == Activation::kQuickGelu) {
    return swish<kHalf>(z, 1.702f);
  } else if constexpr (A == Activation::kTanh) {
    if constexpr (kHalf) return {tanh_rounded(z), 4.0f * sigmoid<kHalf>(2.0f * z).slope};
    const float t = tanhf(z);
    return {t, 1.0f - t * t};
  } else if constexpr (A == Activation::kSigmoid) {
    return sigmoid<kHalf>(z);
  } else {
    return {z, 1.0f};
  }
}

}  // namespace kernel_pytorch
