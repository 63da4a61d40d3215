// Kernel 1: one thread per element, which computes four random words and uses one.
#pragma once

#include "parameters.cuh"

namespace kernel_pytorch {
namespace bias_dropout_add {

constexpr int kNaiveThreads = 256;

template <typename T>
__global__ void __launch_bounds__(kNaiveThreads) forward_naive(const ForwardPointers<T> p) {
  const int64_t index = blockIdx.x * static_cast<int64_t>(kNaiveThreads) + threadIdx.x;
  if (index >= p.rows * p.columns) return;
  const int64_t row = index / p.columns, column = index - row * p.columns;
  float z[1], bias[1], residual[1];
  load_promoted<T, 1>(p.x, index, z);
  load_bias<1>(p.bias, column, bias);
  z[0] += bias[0];
  const DropoutRow dropout = dropout_row(p.dropout, row, p.columns);
  if (dropout.drops) drop<1>(dropout, column, z);
  load_promoted<T, 1>(p.residual, index, residual);
  p.y[index] = narrow<T>(residual[0] + z[0]);
}

}  // namespace bias_dropout_add
}  // namespace kernel_pytorch
