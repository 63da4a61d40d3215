// Teams of threads that share a row: lanes of a warp, a block, or a cluster of blocks.
#pragma once

#include "kernel_pytorch/cuda/meeting.cuh"
#include "kernel_pytorch/cuda/online_softmax.cuh"
#include "kernel_pytorch/cuda/reduce.cuh"

namespace kernel_pytorch {

// Shared memory for a team's reductions.
template <bool kCluster>
using TeamScratch = typename Meeting<kCluster>::Numbers;

// The threads along x of a block share a row; in a cluster, together with those of the other blocks. With at most 32
// threads along x a team is part of a warp: blocks of several rows have whole warps, all of whose threads take part.
template <bool kCluster>
class Team {
 public:
  __device__ __forceinline__ explicit Team(TeamScratch<kCluster>& scratch) : meeting_(scratch) {}

  // Index of a thread's first vector, and distance to its next one.
  __device__ __forceinline__ int first() const { return meeting_.rank() * static_cast<int>(blockDim.x) + threadIdx.x; }
  __device__ __forceinline__ int stride() const { return meeting_.blocks() * static_cast<int>(blockDim.x); }
  __device__ __forceinline__ bool leads() const { return first() == 0; }
  // Index of this team in the grid, if a block has one row.
  __device__ __forceinline__ int64_t index() const { return blockIdx.x / meeting_.blocks(); }
  __device__ __forceinline__ int64_t teams() const { return gridDim.x / meeting_.blocks(); }

  // A reduction has two steps with room for other work in between: `announce` publishes the value of every warp, and
  // `gather` combines the values of all warps. Every thread gets the result.
  template <typename Combine>
  __device__ __forceinline__ float announce(float value, Combine combine) {
    value = reduce_lanes(value, combine);
    if (meets()) meeting_.publish(value);
    return value;
  }
  // `own` is the result of `announce`.
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

  // Same for two sums in one exchange.
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

  // Exchanges two numbers of each warp without reducing them: `numbers_of` returns them after `gather_own`.
  __device__ __forceinline__ void announce_own(float2 of_warp) {
    if (meets()) meeting_.publish(of_warp);
  }
  __device__ __forceinline__ void gather_own() {
    if (meets()) meeting_.await();
  }
  // Calls `visit(warp)` for the warps that are assigned to this lane.
  template <typename Visit>
  __device__ __forceinline__ void for_each_warp(const Visit& visit) const {
    const int lane = threadIdx.x % kWarp, warps = meeting_.warps();
    if (lane < warps) visit(lane);
    if constexpr (kCluster) {
      for (int warp = lane + kWarp; warp < warps; warp += kWarp) visit(warp);
    }
  }
  __device__ __forceinline__ float2 numbers_of(int warp) const { return meeting_.two_of(warp); }

  // Reduction over the lanes of a warp that share the row.
  template <typename Combine>
  __device__ __forceinline__ static float reduce_lanes(float value, Combine combine) {
    if (blockDim.x >= kWarp) return reduce_warp(value, combine);
    for (int mask = blockDim.x / 2; mask > 0; mask /= 2) {
      value = combine(value, __shfl_xor_sync(0xffffffffu, value, mask));
    }
    return value;
  }
  // Whether a team has more than one warp.
  __device__ __forceinline__ static bool meets() { return kCluster || blockDim.x > kWarp; }

  // Reduction of maxima and sums of exponentials relative to them, for teams of several warps.
  // `exponential(difference)` is the factor that converts a sum to another maximum.
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
