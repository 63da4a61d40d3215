// The gradient of a mask that is added: dz, summed over the rows that a row of the mask goes with.
#pragma once

#include "kernel_pytorch/index.h"
#include "parameters.cuh"

namespace kernel_pytorch {
namespace softmax {

constexpr int kSumColumns = 32;
constexpr int kSumRows = 8;

// A block of 32 columns by 8 threads: thread (x, y) adds uses y, y + 8, ... of column x; then the 8 sums meet. `tiles` blocks
// go for a row of the mask.
template <typename T, typename M>
__global__ void __launch_bounds__(kSumColumns* kSumRows) mask_gradient(const MaskPointers<T, M> p, unsigned tiles) {
  __shared__ float sums[kSumRows][kSumColumns];
  const unsigned kept = blockIdx.x / tiles;
  const int column = static_cast<int>(blockIdx.x - kept * tiles) * kSumColumns + static_cast<int>(threadIdx.x);
  float sum = 0.0f;
  if (column < p.columns) {
    const int64_t uses = broadcast_uses(p.broadcast);
    for (int64_t use = threadIdx.y; use < uses; use += kSumRows) {
      const int64_t row = row_of_use(p.broadcast, kept, use);
      const int64_t at = row_offset(row, p.columns) + column;
      sum += widen(p.y[at]) * (widen(p.dy[at]) - p.dots[row]);
    }
  }
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  for (int half = kSumRows / 2; half > 0; half /= 2) {
    if (threadIdx.y < half) sums[threadIdx.y][threadIdx.x] += sums[threadIdx.y + half][threadIdx.x];
    __syncthreads();
  }
  if (threadIdx.y == 0 && column < p.columns) p.dmask[row_offset(kept, p.columns) + column] = narrow<M>(sums[0][threadIdx.x]);
}

}  // namespace softmax
}  // namespace kernel_pytorch
