// Single-instruction functions for results that are rounded to 16 bits, and accurate ones for all others.
#pragma once

#include <cuda_runtime.h>

namespace kernel_pytorch {

// Whether the dtype of a result has so few digits that an error of 2^-21 is small compared with its rounding error.
template <typename T>
constexpr bool kRounded = sizeof(T) == 2;

// 2^x; 0 below 2^-126.
__device__ __forceinline__ float exp2_once(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / x with an error of one unit in the last place; 0 from 2^126 on.
__device__ __forceinline__ float reciprocal_once(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

template <bool kHalf>
__device__ __forceinline__ float exponential(float x) {
  return kHalf ? exp2_once(1.44269504f * x) : expf(x);
}

// 1 / sqrt(mean + eps), where mean is `squares`, a sum of `columns` squares, divided by `columns`.
template <bool kHalf>
__device__ __forceinline__ float rstd_of(float squares, int columns, float eps) {
  if constexpr (kHalf) return rsqrtf(squares * __frcp_rn(static_cast<float>(columns)) + eps);
  return 1.0f / sqrtf(squares / static_cast<float>(columns) + eps);
}

}  // namespace kernel_pytorch
