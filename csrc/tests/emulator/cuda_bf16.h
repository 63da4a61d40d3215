// The part of CUDA's bfloat16 that the kernels use.
#pragma once

#include "cuda_runtime.h"
#include "sixteen_bits.h"

using __nv_bfloat16 = ::emulator::SixteenBits<::emulator::BFloatFormat>;
struct __nv_bfloat162 {
  __nv_bfloat16 x, y;
};
inline float __bfloat162float(__nv_bfloat16 value) { return value.widened(); }
inline __nv_bfloat16 __float2bfloat16_rn(float value) { return __nv_bfloat16::rounded(value); }
inline __nv_bfloat162 __floats2bfloat162_rn(float a, float b) {
  return {__nv_bfloat16::rounded(a), __nv_bfloat16::rounded(b)};
}
