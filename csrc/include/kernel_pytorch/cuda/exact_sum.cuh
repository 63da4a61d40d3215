// Compensated sums: `lost` accumulates the rounding error of every addition.
//
// Ogita, Rump and Oishi, "Accurate Sum and Dot Product", SIAM Journal on Scientific Computing 26, 2005.
#pragma once

#include "kernel_pytorch/cuda/reduce.cuh"

namespace kernel_pytorch {

// total + lost. Without kExact there is no compensation, and `lost` is zero.
template <bool kExact>
struct Sum {
  float total = 0.0f;
  float lost = 0.0f;

  // `below` is the rounding error of the value itself.
  __device__ __forceinline__ void add(float value, float below = 0.0f) {
    const float sum = total + value;
    if constexpr (kExact) {
      const float added = sum - total;  // the part of the value that the sum contains
      lost += ((total - (sum - added)) + (value - added)) + below;
    }
    total = sum;
  }

  __device__ __forceinline__ void add_product(float a, float b) {
    const float product = __fmul_rn(a, b);
    add(product, kExact ? fmaf(a, b, -product) : 0.0f);
  }
};

template <bool kExact>
__device__ __forceinline__ Sum<kExact> reduce_warp(Sum<kExact> sum) {
#pragma unroll
  for (int mask = kWarp / 2; mask > 0; mask /= 2) {
    const float total = __shfl_xor_sync(0xffffffffu, sum.total, mask);
    sum.add(total, kExact ? __shfl_xor_sync(0xffffffffu, sum.lost, mask) : 0.0f);
  }
  return sum;
}

// Sum over a one-dimensional block of whole warps. `scratch` is in shared memory and holds kMaxWarps elements; it can
// be reused after the next barrier.
template <bool kExact>
__device__ __forceinline__ Sum<kExact> reduce_block(Sum<kExact> sum, float2* scratch) {
  sum = reduce_warp(sum);
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, warps = blockDim.x / kWarp;
  if (warps == 1) return sum;
  if (lane == 0) scratch[warp] = {sum.total, sum.lost};
  __syncthreads();
  const float2 found = lane < warps ? scratch[lane] : float2{0.0f, 0.0f};
  return reduce_warp(Sum<kExact>{found.x, found.y});
}

}  // namespace kernel_pytorch
