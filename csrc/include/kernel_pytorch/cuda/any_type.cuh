// Access to elements of a run-time dtype: the branch is uniform over all threads, and reduces the number of kernels.
#pragma once

#include "kernel_pytorch/cuda/vector.cuh"
#include "kernel_pytorch/dtype.h"

namespace kernel_pytorch {

// Loads `N` elements from an address that is aligned to their size, or one element.
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

// Loads from a tensor whose dtype promotes to T: exactly T if T has 16 bits; possibly narrower if T is float32.
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

}  // namespace kernel_pytorch
