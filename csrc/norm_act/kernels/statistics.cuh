// Mean and rstd of a row that a team has in registers or slots. Each warp computes the mean of its elements and the sum
// of squares around it; one exchange then combines the warps. No large number is subtracted from another, so that
// numbers far from zero keep their digits.
//
// Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances", 1979,
// http://i.stanford.edu/pub/cstr/reports/cs/tr/79/773/CS-TR-79-773.pdf
#pragma once

#include "2_block.cuh"
#include "kernel_pytorch/cuda/math.cuh"
#include "kernel_pytorch/cuda/team.cuh"

namespace kernel_pytorch {
namespace norm_act {

// Number of elements of a warp of a team: each thread has `kVectors` vectors of `N`, `stride` vectors apart.
template <int kVectors, int N>
class Counts {
 public:
  __device__ __forceinline__ Counts(int stride, int columns)
      : stride_(stride), vectors_(columns / N), equal_(vectors_ == kVectors * stride) {}

  __device__ __forceinline__ float of(int warp) const {
    if (equal_) return kVectors * kWarp * N;
    int count = 0;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int left = vectors_ - v * stride_ - warp * kWarp;
      count += left < 0 ? 0 : left < kWarp ? left : kWarp;
    }
    return static_cast<float>(count * N);
  }

 private:
  int stride_;
  int vectors_;
  bool equal_;
};

// First step. `for_each(body)` calls `body(value)` for every element of a thread, and `again(body)` repeats that.
// Without `centred`, squares are around zero. `kExact`: divisions and square roots are exact, and the rounding error of
// the mean is corrected, which 16-bit results do not need. The result is passed to `gather_moments`.
template <bool kExact, int kVectors, int N, bool kCluster, typename ForEach, typename Again>
__device__ __forceinline__ float2 announce_moments(Team<kCluster>& team, bool centred, int columns,
                                                   const ForEach& for_each, const Again& again) {
  float2 moments = {0.0f, 0.0f};
  if (!centred) {
    for_each([&](float value) { moments.y += value * value; });
    moments.y = team.announce(moments.y, Add{});
    return moments;
  }
  float sum = 0.0f;
  for_each([&](float value) { sum += value; });
  const float held = team.meets() ? Counts<kVectors, N>(team.stride(), columns).of(team.first() / kWarp)
                                  : static_cast<float>(columns);
  const float count = held > 0.0f ? held : 1.0f;
  sum = team.reduce_lanes(sum, Add{});
  const float mean = kExact ? sum / count : sum * __frcp_rn(count);
  again([&](float value) { add_moments(value - mean, moments); });
  moments.y = team.reduce_lanes(moments.y, Add{});
  if constexpr (kExact) {
    const float off = team.reduce_lanes(moments.x, Add{}) / count;
    moments = {mean + off, moments.y - count * off * off};
  } else {
    moments.x = mean;
  }
  team.announce_own(moments);
  return moments;
}

template <bool kExact, int kVectors, int N, bool kCluster>
__device__ __forceinline__ Statistics gather_moments(Team<kCluster>& team, float2 own, bool centred, int columns, float eps) {
  const auto from = [&](float squares, float mean) -> Statistics {  // squares around that mean
    return {mean, is_nothing(centred, columns) ? 0.0f : rstd_of<!kExact>(squares, columns, eps)};
  };
  if (!centred) return from(team.gather(own.y, Add{}), 0.0f);
  if (!team.meets()) return from(own.y, own.x);
  team.gather_own();
  const Counts<kVectors, N> counts(team.stride(), columns);
  const float all = static_cast<float>(columns);
  // A pivot near the mean: that of one of w warps is within sqrt(w) standard deviations, close enough for 16 bits.
  float pivot = team.numbers_of(0).x;
  if constexpr (kExact) {
    float sum = 0.0f;
    team.for_each_warp([&](int warp) { sum += counts.of(warp) * team.numbers_of(warp).x; });
    pivot = reduce_warp(sum, Add{}) / all;
  }
  float2 moments = {0.0f, 0.0f};
  team.for_each_warp([&](int warp) {
    const float2 found = team.numbers_of(warp);
    const float apart = found.x - pivot, of_all = counts.of(warp) * apart;
    moments.x += of_all;
    moments.y += fmaf(of_all, apart, found.y);
  });
  moments = {reduce_warp(moments.x, Add{}), reduce_warp(moments.y, Add{})};
  const float off = kExact ? moments.x / all : moments.x * __frcp_rn(all);
  return from(fmaf(-all * off, off, moments.y), pivot + off);
}

}  // namespace norm_act
}  // namespace kernel_pytorch
