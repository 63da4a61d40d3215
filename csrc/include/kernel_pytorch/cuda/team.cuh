// Who has a row between them: some lanes of a warp, a block, or a cluster of blocks.
#pragma once

#include "kernel_pytorch/cuda/layout.h"
#include "kernel_pytorch/cuda/reduce.cuh"

namespace kernel_pytorch {

// Blocks of a cluster that a multiprocessor shall hold: two where that was measured, on Hopper; elsewhere no register is
// given up for it.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
#define KP_RESIDENT_CLUSTER_BLOCKS 2
#else
#define KP_RESIDENT_CLUSTER_BLOCKS 1
#endif

constexpr int kTurns = 2;  // reductions whose scratch is apart

// What a team's reductions need of shared memory.
struct TeamScratch {
  float warps[kTurns][kMaxWarps];
  float blocks[kTurns][kMostBlocks];
};

// The threads along x of a block have a row, of a cluster together with those of the other blocks. A block of at most 32
// threads along x is part of a warp: blocks of several rows then have whole warps, all of whose threads take part.
template <bool kCluster>
class Team {
 public:
  __device__ __forceinline__ explicit Team(TeamScratch& scratch) : scratch_(scratch) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    if constexpr (kCluster) {
      const cooperative_groups::cluster_group cluster = cooperative_groups::this_cluster();
      blocks_ = static_cast<int>(cluster.num_blocks());
      rank_ = static_cast<int>(cluster.block_rank());
      // Nobody writes to a block that has not begun; what is loaded meanwhile need not wait for that.
      asm volatile("barrier.cluster.arrive.aligned;" ::: "memory");
    }
#endif
  }

  // The vector that a thread begins with, and how many later its next one lies.
  __device__ __forceinline__ int first() const { return rank_ * static_cast<int>(blockDim.x) + threadIdx.x; }
  __device__ __forceinline__ int stride() const { return blocks_ * static_cast<int>(blockDim.x); }
  __device__ __forceinline__ bool leads() const { return first() == 0; }
  // Which team this is of all on the grid, where a block has one row.
  __device__ __forceinline__ int64_t index() const { return blockIdx.x / blocks_; }
  __device__ __forceinline__ int64_t teams() const { return gridDim.x / blocks_; }

  // Of all its threads, each of which gets the result; `turn` alternates from one reduction to the next.
  template <typename Combine>
  __device__ __forceinline__ float reduce(float value, Combine combine, int turn) {
    if (blockDim.x < kWarp) {
      for (int mask = blockDim.x / 2; mask > 0; mask /= 2) {
        value = combine(value, __shfl_xor_sync(0xffffffffu, value, mask));
      }
      return value;
    }
    value = reduce_block(value, combine, scratch_.warps[turn]);
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    if constexpr (kCluster) {
      const cooperative_groups::cluster_group cluster = cooperative_groups::this_cluster();
      if (!all_began_) asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
      all_began_ = true;
      float* const own = scratch_.blocks[turn];
      if (static_cast<int>(threadIdx.x) < blocks_) *cluster.map_shared_rank(own + rank_, threadIdx.x) = value;
      cluster.sync();
      value = Combine::kIdentity;
      for (int block = 0; block < blocks_; ++block) value = combine(value, own[block]);
    }
#endif
    return value;
  }

 private:
  TeamScratch& scratch_;
  int blocks_ = 1;
  int rank_ = 0;
  bool all_began_ = false;
};

}  // namespace kernel_pytorch
