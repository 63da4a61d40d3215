// Computation of scores from x and a mask, and of exponentials from scores.
#pragma once

#include "kernel_pytorch/cuda/math.cuh"
#include "kernel_pytorch/cuda/online_softmax.cuh"
#include "parameters.cuh"

namespace kernel_pytorch {
namespace softmax {

// Scores of a row, and exponentials of differences of scores. For 16-bit results without a mask the score is x, or -x
// if the scale is negative, and the scale is part of the exponent's factor, where it is free.
template <typename T, typename M, typename Y>
class Scores {
 public:
  static constexpr bool kHalf = kRounded<Y>;

  __device__ __forceinline__ Scores(const M* mask, int step, float scale) : mask_(mask), step_(step), scale_(scale) {
    constexpr float kLogarithm = 1.44269504f;  // log2(e)
    raw_ = kHalf && mask == nullptr;
    unit_ = raw_ ? fabsf(scale) * kLogarithm : kLogarithm;
  }

  // Reads `N` scores, from an aligned column.
  template <int N>
  __device__ __forceinline__ void read(const Packed<T, N>& x, int column, float (&z)[N]) const {
    unpack(x, z);
    if (!raw_) return to_scores<M, N>(mask_, column, step_, scale_, z);
    orient(z);
  }

  // Same, with a mask that has been loaded.
  template <int N>
  __device__ __forceinline__ void read(const Packed<T, N>& x, const IncomingMask<M, N>& mask, float (&z)[N]) const {
    unpack(x, z);
    if (raw_) return orient(z);
    scale_all(scale_, z);
    if (mask_ != nullptr) mask.apply(z);
  }

  __device__ __forceinline__ bool masked() const { return mask_ != nullptr; }

  template <int N>
  __device__ __forceinline__ void add(const float (&z)[N], OnlineSum& own) const {
    float most = own.most;
#pragma unroll
    for (int i = 0; i < N; ++i) most = fmaxf(most, z[i]);
    const float base = most == -INFINITY ? 0.0f : most;
    own.sum *= exponential(own.most - base);
#pragma unroll
    for (int i = 0; i < N; ++i) own.sum += exponential(z[i] - base);
    own.most = most;
  }

  __device__ __forceinline__ float exponential(float apart) const {
    return kHalf ? exp2_once(unit_ * apart) : expf(apart);
  }
  // Same, divided by 2^logarithm.
  __device__ __forceinline__ float exponential(float apart, float logarithm) const {
    return exp2_once(fmaf(unit_, apart, -logarithm));
  }

 private:
  template <int N>
  __device__ __forceinline__ void orient(float (&z)[N]) const {
    if (scale_ >= 0.0f) return;
#pragma unroll
    for (float& one : z) one = -one;
  }

  const M* mask_;
  int step_;
  float scale_;
  float unit_;
  bool raw_;
};

}  // namespace softmax
}  // namespace kernel_pytorch
