// Parameters of the kernels of bias and activation.
#pragma once

#include <cstdint>

#include "kernel_pytorch/cuda/vector.cuh"

namespace kernel_pytorch {
namespace bias_act {

// A bias of the dtype of x or of float32: the branch is uniform over all threads, and halves the number of kernels.
struct Bias {
  const void* data;  // may be null
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
  T* dx;          // null if not needed
  float* shares;  // partial sums `(parts, columns)`; null if dbias is not needed
  int64_t rows;
  int64_t columns;
  int64_t parts;
};

// Loads `N` elements of a bias, of which `count` exist; without a bias they are -0.0, which changes no number.
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
