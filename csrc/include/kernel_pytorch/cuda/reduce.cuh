// Reductions over the threads of a warp or a block. Every thread gets the result, and the order is fixed.
#pragma once

#include <cooperative_groups.h>

namespace kernel_pytorch {

constexpr int kWarp = 32;
constexpr int kMaxWarps = 32;

struct Add {
  static constexpr float kIdentity = 0.0f;
  __device__ __forceinline__ float operator()(float a, float b) const { return a + b; }
};

struct Max {
  static constexpr float kIdentity = -INFINITY;
  __device__ __forceinline__ float operator()(float a, float b) const { return fmaxf(a, b); }
};

template <typename Combine>
__device__ __forceinline__ float reduce_warp(float value, Combine combine) {
#pragma unroll
  for (int mask = kWarp / 2; mask > 0; mask /= 2) value = combine(value, __shfl_xor_sync(0xffffffffu, value, mask));
  return value;
}

// Reduction over a one-dimensional block of whole warps. `scratch` is in shared memory and holds kMaxWarps floats. It
// can be reused after the next barrier, so callers that reduce twice in a row pass two.
template <typename Combine>
__device__ __forceinline__ float reduce_block(float value, Combine combine, float* scratch) {
  value = reduce_warp(value, combine);
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, warps = blockDim.x / kWarp;
  if (warps == 1) return value;
  if (lane == 0) scratch[warp] = value;
  __syncthreads();
  return reduce_warp(lane < warps ? scratch[lane] : Combine::kIdentity, combine);
}

}  // namespace kernel_pytorch
