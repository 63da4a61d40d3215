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

  // A reduction has two steps, and room for other work between them: every warp announces what it has, and what all have
  // announced is gathered. Every thread gets the result; `turn` alternates from one reduction to the next.
  template <typename Combine>
  __device__ __forceinline__ float announce(float value, Combine combine, int turn) {
    value = reduce_lanes(value, combine);
    if (!meets()) return value;
    publish(value, turn);
    arrive();
    return value;
  }
  // `own` is what `announce` returned.
  template <typename Combine>
  __device__ __forceinline__ float gather(float own, Combine combine, int turn) const {
    if (!meets()) return own;
    await();
    return reduce_warp(of_lane(combine, turn), combine);
  }
  template <typename Combine>
  __device__ __forceinline__ float reduce(float value, Combine combine, int turn) {
    return gather(announce(value, combine, turn), combine, turn);
  }

  // The same of two sums, at one meeting.
  __device__ __forceinline__ float2 announce(float2 value, int turn) {
    value = {reduce_lanes(value.x, Add{}), reduce_lanes(value.y, Add{})};
    if (!meets()) return value;
    publish(value.x, turn);
    publish(value.y, turn + kTurns);
    arrive();
    return value;
  }
  __device__ __forceinline__ float2 gather(float2 own, int turn) const {
    if (!meets()) return own;
    await();
    return {reduce_warp(of_lane(Add{}, turn), Add{}), reduce_warp(of_lane(Add{}, turn + kTurns), Add{})};
  }
  __device__ __forceinline__ float2 reduce(float2 value, int turn) { return gather(announce(value, turn), turn); }

  // Two numbers of each warp, as they are: after `gather_own`, `visit(warp, numbers)` of those that this lane looks at.
  __device__ __forceinline__ void announce_own(float2 of_warp, int turn) {
    if (!meets()) return;
    publish(of_warp.x, turn);
    publish(of_warp.y, turn + kTurns);
    arrive();
  }
  __device__ __forceinline__ void gather_own() const {
    if (meets()) await();
  }
  template <typename Visit>
  __device__ __forceinline__ void for_each_warp(int turn, const Visit& visit) const {
    const auto see = [&](int i) {
      if (i < numbers()) visit(i, float2{number(i, turn), number(i, turn + kTurns)});
    };
    const int lane = threadIdx.x % kWarp;
    see(lane);
    if constexpr (kCluster) {
      for (int i = lane + kWarp; i < numbers(); i += kWarp) see(i);
    }
  }

  // Over the lanes of a warp that have the row.
  template <typename Combine>
  __device__ __forceinline__ static float reduce_lanes(float value, Combine combine) {
    if (blockDim.x >= kWarp) return reduce_warp(value, combine);
    for (int mask = blockDim.x / 2; mask > 0; mask /= 2) {
      value = combine(value, __shfl_xor_sync(0xffffffffu, value, mask));
    }
    return value;
  }
  // Whether a team is more than lanes of one warp.
  __device__ __forceinline__ static bool meets() { return kCluster || blockDim.x > kWarp; }

  // A reduction of maxima and sums, of teams of several warps.
  __device__ __forceinline__ void announce(OnlineSum own, int turn) {
    own = reduce_warp(own);
    publish(own.most, turn);
    publish(own.sum, turn + kTurns);
    arrive();
  }
  __device__ __forceinline__ OnlineSum gather(int turn) const {
    await();
    OnlineSum found;
    for (int i = threadIdx.x % kWarp; i < numbers(); i += kWarp) {
      found = combined(found, {number(i, turn), number(i, turn + kTurns)});
    }
    return reduce_warp(found);
  }

 private:
  // The steps of a meeting: a number of this warp; it is there; until all numbers are there; how many, and number i.
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
  __device__ __forceinline__ static void arrive() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    if constexpr (kCluster) asm volatile("barrier.cluster.arrive.aligned;" ::: "memory");
#endif
  }
  __device__ __forceinline__ static void await() {
    if constexpr (kCluster) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
      asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
#endif
    } else {
      __syncthreads();
    }
  }
  __device__ __forceinline__ int numbers() const { return blocks_ * warps(); }
  __device__ __forceinline__ float number(int i, int turn) const { return numbers_[turn][i]; }

  // Of those that this lane looks at.
  template <typename Combine>
  __device__ __forceinline__ float of_lane(Combine combine, int turn) const {
    const int lane = threadIdx.x % kWarp;
    float value = lane < numbers() ? number(lane, turn) : Combine::kIdentity;
    if constexpr (kCluster) {
      for (int i = lane + kWarp; i < numbers(); i += kWarp) value = combine(value, number(i, turn));
    }
    return value;
  }

  using Numbers = float[kCluster ? kMostBlocks * kClusterWarps : kMaxWarps];

  __device__ __forceinline__ static int warps() { return static_cast<int>(blockDim.x) / kWarp; }

  Numbers* numbers_;
  int blocks_ = 1;
  int rank_ = 0;
  bool all_began_ = false;
};

}  // namespace kernel_pytorch
