// Several sums over the threads of a team in one reduction, each with the result of a separate reduction.
#pragma once

#include "kernel_pytorch/cuda/meeting.cuh"
#include "kernel_pytorch/cuda/reduce.cuh"
#include "kernel_pytorch/cuda/shared_memory.cuh"

namespace kernel_pytorch {

// The team is the threads along x of a block (team.cuh): at most `kWarp / kSums` warps, or a part of one. In each of
// the first steps half of the lanes continue with half of the sums, so there are few more shuffles than for a single
// sum, and one barrier is enough for all sums.
template <int kSums>
class RowSums {
  static_assert(kSums > 1 && kSums <= kWarp && (kSums & (kSums - 1)) == 0);
  static constexpr int kLanes = kWarp / kSums;  // lanes of a warp that end up with the same sum

 public:
  struct Scratch {
    float of_warp[kTurns][kWarp];
  };

  __device__ __forceinline__ explicit RowSums(const Scratch& scratch)
      : own_(held_address(shared_address(&scratch) + threadIdx.x / kLanes * sizeof(float))),
        found_(held_address(shared_address(&scratch) + threadIdx.x % kWarp * sizeof(float))) {}

  __device__ __forceinline__ void reduce(float (&sums)[kSums]) {
    if (blockDim.x < kWarp) {
      for (int mask = blockDim.x / 2; mask > 0; mask /= 2) {
#pragma unroll
        for (float& sum : sums) add_other(mask, sum);
      }
      return;
    }
    const float sum = sum_of_warp(sums);
    if (blockDim.x == kWarp) return hand_out<kLanes>(sum, sums);
    hand_out<1>(sum_of_warps(sum), sums);
  }

 private:
  __device__ __forceinline__ static void add_other(int mask, float& sum) { sum += __shfl_xor_sync(0xffffffffu, sum, mask); }

  template <int kApart>
  __device__ __forceinline__ static void hand_out(float sum, float (&sums)[kSums]) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) sums[i] = __shfl_sync(0xffffffffu, sum, i * kApart);
  }

  // Returns the sum of index `lane / kLanes`, over a warp.
  __device__ __forceinline__ static float sum_of_warp(float (&sums)[kSums]) {
#pragma unroll
    for (int half = kSums / 2; half > 0; half /= 2) {
      const bool second = (threadIdx.x & (half * kLanes)) != 0;
#pragma unroll
      for (int i = 0; i < half; ++i) {
        const float given = second ? sums[i] : sums[i + half], kept = second ? sums[i + half] : sums[i];
        sums[i] = kept + __shfl_xor_sync(0xffffffffu, given, half * kLanes);
      }
    }
    float sum = sums[0];
#pragma unroll
    for (int mask = kLanes / 2; mask > 0; mask /= 2) add_other(mask, sum);
    return sum;
  }

  // Returns the sum of index `lane % kSums`, over all warps. Consecutive exchanges use different buffers (meeting.cuh).
  __device__ __forceinline__ float sum_of_warps(float sum) {
    turn_ ^= sizeof(Scratch) / kTurns;
    if (threadIdx.x % kLanes == 0) store_shared_float(own_ + turn_, sum);
    __syncthreads();
    sum = threadIdx.x % kWarp < blockDim.x / kLanes ? load_shared_float(found_ + turn_) : 0.0f;
#pragma unroll
    for (int mask = kWarp / 2; mask >= kSums; mask /= 2) add_other(mask, sum);
    return sum;
  }

  uint32_t own_;    // addresses where this lane writes its sum, and reads one
  uint32_t found_;
  uint32_t turn_ = 0;
};

}  // namespace kernel_pytorch
