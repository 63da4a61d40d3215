// Switch over a run-time activation, for kernels with much other work: the branch is uniform over all threads.
#pragma once

#include "kernel_pytorch/cuda/activations.cuh"

namespace kernel_pytorch {

template <typename Function>
__device__ __forceinline__ void switch_activation(Activation activation, const Function& function) {
  switch (activation) {
    case Activation::kGelu:
      return function(ActivationConstant<Activation::kGelu>{});
    case Activation::kGeluTanh:
      return function(ActivationConstant<Activation::kGeluTanh>{});
    case Activation::kSilu:
      return function(ActivationConstant<Activation::kSilu>{});
    case Activation::kRelu:
      return function(ActivationConstant<Activation::kRelu>{});
    case Activation::kReluSquared:
      return function(ActivationConstant<Activation::kReluSquared>{});
    case Activation::kQuickGelu:
      return function(ActivationConstant<Activation::kQuickGelu>{});
    case Activation::kTanh:
      return function(ActivationConstant<Activation::kTanh>{});
    case Activation::kSigmoid:
      return function(ActivationConstant<Activation::kSigmoid>{});
    default:
      return;  // the identity
  }
}

// kHalf: the result is rounded to 16 bits.
template <bool kHalf, int N>
__device__ __forceinline__ void activate_all(Activation activation, float (&z)[N]) {
  switch_activation(activation, [&](auto a) {
#pragma unroll
    for (int i = 0; i < N; ++i) z[i] = activate<decltype(a)::value, kHalf>(z[i]).value;
  });
}

// Multiplies g by the derivative at z.
template <bool kHalf, int N>
__device__ __forceinline__ void multiply_by_slope(Activation activation, const float (&z)[N], float (&g)[N]) {
  switch_activation(activation, [&](auto a) {
#pragma unroll
    for (int i = 0; i < N; ++i) g[i] *= activate<decltype(a)::value, kHalf>(z[i]).slope;
  });
}

}  // namespace kernel_pytorch
