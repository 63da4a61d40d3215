// Who has a row between them: some lanes of a warp, a block, or a cluster of blocks.
#pragma once

#include "kernel_pytorch/cuda/meeting.cuh"
#include "kernel_pytorch/cuda/online_softmax.cuh"
#include "kernel_pytorch/cuda/reduce.cuh"

namespace kernel_pytorch {

// What a team's reductions need of shared memory.
template <bool kCluster>
using TeamScratch = typename Meeting<kCluster>::Numbers;

// The threads along x of a block have a row, of a cluster together with those of the other blocks. A block of at most 32
// threads along x is part of a warp: blocks of several rows then have whole warps, all of whose threads take part.
template <bool kCluster>
class Team {
 public:
  __device__ __forceinline__ explicit Team(TeamScratch<kCluster>& scratch) : meeting_(scratch) {}

  // The vector that a thread begins with, and how many later its next one lies.
  __device__ __forceinline__ int first() const { return meeting_.rank() * static_cast<int>(blockDim.x) + threadIdx.x; }
  __device__ __forceinline__ int stride() const { return meeting_.blocks() * static_cast<int>(blockDim.x); }
  __device__ __forceinline__ bool leads() const { return first() == 0; }
  // Which team this is of all on the grid, where a block has one row.
  __device__ __forceinline__ int64_t index() const { return blockIdx.x / meeting_.blocks(); }
  __device__ __forceinline__ int64_t teams() const { return gridDim.x / meeting_.blocks(); }

  // A reduction has two steps, and room for other work between them: every warp announces what it has, and what all have
  // announced is gathered. Every thread gets the result.
  template <typename Combine>
  __device__ __forceinline__ float announce(float value, Combine combine) {
    value = reduce_lanes(value, combine);
    if (meets()) meeting_.publish(value);
    return value;
  }
  // `own` is what `announce` returned.
  template <typename Combine>
  __device__ __forceinline__ float gather(float own, Combine combine) {
    if (!meets()) return own;
    meeting_.await();
    float value = Combine::kIdentity;
    for_each_warp([&](int warp) { value = combine(value, meeting_.one_of(warp)); });
    return reduce_warp(value, combine);
  }
  template <typename Combine>
  __device__ __forceinline__ float reduce(float value, Combine combine) {
    return gather(announce(value, combine), combine);
  }

  // The same of two sums, at one meeting.
  __device__ __forceinline__ float2 announce(float2 value) {
    value = {reduce_lanes(value.x, Add{}), reduce_lanes(value.y, Add{})};
    if (meets()) meeting_.publish(value);
    return value;
  }
  __device__ __forceinline__ float2 gather(float2 own) {
    if (!meets()) return own;
    meeting_.await();
    float2 sums = {0.0f, 0.0f};
    for_each_warp([&](int warp) {
      const float2 found = meeting_.two_of(warp);
      sums = {sums.x + found.x, sums.y + found.y};
    });
    return {reduce_warp(sums.x, Add{}), reduce_warp(sums.y, Add{})};
  }
  __device__ __forceinline__ float2 reduce(float2 value) { return gather(announce(value)); }

  // Two numbers of each warp, as they are: after `gather_own` they are there.
  __device__ __forceinline__ void announce_own(float2 of_warp) {
    if (meets()) meeting_.publish(of_warp);
  }
  __device__ __forceinline__ void gather_own() {
    if (meets()) meeting_.await();
  }
  // `visit(warp)` of those that this lane looks at.
  template <typename Visit>
  __device__ __forceinline__ void for_each_warp(const Visit& visit) const {
    const int lane = threadIdx.x % kWarp, warps = meeting_.warps();
    if (lane < warps) visit(lane);
    if constexpr (kCluster) {
      for (int warp = lane + kWarp; warp < warps; warp += kWarp) visit(warp);
    }
  }
  __device__ __forceinline__ float2 numbers_of(int warp) const { return meeting_.two_of(warp); }

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

  // A reduction of maxima and sums of exponentials under them, of teams of several warps. `exponential(apart)` is what a sum
  // loses where the maximum is `apart` higher.
  template <typename Exponential>
  __device__ __forceinline__ void announce(OnlineSum own, const Exponential& exponential) {
    const float most = reduce_warp(own.most, Max{});
    meeting_.publish(float2{most, reduce_warp(under(most, own, exponential), Add{})});
  }
  template <typename Exponential>
  __device__ __forceinline__ OnlineSum gather(const Exponential& exponential) {
    meeting_.await();
    float most = -INFINITY, sum = 0.0f;
    for_each_warp([&](int warp) { most = fmaxf(most, meeting_.one_of(warp)); });
    most = reduce_warp(most, Max{});
    for_each_warp([&](int warp) {
      const float2 found = meeting_.two_of(warp);
      sum += under(most, {found.x, found.y}, exponential);
    });
    return {most, reduce_warp(sum, Add{})};
  }

 private:
  template <typename Exponential>
  __device__ __forceinline__ static float under(float most, OnlineSum s, const Exponential& exponential) {
    return s.most == most ? s.sum : s.sum * exponential(s.most - most);
  }

  Meeting<kCluster> meeting_;
};

}  // namespace kernel_pytorch
