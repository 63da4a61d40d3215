// Version 4: a row too long for one block's registers is shared by a cluster of blocks (compute capability 9.0 on). Their
// sums meet in distributed shared memory, and the row is still read once.
#pragma once

#include "3_vectorized.cuh"

namespace kernel_pytorch {
namespace rms_norm {

constexpr int kClusterThreads = 512;

template <typename T, typename W, typename Y, int kVectors>
__global__ void __launch_bounds__(kClusterThreads) forward_cluster(const ForwardPointers<T, W, Y> p) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  constexpr int N = kVectorLength<T>;
  __shared__ float scratch[kMaxWarps];
  __shared__ float slots[1];
  const cooperative_groups::cluster_group cluster = cooperative_groups::this_cluster();
  const int blocks = static_cast<int>(cluster.num_blocks());
  const int rank = static_cast<int>(cluster.block_rank());
  const int64_t row = blockIdx.x / blocks;
  const int64_t offset = row_offset(row, p.columns);
  float h[kVectors][N];
  float sum = 0.0f;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int column = ((v * blocks + rank) * kClusterThreads + static_cast<int>(threadIdx.x)) * N;
    if (column < p.columns) {
      load_h(p, offset + column, h[v]);
#pragma unroll
      for (int i = 0; i < N; ++i) sum += h[v][i] * h[v][i];
    }
  }
  sum = reduce_cluster(reduce_block(sum, Add{}, scratch), Add{}, slots);
  const float rstd = 1.0f / sqrtf(sum / static_cast<float>(p.columns) + p.eps);
  if (rank == 0 && threadIdx.x == 0) p.rstd[row] = rstd;
  const int64_t weights = row_offset(row % p.weight_rows, p.columns);
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int column = ((v * blocks + rank) * kClusterThreads + static_cast<int>(threadIdx.x)) * N;
    if (column < p.columns) {
      float scale[N];
      load_scale<W, N>(p.weight, weights + column, p.offset, scale);
#pragma unroll
      for (int i = 0; i < N; ++i) scale[i] *= h[v][i] * rstd;
      store_vector<Y, N>(p.y + offset + column, scale);
    }
  }
  cluster.sync();  // no block may end while another reads its slot
#endif
}

}  // namespace rms_norm
}  // namespace kernel_pytorch
