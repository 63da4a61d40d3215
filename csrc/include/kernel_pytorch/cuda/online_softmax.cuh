// The maximum of a row and the sum of its exponentials, in one pass.
//
// Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018, https://arxiv.org/abs/1805.02867: where the
// maximum grows, what was summed under the old one is scaled down. A NaN is passed over by the maximum and kept by the sum.
#pragma once

#include "kernel_pytorch/cuda/math.cuh"
#include "kernel_pytorch/cuda/reduce.cuh"

namespace kernel_pytorch {

struct OnlineSum {
  float most = -INFINITY;
  float sum = 0.0f;

  __device__ __forceinline__ void add(float z) {
    if (z > most) {
      sum = sum * expf(most - z) + expf(z - z);  // of infinity: NaN, as infinity less infinity
      most = z;
    } else if (z != -INFINITY) {
      sum += expf(z - most);
    }
  }

  // `N` numbers at once: the sum follows the maximum once for all of them. kHalf: they have the digits of 16 bits.
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

// What a sum under `most` is under `base`, which is no smaller.
__device__ __forceinline__ float scaled_sum(OnlineSum s, float base) {
  return s.most == base ? s.sum : s.sum * expf(s.most - base);
}

// Both together.
__device__ __forceinline__ OnlineSum combined(OnlineSum a, OnlineSum b) {
  const float most = fmaxf(a.most, b.most);
  return {most, scaled_sum(a, most) + scaled_sum(b, most)};
}

// The exponentials of a few scores, under their own maximum, in their place; of nothing but minus infinity, zeros.
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

// What is subtracted from the scores of a row: their maximum; but zero where a mask has left nothing, so that every
// exponential is zero and not NaN.
__device__ __forceinline__ float base_of(float most, bool masked) { return masked && most == -INFINITY ? 0.0f : most; }

// What the exponentials are multiplied by: zero where they are all zero.
__device__ __forceinline__ float share_of_sum(float sum) { return sum == 0.0f ? 0.0f : 1.0f / sum; }

// Of a block. `scratch` is shared and holds 2 kMaxWarps floats, to be used again after the next barrier.
__device__ __forceinline__ OnlineSum reduce_online(OnlineSum s, float* scratch) {
  const float most = reduce_block(s.most, Max{}, scratch);
  return {most, reduce_block(scaled_sum(s, most), Add{}, scratch + kMaxWarps)};
}

}  // namespace kernel_pytorch
