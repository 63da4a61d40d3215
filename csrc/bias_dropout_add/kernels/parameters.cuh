// Parameters of the kernels of bias, dropout and residual.
#pragma once

#include "kernel_pytorch/cuda/any_type.cuh"
#include "kernel_pytorch/cuda/dropout.cuh"
#include "kernel_pytorch/index.h"

namespace kernel_pytorch {
namespace bias_dropout_add {

// T: element type of y, to which x and the residual promote.
template <typename T>
struct ForwardPointers {
  Input x;
  Input bias;  // optional
  Input residual;
  T* y;
  DeviceDropout dropout;
  int64_t rows;
  int64_t columns;
};

template <typename T>
struct BackwardPointers {
  const T* dy;
  Output dx;      // null data if not needed
  float* shares;  // partial sums `(parts, columns)`; null if dbias is not needed
  DeviceDropout dropout;
  int64_t rows;
  int64_t columns;
  int64_t parts;
};

// Loads `N` elements of the bias; zeros without a bias.
template <int N>
__device__ __forceinline__ void load_bias(const Input& bias, int64_t column, float (&values)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) values[i] = 0.0f;
  if (bias.data != nullptr) load_as<N>(bias, column, values);
}

}  // namespace bias_dropout_add
}  // namespace kernel_pytorch
