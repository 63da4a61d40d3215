// The gradient of a weight: the sum of the shares, in their order.
#pragma once

#include "kernel_pytorch/cuda/vector.cuh"
#include "kernel_pytorch/index.h"

namespace kernel_pytorch {
namespace qk_norm_rope {

constexpr int kSumThreads = 32;
constexpr int kSumRows = 32;

// Both gradients in one launch: block `(x, y)` adds 32 columns of q's (y = 0) or of k's, thread (x, y) its shares y,
// y + 32, ...; then the 32 sums meet. Null for one that is not needed.
template <typename W>
__global__ void __launch_bounds__(kSumThreads* kSumRows)
    add_shares(const float* shares, W* dq_weight, W* dk_weight, int64_t parts, int columns) {
  __shared__ float sums[kSumRows][kSumThreads + 1];
  W* dweight = blockIdx.y == 0 ? dq_weight : dk_weight;
  if (dweight == nullptr) return;  // a whole block
  const int column = blockIdx.x * kSumThreads + threadIdx.x;
  float sum = 0.0f;
  if (column < columns) {
    for (int64_t part = threadIdx.y; part < parts; part += kSumRows) {
      sum += shares[row_offset(blockIdx.y * parts + part, columns) + column];
    }
  }
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  for (int half = kSumRows / 2; half > 0; half /= 2) {
    if (threadIdx.y < half) sums[threadIdx.y][threadIdx.x] += sums[threadIdx.y + half][threadIdx.x];
    __syncthreads();
  }
  if (threadIdx.y == 0 && column < columns) dweight[column] = narrow<W>(sums[0][threadIdx.x]);
}

}  // namespace qk_norm_rope
}  // namespace kernel_pytorch
