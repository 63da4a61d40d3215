// Kernel 1: one thread per element.
#pragma once

#include "kernel_pytorch/cuda/activations.cuh"
#include "kernel_pytorch/index.h"
#include "parameters.cuh"

namespace kernel_pytorch {
namespace bias_act {

constexpr int kNaiveThreads = 256;

template <Activation A, typename T>
__global__ void __launch_bounds__(kNaiveThreads) forward_naive(const ForwardPointers<T> p) {
  const int64_t index = blockIdx.x * static_cast<int64_t>(kNaiveThreads) + threadIdx.x;
  if (index >= p.rows * p.columns) return;
  float bias[1];
  load_bias<T, 1>(p.bias, index % p.columns, 1, bias);
  p.y[index] = narrow<T>(activate<A, kRounded<T>>(widen(p.x[index]) + bias[0]).value);
}

}  // namespace bias_act
}  // namespace kernel_pytorch
