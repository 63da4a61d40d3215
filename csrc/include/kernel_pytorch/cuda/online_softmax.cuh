// Maximum of a row and sum of its exponentials, in one pass.
//
// Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018, https://arxiv.org/abs/1805.02867: a new
// maximum rescales the previous sum. The maximum ignores NaN; the sum propagates it.
#pragma once

#include "kernel_pytorch/cuda/math.cuh"
#include "kernel_pytorch/cuda/reduce.cuh"

namespace kernel_pytorch {

struct OnlineSum {
  float most = -INFINITY;
  float sum = 0.0f;

  __device__ __forceinline__ void add(float z) {
    if (z > most) {
      sum = sum * expf(most - z) + expf(z - z);  // NaN for infinity, from infinity - infinity
      most = z;
    } else if (z != -INFINITY) {
      sum += expf(z - most);
    }
  }

  // Adds `N` numbers with one update of the maximum. kHalf: the numbers have 16-bit precision.
  template <bool kHalf, int N>
  __device__ __forceinline__ void add_all(const float (&z)[N]) {
    float next = most;
#pragma unroll
    for (int i = 0; i < N; ++i) next = fmaxf(next, z[i]);
    const float base = next == -INFINITY ? 0.0f : next;
    sum *= exponential<kHalf>(most - base);
#pragma unroll
    for (int i = 0; i < N; ++i) sum += exponential<kHalf>(z[i] - base);
    most = next;
  }
};

// Rescales a sum from its maximum to `base`, which must not be smaller.
__device__ __forceinline__ float scaled_sum(OnlineSum s, float base) {
  return s.most == base ? s.sum : s.sum * expf(s.most - base);
}

// Combines two sums.
__device__ __forceinline__ OnlineSum combined(OnlineSum a, OnlineSum b) {
  const float most = fmaxf(a.most, b.most);
  return {most, scaled_sum(a, most) + scaled_sum(b, most)};
}

// Replaces scores by their exponentials relative to their own maximum; by zeros if all of them are minus infinity.
template <bool kHalf, int N>
__device__ __forceinline__ OnlineSum exponentials_of(float (&z)[N]) {
  OnlineSum own;
#pragma unroll
  for (int i = 0; i < N; ++i) own.most = fmaxf(own.most, z[i]);
  const float base = own.most == -INFINITY ? 0.0f : own.most;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    z[i] = exponential<kHalf>(z[i] - base);
    own.sum += z[i];
  }
  return own;
}

__device__ __forceinline__ OnlineSum reduce_warp(OnlineSum s) {
  const float most = reduce_warp(s.most, Max{});
  return {most, reduce_warp(scaled_sum(s, most), Add{})};
}

// Offset subtracted from the scores of a row: their maximum; zero if all of them are masked, so that every exponential
// is zero instead of NaN.
__device__ __forceinline__ float base_of(float most, bool masked) { return masked && most == -INFINITY ? 0.0f : most; }

// Factor that normalizes the exponentials; zero if all of them are zero.
__device__ __forceinline__ float share_of_sum(float sum) { return sum == 0.0f ? 0.0f : 1.0f / sum; }

// Reduction over a block. `scratch` is in shared memory and holds 2 kMaxWarps floats; reusable after the next barrier.
__device__ __forceinline__ OnlineSum reduce_online(OnlineSum s, float* scratch) {
  const float most = reduce_block(s.most, Max{}, scratch);
  return {most, reduce_block(scaled_sum(s, most), Add{}, scratch + kMaxWarps)};
}

}  // namespace kernel_pytorch
