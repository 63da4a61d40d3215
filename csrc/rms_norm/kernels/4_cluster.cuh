// Version 4: a row too long for one block's registers is shared by a cluster of blocks (compute capability 9.0 on). Their
// sums meet in distributed shared memory, and the row is still read once.
#pragma once

#include "3_vectorized.cuh"

namespace kernel_pytorch {
namespace rms_norm {

template <typename T, typename W, typename Y, int kVectors>
__global__ void __launch_bounds__(kMostBackwardThreads, KP_RESIDENT_CLUSTER_BLOCKS)
    forward_cluster(const ForwardPointers<T, W, Y> p) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  __shared__ TeamScratch scratch;
  forward_row<T, W, Y, kVectors, true>(p, scratch);
#endif
}

template <typename T, typename W, typename Y, int kVectors>
__global__ void __launch_bounds__(kMostBackwardThreads) backward_cluster(const BackwardPointers<T, W, Y> p) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  __shared__ TeamScratch scratch;
  float share[kVectors][kVectorLength<T>] = {};
  backward_rows<T, W, Y, kVectors, true>(p, scratch, share);
  if (p.shares == nullptr) return;
  const int blocks = static_cast<int>(cooperative_groups::this_cluster().num_blocks());
  const int rank = static_cast<int>(cooperative_groups::this_cluster().block_rank());
  store_share<T>(p.shares, blockIdx.x / blocks, p.columns, rank * blockDim.x + threadIdx.x, blocks * blockDim.x, share);
#endif
}

}  // namespace rms_norm
}  // namespace kernel_pytorch
