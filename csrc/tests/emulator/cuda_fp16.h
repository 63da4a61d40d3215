// The part of CUDA's float16 that the kernels use, with the conversions of the CPU backend's scalar code.
#pragma once

#include "cuda_runtime.h"
#include "sixteen_bits.h"

using __half = ::emulator::SixteenBits<::emulator::HalfFormat>;
struct __half2 {
  __half x, y;
};
inline float __half2float(__half value) { return value.widened(); }
inline __half __float2half_rn(float value) { return __half::rounded(value); }
inline __half2 __floats2half2_rn(float a, float b) { return {__half::rounded(a), __half::rounded(b)}; }
