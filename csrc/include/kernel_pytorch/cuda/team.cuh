// Who has a row between them: some lanes of a warp, a block, or a cluster of blocks.
#pragma once

#include "kernel_pytorch/cuda/layout.h"
#include "kernel_pytorch/cuda/online_softmax.cuh"
#include "kernel_pytorch/cuda/reduce.cuh"

namespace kernel_pytorch {

constexpr int kClusterWarps = 16;  // of a block of a cluster, at most
constexpr int kTurns = 2;          // reductions whose scratch is apart

// What a team's reductions need of shared memory: a number of each of its warps, or two, in turns.
template <bool kCluster>
struct TeamScratch {
  float numbers[2 * kTurns][kCluster ? kMostBlocks * kClusterWarps : kMaxWarps];
};

// The threads along x of a block have a row, of a cluster together with those of the other blocks. A block of at most 32
// threads along x is part of a warp: blocks of several rows then have whole warps, all of whose threads take part.
template <bool kCluster>
class Team {
 public:
  __device__ __forceinline__ explicit Team(TeamScratch<kCluster>& scratch) : numbers_(scratch.numbers) {
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
    value = reduce_warp(value, combine);
    if (!kCluster && blockDim.x == kWarp) return value;
    publish(value, turn);
    meet();
    const int lane = threadIdx.x % kWarp;
    float found = lane < numbers() ? number(lane, turn) : Combine::kIdentity;
    if constexpr (kCluster) {
      for (int i = lane + kWarp; i < numbers(); i += kWarp) found = combine(found, number(i, turn));
    }
    return reduce_warp(found, combine);
  }

  // The same of maxima and sums, at one meeting, of teams of whole warps.
  __device__ __forceinline__ OnlineSum reduce(OnlineSum own, int turn) {
    own = reduce_warp(own);
    publish(own.most, turn);
    publish(own.sum, turn + kTurns);
    meet();
    OnlineSum found;
    for (int i = threadIdx.x % kWarp; i < numbers(); i += kWarp) {
      found = combined(found, {number(i, turn), number(i, turn + kTurns)});
    }
    return reduce_warp(found);
  }

 private:
  // The steps of a reduction: a number of this warp; until all numbers are there; how many they are, and number i.
  __device__ __forceinline__ void publish(float value, int turn) {
    const int lane = threadIdx.x % kWarp, warp = rank_ * warps() + threadIdx.x / kWarp;
    if constexpr (kCluster) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
      if (!all_began_) asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
      all_began_ = true;
      if (lane < blocks_) *cooperative_groups::this_cluster().map_shared_rank(numbers_[turn] + warp, lane) = value;
#endif
    } else {
      if (lane == 0) numbers_[turn][warp] = value;
    }
  }
  __device__ __forceinline__ void meet() const {
    if constexpr (kCluster) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
      cooperative_groups::this_cluster().sync();
#endif
    } else {
      __syncthreads();
    }
  }
  __device__ __forceinline__ int numbers() const { return blocks_ * warps(); }
  __device__ __forceinline__ float number(int i, int turn) const { return numbers_[turn][i]; }

  using Numbers = float[kCluster ? kMostBlocks * kClusterWarps : kMaxWarps];

  __device__ __forceinline__ static int warps() { return static_cast<int>(blockDim.x) / kWarp; }

  Numbers* numbers_;
  int blocks_ = 1;
  int rank_ = 0;
  bool all_began_ = false;
};

}  // namespace kernel_pytorch
