// Elements of a dtype that is known at run time: the branch is the same for all threads, and saves kernels. And vectors of
// 16 bytes that stay packed until they are computed with: half of the registers of widened ones.
#pragma once

#include "kernel_pytorch/cuda/vector.cuh"
#include "kernel_pytorch/dtype.h"

namespace kernel_pytorch {

// `N` elements, or one, from an address that is aligned to them.
template <typename T, int N>
__device__ __forceinline__ void load_some(const T* source, float (&values)[N]) {
  if constexpr (N == 1) {
    values[0] = widen(*source);
  } else {
    load_vector<T, N>(source, values);
  }
}

template <typename T, int N>
__device__ __forceinline__ void store_some(T* target, const float (&values)[N]) {
  if constexpr (N == 1) {
    *target = narrow<T>(values[0]);
  } else {
    store_vector<T, N>(target, values);
  }
}

template <int N>
__device__ __forceinline__ void load_as(const Input& source, int64_t offset, float (&values)[N]) {
  if (source.dtype == DType::kFloat32) {
    load_some<float, N>(static_cast<const float*>(source.data) + offset, values);
  } else if (source.dtype == DType::kBFloat16) {
    load_some<__nv_bfloat16, N>(static_cast<const __nv_bfloat16*>(source.data) + offset, values);
  } else {
    load_some<__half, N>(static_cast<const __half*>(source.data) + offset, values);
  }
}

template <int N>
__device__ __forceinline__ void store_as(const Output& target, int64_t offset, const float (&values)[N]) {
  if (target.dtype == DType::kFloat32) {
    store_some<float, N>(static_cast<float*>(target.data) + offset, values);
  } else if (target.dtype == DType::kBFloat16) {
    store_some<__nv_bfloat16, N>(static_cast<__nv_bfloat16*>(target.data) + offset, values);
  } else {
    store_some<__half, N>(static_cast<__half*>(target.data) + offset, values);
  }
}

// Of a tensor that was promoted to T: with T of 16 bits it is of T itself, beside float32 it may be narrower.
template <typename T, int N>
__device__ __forceinline__ void load_promoted(const Input& source, int64_t offset, float (&values)[N]) {
  if constexpr (sizeof(T) == 2) {
    load_some<T, N>(static_cast<const T*>(source.data) + offset, values);
  } else {
    load_as<N>(source, offset, values);
  }
}

template <typename T, int N>
__device__ __forceinline__ void store_promoted(const Output& target, int64_t offset, const float (&values)[N]) {
  if constexpr (sizeof(T) == 2) {
    store_some<T, N>(static_cast<T*>(target.data) + offset, values);
  } else {
    store_as<N>(target, offset, values);
  }
}

template <typename T>
__device__ __forceinline__ void unpack_vector(const uint4& words, float (&values)[kVectorLength<T>]) {
  T elements[kVectorLength<T>];
  memcpy(elements, &words, sizeof words);
#pragma unroll
  for (int i = 0; i < kVectorLength<T>; ++i) values[i] = widen(elements[i]);
}

template <typename T>
__device__ __forceinline__ uint4 pack_vector(const float (&values)[kVectorLength<T>]) {
  T elements[kVectorLength<T>];
#pragma unroll
  for (int i = 0; i < kVectorLength<T>; ++i) elements[i] = narrow<T>(values[i]);
  uint4 words;
  memcpy(&words, elements, sizeof words);
  return words;
}

// A vector that nobody reads again soon.
template <typename T>
__device__ __forceinline__ uint4 load_packed(const T* source) {
  return __ldcs(reinterpret_cast<const uint4*>(source));
}

// The same of a tensor that was promoted to T, as vector of T.
template <typename T>
__device__ __forceinline__ uint4 load_packed_promoted(const Input& source, int64_t offset) {
  if (sizeof(T) == 2 || source.dtype == DType::kFloat32) return load_packed<T>(static_cast<const T*>(source.data) + offset);
  float values[kVectorLength<T>];
  load_as<kVectorLength<T>>(source, offset, values);
  return pack_vector<T>(values);
}

}  // namespace kernel_pytorch
