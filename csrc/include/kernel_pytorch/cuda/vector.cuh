// Elements, 16 bytes of them at a time, and what they are to arithmetic.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>

namespace kernel_pytorch {

__device__ __forceinline__ float widen(float value) { return value; }
__device__ __forceinline__ float widen(__half value) { return __half2float(value); }
__device__ __forceinline__ float widen(__nv_bfloat16 value) { return __bfloat162float(value); }

template <typename T>
__device__ __forceinline__ T narrow(float value);
template <>
__device__ __forceinline__ float narrow<float>(float value) {
  return value;
}
template <>
__device__ __forceinline__ __half narrow<__half>(float value) {
  return __float2half_rn(value);
}
template <>
__device__ __forceinline__ __nv_bfloat16 narrow<__nv_bfloat16>(float value) {
  return __float2bfloat16_rn(value);
}

// How many elements 16 bytes hold.
template <typename T>
constexpr int kVectorLength = 16 / sizeof(T);

// `N` elements from an address that is aligned to them, in accesses of 16 bytes (or all of them, if fewer).
template <typename T, int N>
__device__ __forceinline__ void load_vector(const T* source, float (&values)[N]) {
  constexpr int kBytes = N * sizeof(T);
  T elements[N];
  if constexpr (kBytes >= 16) {
    static_assert(kBytes % 16 == 0);
    uint4 words[kBytes / 16];
#pragma unroll
    for (int i = 0; i < kBytes / 16; ++i) words[i] = __ldg(reinterpret_cast<const uint4*>(source) + i);
    memcpy(elements, words, kBytes);
  } else {
    static_assert(kBytes == 8);
    const uint2 words = __ldg(reinterpret_cast<const uint2*>(source));
    memcpy(elements, &words, kBytes);
  }
#pragma unroll
  for (int i = 0; i < N; ++i) values[i] = widen(elements[i]);
}

// 16 bytes in one instruction; left to itself the compiler takes some stores apart.
__device__ __forceinline__ void store_16_bytes(void* target, uint4 words) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(target)), "r"(words.x),
               "r"(words.y), "r"(words.z), "r"(words.w)
               : "memory");
}

template <typename T, int N>
__device__ __forceinline__ void store_vector(T* target, const float (&values)[N]) {
  constexpr int kBytes = N * sizeof(T);
  T elements[N];
#pragma unroll
  for (int i = 0; i < N; ++i) elements[i] = narrow<T>(values[i]);
  if constexpr (kBytes >= 16) {
    static_assert(kBytes % 16 == 0);
    uint4 words[kBytes / 16];
    memcpy(words, elements, kBytes);
#pragma unroll
    for (int i = 0; i < kBytes / 16; ++i) store_16_bytes(reinterpret_cast<uint4*>(target) + i, words[i]);
  } else {
    static_assert(kBytes == 8);
    uint2 words;
    memcpy(&words, elements, kBytes);
    *reinterpret_cast<uint2*>(target) = words;
  }
}

// `N` elements of which the first `count` are there; what is beyond reads as zero and is not written. A vector that is whole
// is aligned.
template <typename T, int N>
__device__ __forceinline__ void load_elements(const T* source, int count, float (&values)[N]) {
  if constexpr (N * sizeof(T) >= 8) {
    if (count >= N) return load_vector<T, N>(source, values);
  }
#pragma unroll
  for (int i = 0; i < N; ++i) values[i] = i < count ? widen(source[i]) : 0.0f;
}

template <typename T, int N>
__device__ __forceinline__ void store_elements(T* target, int count, const float (&values)[N]) {
  if constexpr (N * sizeof(T) >= 8) {
    if (count >= N) return store_vector<T, N>(target, values);
  }
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if (i < count) target[i] = narrow<T>(values[i]);
  }
}

}  // namespace kernel_pytorch
