// Version 4: a row too long for one block's registers is shared by a cluster of blocks (compute capability 9.0 on). What
// they reduce meets in distributed shared memory, and the row is still read once.
#pragma once

#include "3_vectorized.cuh"

namespace kernel_pytorch {
namespace softmax {

template <typename T, typename M, typename Y, int kVectors>
__global__ void __launch_bounds__(kClusterThreads, KP_RESIDENT_CLUSTER_BLOCKS) forward_cluster(const ForwardPointers<T, M, Y> p) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  __shared__ TeamScratch scratch;
  forward_row<T, M, Y, kVectors, true>(p, scratch);
#endif
}

template <typename T, int kVectors>
__global__ void __launch_bounds__(kClusterThreads, KP_RESIDENT_CLUSTER_BLOCKS) backward_cluster(const BackwardPointers<T> p) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  __shared__ TeamScratch scratch;
  backward_row<T, kVectors, true>(p, scratch);
#endif
}

}  // namespace softmax
}  // namespace kernel_pytorch
