// The gradient of a weight: the sum of the shares that blocks left behind, in their order.
#pragma once

#include "kernel_pytorch/cuda/vector.cuh"
#include "kernel_pytorch/index.h"

namespace kernel_pytorch {
namespace {

constexpr int kSumThreads = 32;
constexpr int kSumRows = 32;

// A block of 32 columns by 32 threads: thread (x, y) adds shares y, y + 32, ... of column x; then the 32 sums meet. Weight
// row r is the sum of shares r, r + weight_rows, ...
template <typename W>
__global__ void __launch_bounds__(kSumThreads* kSumRows)
    sum_shares(const float* shares, W* dweight, int64_t parts, int columns, int weight_rows) {
  __shared__ float sums[kSumRows][kSumThreads + 1];
  const int column = blockIdx.x * kSumThreads + threadIdx.x;
  const int weight_row = blockIdx.y;
  float sum = 0.0f;
  if (column < columns) {
    for (int64_t part = weight_row + static_cast<int64_t>(threadIdx.y) * weight_rows; part < parts;
         part += static_cast<int64_t>(kSumRows) * weight_rows) {
      sum += shares[row_offset(part, columns) + column];
    }
  }
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  for (int half = kSumRows / 2; half > 0; half /= 2) {
    if (threadIdx.y < half) sums[threadIdx.y][threadIdx.x] += sums[threadIdx.y + half][threadIdx.x];
    __syncthreads();
  }
  if (threadIdx.y == 0 && column < columns) {
    dweight[row_offset(weight_row, columns) + column] = narrow<W>(sums[0][threadIdx.x]);
  }
}

}  // namespace
}  // namespace kernel_pytorch
