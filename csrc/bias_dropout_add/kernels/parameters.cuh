// What every kernel of bias, dropout and residual is given.
#pragma once

#include "kernel_pytorch/cuda/any_type.cuh"
#include "kernel_pytorch/cuda/dropout.cuh"
#include "kernel_pytorch/index.h"

namespace kernel_pytorch {
namespace bias_dropout_add {

// T of y, to which x and residual were promoted.
template <typename T>
struct ForwardPointers {
  Input x;
  Input bias;  // no data for none
  Input residual;
  T* y;
  DeviceDropout dropout;
  int64_t rows;
  int64_t columns;
};

template <typename T>
struct BackwardPointers {
  const T* dy;
  Output dx;      // no data where it is not needed
  float* shares;  // `(parts, columns)`; null where dbias is not needed
  DeviceDropout dropout;
  int64_t rows;
  int64_t columns;
  int64_t parts;
};

// `N` elements of the bias; zeros where there is none.
template <int N>
__device__ __forceinline__ void load_bias(const Input& bias, int64_t column, float (&values)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) values[i] = 0.0f;
  if (bias.data != nullptr) load_as<N>(bias, column, values);
}

}  // namespace bias_dropout_add
}  // namespace kernel_pytorch
