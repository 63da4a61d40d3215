// What every kernel of bias and activation is given.
#pragma once

#include <cstdint>

#include "kernel_pytorch/cuda/vector.cuh"

namespace kernel_pytorch {
namespace bias_act {

// A bias of the dtype of x or of float32: the branch is the same for all threads, and saves half of the kernels.
struct Bias {
  const void* data;  // null for none
  bool wide;
};

template <typename T>
struct ForwardPointers {
  const T* x;
  Bias bias;
  T* y;
  int64_t rows;
  int64_t columns;
};

template <typename T>
struct BackwardPointers {
  const T* dy;
  const T* x;  // null for the identity
  Bias bias;
  T* dx;          // null where it is not needed
  float* shares;  // `(parts, columns)`; null where dbias is not needed
  int64_t rows;
  int64_t columns;
  int64_t parts;
};

// `N` elements of a bias, of which `count` are there; where there is none what leaves every number as it is, zeros too.
template <typename T, int N>
__device__ __forceinline__ void load_bias(const Bias& bias, int64_t column, int count, float (&values)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) values[i] = -0.0f;
  if (bias.data == nullptr) return;
  if (bias.wide) {
    load_elements<float, N>(static_cast<const float*>(bias.data) + column, count, values);
  } else {
    load_elements<T, N>(static_cast<const T*>(bias.data) + column, count, values);
  }
}

}  // namespace bias_act
}  // namespace kernel_pytorch
