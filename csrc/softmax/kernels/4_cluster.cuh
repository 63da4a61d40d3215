// Version 4: a row too long for one block's registers is shared by a cluster of blocks (compute capability 9.0 on). Maximum
// and sum meet in distributed shared memory, and the row is still read once.
#pragma once

#include "3_vectorized.cuh"

namespace kernel_pytorch {
namespace softmax {

constexpr int kClusterThreads = 512;

template <typename T, typename M, typename Y, int kVectors>
__global__ void __launch_bounds__(kClusterThreads) forward_cluster(const ForwardPointers<T, M, Y> p) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  constexpr int N = kVectorLength<T>;
  __shared__ float scratch[2][kMaxWarps];
  __shared__ float slots[2];
  const cooperative_groups::cluster_group cluster = cooperative_groups::this_cluster();
  const int blocks = static_cast<int>(cluster.num_blocks());
  const int rank = static_cast<int>(cluster.block_rank());
  const int64_t row = blockIdx.x / blocks;
  const int64_t offset = row_offset(row, p.columns);
  const M* mask = mask_of(p, row);
  const int first = rank * kClusterThreads + static_cast<int>(threadIdx.x), stride = blocks * kClusterThreads;
  float z[kVectors][N];
  const float own = load_row<T, M>(p.x + offset, mask, p.broadcast.column_step, p.scale, first, stride, p.columns, z);
  const float most = reduce_cluster(reduce_block(own, Max{}, scratch[0]), Max{}, &slots[0]);
  const float base = base_of(most, mask != nullptr);
  const float part = reduce_block(exponentials(z, base, first, stride, p.columns), Add{}, scratch[1]);
  const float sum = reduce_cluster(part, Add{}, &slots[1]);
  store_row(p.y + offset, share_of_sum(sum), first, stride, p.columns, z);
  cluster.sync();  // no block may end while another reads its slots
#endif
}

}  // namespace softmax
}  // namespace kernel_pytorch
