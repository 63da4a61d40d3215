// Gradient of an additive mask: dz, summed over the rows that use the same row of the mask.
#pragma once

#include "kernel_pytorch/index.h"
#include "parameters.cuh"

namespace kernel_pytorch {
namespace softmax {

constexpr int kSumThreads = 256;
constexpr int kMostSumRows = 8;

// Threads along y share a vector of columns: thread (x, y) adds uses y, y + blockDim.y, ... of vector x; then the block
// reduces them over y. `tiles` blocks compute one row of the mask. N = 1 supports rows of any length and alignment.
template <typename T, typename M, int N>
__global__ void __launch_bounds__(kSumThreads) mask_gradient(const MaskPointers<T, M> p, unsigned tiles) {
  __shared__ float sums[kSumThreads * N];
  const unsigned kept = blockIdx.x / tiles;
  const int column = static_cast<int>((blockIdx.x - kept * tiles) * blockDim.x + threadIdx.x) * N;
  float sum[N] = {};
  if (column < p.columns) {
    const int64_t uses = broadcast_uses(p.broadcast);
    for (int64_t use = threadIdx.y; use < uses; use += blockDim.y) {
      const int64_t row = row_of_use(p.broadcast, kept, use), at = row_offset(row, p.columns) + column;
      Incoming<T, N> incoming_dy, incoming_y;
      incoming_dy.load(p.dy + at);
      incoming_y.load(p.y + at);
      const float dot = p.dots[row];
      float dy[N], y[N];
      incoming_dy.read(dy);
      incoming_y.read(y);
#pragma unroll
      for (int i = 0; i < N; ++i) sum[i] += y[i] * (dy[i] - dot);
    }
  }
  // Coalesced writes: element i of all threads, then element i + 1.
  const auto place = [&](unsigned y, int i) -> float& { return sums[(y * N + i) * blockDim.x + threadIdx.x]; };
  for (unsigned half = blockDim.y / 2; half > 0; half /= 2) {
    if (threadIdx.y >= half && threadIdx.y < 2 * half) {
#pragma unroll
      for (int i = 0; i < N; ++i) place(threadIdx.y, i) = sum[i];
    }
    __syncthreads();
    if (threadIdx.y < half) {
#pragma unroll
      for (int i = 0; i < N; ++i) sum[i] += place(threadIdx.y + half, i);
    }
  }
  if (threadIdx.y == 0 && column < p.columns) store_elements<M, N>(p.dmask + row_offset(kept, p.columns) + column, N, sum);
}

}  // namespace softmax
}  // namespace kernel_pytorch
