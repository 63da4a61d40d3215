// Kernel 3: 16-byte accesses; the row is read once and stays in registers. Each thread starts all its loads before it
// uses the first result. Rows consist of whole vectors; a block holds several short rows.
#pragma once

#include "kernel_pytorch/cuda/team.cuh"
#include "scores.cuh"

namespace kernel_pytorch {
namespace softmax {

constexpr int kMaxThreads = 1024;  // which leaves at most 64 registers

// Whether a thread loads its part of the mask together with the row, if there are registers for both.
template <typename M, int kVectors, int N>
constexpr bool kEarlyMask = sizeof(M) * N * kVectors <= 64;

// Computes this thread's scores, and returns their maximum.
template <typename T, typename M, typename Y, int kVectors, int N>
__device__ __forceinline__ float load_row(const T* x, const M* mask, int step, const Scores<T, M, Y>& scores, int first,
                                          int stride, int columns, float (&z)[kVectors][N]) {
  Packed<T, N> raw[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int column = (v * stride + first) * N;
    if (column < columns) load_packed(x + column, raw[v]);
  }
  constexpr bool kEarly = kEarlyMask<M, kVectors, N>;
  IncomingMask<M, N> masks[kEarly ? kVectors : 1];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int column = (v * stride + first) * N;
    if (kEarly && mask != nullptr && column < columns) masks[kEarly ? v : 0].load(mask, column, step);
  }
  float most = -INFINITY;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int column = (v * stride + first) * N;
    if (column < columns) {
      if constexpr (kEarly) {
        scores.read(raw[v], masks[v], z[v]);
      } else {
        scores.read(raw[v], column, z[v]);
      }
#pragma unroll
      for (int i = 0; i < N; ++i) most = fmaxf(most, z[v][i]);
    }
  }
  return most;
}

// Replaces this thread's scores by their exponentials, and returns the sum.
template <typename Scores, int kVectors, int N>
__device__ __forceinline__ float exponentials(const Scores& scores, float (&z)[kVectors][N], float base, int first, int stride,
                                              int columns) {
  float sum = 0.0f;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if ((v * stride + first) * N < columns) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        z[v][i] = scores.exponential(z[v][i] - base);
        sum += z[v][i];
      }
    }
  }
  return sum;
}

// z / sum, rounded once: the product with the reciprocal is corrected by its remainder.
__device__ __forceinline__ float divided(float z, float sum, float share) {
  const float y = z * share;
  return fmaf(fmaf(-y, sum, z), share, y);
}

template <typename Y, int kVectors, int N>
__device__ __forceinline__ void store_row(Y* y, float sum, int first, int stride, int columns,
                                          float (&z)[kVectors][N]) {
  const float share = share_of_sum(sum);
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int column = (v * stride + first) * N;
    if (column < columns) {
#pragma unroll
      for (int i = 0; i < N; ++i) z[v][i] = kRounded<Y> ? z[v][i] * share : divided(z[v][i], sum, share);
      store_vector<Y, N>(y + column, z[v]);
    }
  }
}

// A team beyond the last row loads nothing, but its threads take part in the reductions.
template <typename T, typename M, typename Y, int kVectors>
__global__ void __launch_bounds__(kMaxThreads) forward_vectorized(const ForwardPointers<T, M, Y> p) {
  constexpr int N = kVectorLength<T>;
  __shared__ TeamScratch<false> scratch;
  Team<false> team(scratch);
  const int64_t row = team.index() * blockDim.y + threadIdx.y;
  const int columns = row < p.rows ? p.columns : 0;
  const int64_t offset = row_offset(row, p.columns);
  const M* mask = columns > 0 ? mask_of(p, row) : nullptr;
  const int first = team.first(), stride = team.stride();
  float z[kVectors][N];
  const Scores<T, M, Y> scores(mask, p.broadcast.column_step, p.scale);
  const float own = load_row(p.x + offset, mask, p.broadcast.column_step, scores, first, stride, columns, z);
  const float base = base_of(team.reduce(own, Max{}), mask != nullptr);
  const float sum = team.reduce(exponentials(scores, z, base, first, stride, columns), Add{});
  store_row(p.y + offset, sum, first, stride, columns, z);
}

template <typename T, int kVectors>
__global__ void __launch_bounds__(kMaxThreads) backward_vectorized(const BackwardPointers<T> p) {
  constexpr int N = kVectorLength<T>;
  __shared__ TeamScratch<false> scratch;
  Team<false> team(scratch);
  const int64_t row = team.index() * blockDim.y + threadIdx.y;
  const int columns = row < p.rows ? p.columns : 0;
  const int64_t offset = row_offset(row, p.columns);
  const int first = team.first(), stride = team.stride();
  Packed<T, N> dy[kVectors], y[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int column = (v * stride + first) * N;
    if (column < columns) {
      load_packed(p.dy + offset + column, dy[v]);
      load_packed(p.y + offset + column, y[v]);
    }
  }
  // Sum over the row of `term`, applied to the elements of dy and y.
  const auto sum = [&](const auto& term) {
    float found = 0.0f;
    if constexpr (kVectors >= 4) forget_unpacked(dy), forget_unpacked(y);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if ((v * stride + first) * N < columns) {
        float a[N], b[N];
        unpack(dy[v], a);
        unpack(y[v], b);
#pragma unroll
        for (int i = 0; i < N; ++i) found += term(a[i], b[i]);
      }
    }
    return team.reduce(found, Add{});
  };
  const float dot = sum([](float a, float b) { return a * b; });
  const float rest = sum([dot](float a, float b) { return (a - dot) * b; });  // see softmax.h
  if (p.dots != nullptr && team.leads() && columns > 0) p.dots[row] = dot + rest;
  if (p.dx == nullptr) return;
  if constexpr (kVectors >= 4) forget_unpacked(dy), forget_unpacked(y);
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int column = (v * stride + first) * N;
    if (column < columns) {
      float a[N], b[N];
      unpack(dy[v], a);
      unpack(y[v], b);
#pragma unroll
      for (int i = 0; i < N; ++i) a[i] = score_gradient(a[i], b[i], dot, rest) * p.scale;
      store_vector<T, N>(p.dx + offset + column, a);
    }
  }
}

}  // namespace softmax
}  // namespace kernel_pytorch
