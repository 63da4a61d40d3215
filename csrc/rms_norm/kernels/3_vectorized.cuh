// Kernel 3: 16-byte accesses; the row is read once and stays in registers. Each thread starts all its loads before it
// uses the first result, and keeps the vectors as stored in memory. Rows consist of whole vectors, so each vector of a
// thread is either complete or missing; a block holds several short rows.
#pragma once

#include "kernel_pytorch/cuda/math.cuh"
#include "kernel_pytorch/cuda/sum_shares.cuh"
#include "kernel_pytorch/cuda/team.cuh"
#include "kernel_pytorch/cuda/vector.cuh"
#include "kernel_pytorch/index.h"
#include "parameters.cuh"

namespace kernel_pytorch {
namespace rms_norm {

constexpr int kMostThreads = 512;

// Minimum number of blocks of a forward per multiprocessor; it determines how many loads are in flight.
template <typename W, int kVectors>
constexpr int kForwardBlocks = kVectors == 1 ? 4 : kVectors == 2 && sizeof(W) == 2 ? 3 : 2;

// offset + weight for one vector; ones without a weight.
template <typename W, int N>
__device__ __forceinline__ void scale_of(bool there, const Packed<W, N>& weight, float offset, float (&scale)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) scale[i] = 1.0f;
  if (!there) return;
  unpack(weight, scale);
#pragma unroll
  for (int i = 0; i < N; ++i) scale[i] += offset;
}

template <typename W, int N>
__device__ __forceinline__ void load_scale(const W* weight, int64_t at, float offset, float (&scale)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) scale[i] = 1.0f;
  if (weight == nullptr) return;
  load_vector<W, N>(weight + at, scale);
#pragma unroll
  for (int i = 0; i < N; ++i) scale[i] += offset;
}

// Loads this thread's vectors of the weight.
template <typename W, int kVectors, int N>
__device__ __forceinline__ void load_weight(const W* weight, int64_t offset, int first, int stride, int columns,
                                            Packed<W, N> (&loaded)[kVectors]) {
  if (weight == nullptr) return;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int column = (v * stride + first) * N;
    if (column < columns) load_kept(weight + offset + column, loaded[v]);
  }
}

// Whether the weight is loaded together with x, if there are registers for both: loaded later, all threads wait for it.
template <int kVectors>
constexpr bool kEarlyWeight = kVectors <= 2;

// Replaces x by h = x + residual, rounded, and stores it.
template <typename T, typename W, typename Y, int kVectors, int N>
__device__ __forceinline__ void add_residual(const ForwardPointers<T, W, Y>& p, int64_t offset, int first, int stride,
                                             int columns, Packed<T, N> (&h)[kVectors]) {
  Packed<T, N> residual[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int column = (v * stride + first) * N;
    if (column < columns) load_packed(p.residual + offset + column, residual[v]);
  }
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int column = (v * stride + first) * N;
    if (column < columns) {
      float x[N], added[N];
      unpack(h[v], x);
      unpack(residual[v], added);
#pragma unroll
      for (int i = 0; i < N; ++i) x[i] += added[i];
      pack(x, h[v]);
      store_packed(p.h + offset + column, h[v]);
    }
  }
}

// Largest number of vectors per thread with a residual, which doubles the numbers to load.
constexpr int kMostAdded = 4;

// Loads this thread's vectors of h: x, or x + residual.
template <typename T, typename W, typename Y, int kVectors, int N>
__device__ __forceinline__ void load_h(const ForwardPointers<T, W, Y>& p, int64_t offset, int first, int stride,
                                       int columns, Packed<T, N> (&h)[kVectors]) {
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int column = (v * stride + first) * N;
    if (column < columns) load_packed(p.x + offset + column, h[v]);
  }
  if constexpr (kVectors <= kMostAdded) {
    if (p.residual != nullptr) add_residual(p, offset, first, stride, columns, h);
  }
}

// A team beyond the last row loads nothing, but its threads take part in the reductions.
template <typename T, typename W, typename Y, int kVectors>
__global__ void __launch_bounds__(kMostThreads, kForwardBlocks<W, kVectors>)
    forward_vectorized(const ForwardPointers<T, W, Y> p) {
  constexpr int N = kVectorLength<T>;
  __shared__ TeamScratch<false> scratch;
  Team<false> team(scratch);
  const int64_t row = team.index() * blockDim.y + threadIdx.y;
  const int columns = row < p.rows ? p.columns : 0;
  const int64_t offset = row_offset(row, p.columns);
  const int first = team.first(), stride = team.stride();
  Packed<T, N> h[kVectors];
  load_h(p, offset, first, stride, columns, h);
  const int64_t weights = p.weight_rows == 1 ? 0 : row_offset(remainder(row, p.weight_rows), p.columns);
  Packed<W, N> weight[kVectors];
  if constexpr (kEarlyWeight<kVectors>) load_weight(p.weight, weights, first, stride, columns, weight);
  float sum = 0.0f;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if ((v * stride + first) * N < columns) {
      float x[N];
      unpack(h[v], x);
#pragma unroll
      for (int i = 0; i < N; ++i) sum += x[i] * x[i];
    }
  }
  sum = team.reduce(sum, Add{});
  if constexpr (kVectors >= 4) forget_unpacked(h);
  const W* const late = read_now(p.weight);
  const float rstd = rstd_of<kRounded<Y>>(sum, p.columns, p.eps);
  if (team.leads() && columns > 0) p.rstd[row] = rstd;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int column = (v * stride + first) * N;
    if (column < columns) {
      float x[N], scale[N];
      unpack(h[v], x);
      if constexpr (kEarlyWeight<kVectors>) {
        scale_of(p.weight != nullptr, weight[v], p.offset, scale);
      } else {
        load_scale(late, weights + column, p.offset, scale);
      }
#pragma unroll
      for (int i = 0; i < N; ++i) scale[i] *= x[i] * rstd;
      store_vector<Y, N>(p.y + offset + column, scale);
    }
  }
}

// Adds dy * x_hat to the partial sum of dweight, and returns the sum of its products with `scale`.
template <int N>
__device__ __forceinline__ float scale_gradient(const float (&dy)[N], const float (&x)[N], float rstd,
                                                const float (&scale)[N], float (&share)[N]) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const float x_hat = x[i] * rstd;
    share[i] += dy[i] * x_hat;
    sum += dy[i] * scale[i] * x_hat;
  }
  return sum;
}

// Replaces dy by dx; `mean` is that of dy * scale * x_hat.
template <int N>
__device__ __forceinline__ void input_gradient(float (&dy)[N], const float (&x)[N], float rstd, const float (&scale)[N],
                                               float mean) {
  const float along = rstd * mean;
#pragma unroll
  for (int i = 0; i < N; ++i) dy[i] = rstd * (dy[i] * scale[i] - x[i] * along);
}

// This thread's part of one row, while it is loaded or processed.
template <typename T, typename Y, int kVectors, int N>
struct IncomingRow {
  Packed<Y, N> dy[kVectors];
  Packed<T, N> h[kVectors];
  Packed<T, N> dh[kVectors];
  float rstd;

  // `from_dh` may be null.
  __device__ __forceinline__ void load(const Y* from_dy, const T* from_h, const T* from_dh, const float* from_rstd,
                                       int first, int stride, int columns) {
    if (columns > 0) rstd = *from_rstd;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int column = (v * stride + first) * N;
      if (column < columns) {
        load_packed(from_dy + column, dy[v]);
        load_packed(from_h + column, h[v]);
        if (from_dh != nullptr) load_packed(from_dh + column, dh[v]);
      }
    }
  }
};

// Loads offset + weight for all columns of this thread: all rows of a part use one row of the weight.
template <int kVectors, int N, typename T, typename W, typename Y>
__device__ __forceinline__ void load_scales(const BackwardPointers<T, W, Y>& p, int64_t part, int first, int stride,
                                            float (&scale)[kVectors][N]) {
  const int64_t weights = p.weight_rows == 1 ? 0 : row_offset(remainder(part, p.weight_rows), p.columns);
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int column = (v * stride + first) * N;
    if (column < p.columns) load_scale(p.weight, weights + column, p.offset, scale[v]);
  }
}

// Computes dx for the rows of one part, prefetching the next row, and accumulates the partial sum of dweight in
// registers.
template <typename T, typename W, typename Y, int kVectors>
__device__ __forceinline__ void backward_rows(const BackwardPointers<T, W, Y>& p, TeamScratch<false>& scratch,
                                              float (&share)[kVectors][kVectorLength<T>]) {
  constexpr int N = kVectorLength<T>;
  Team<false> team(scratch);
  const int64_t part = blockIdx.x, row = part + threadIdx.y * p.parts;
  const int first = team.first(), stride = team.stride();
  const int turns = static_cast<int>(quotient(p.rows - part + p.parts - 1, p.parts));  // rows of the block
  const int step = static_cast<int>(blockDim.y);                                       // rows at once
  const int64_t row_step = p.parts * step, offset_step = row_offset(row_step, p.columns);
  int64_t offset = row_offset(row, p.columns);
  const float* rstds = p.rstd + row;
  IncomingRow<T, Y, kVectors, N> next;
  const T* const dh = p.dx != nullptr ? p.dh : nullptr;
  const auto load = [&](int64_t from, bool there) {
    next.load(p.dy + from, p.h + from, dh != nullptr ? dh + from : nullptr, rstds, first, stride, there ? p.columns : 0);
  };
  load(offset, static_cast<int>(threadIdx.y) < turns);
  float scale[kVectors][N];
  load_scales(p, part, first, stride, scale);
  for (int turn = 0; turn < turns; turn += step) {
    const int columns = turn + static_cast<int>(threadIdx.y) < turns ? p.columns : 0;
    IncomingRow<T, Y, kVectors, N> now = next;
    rstds += row_step;
    if (turn + step < turns) {
      load(offset + offset_step, turn + step + static_cast<int>(threadIdx.y) < turns);
    }
    float sum = 0.0f;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if ((v * stride + first) * N < columns) {
        float g[N], x[N];
        unpack(now.dy[v], g);
        unpack(now.h[v], x);
        sum += scale_gradient(g, x, now.rstd, scale[v], share[v]);
      }
    }
    if (p.dx != nullptr) {
      const float mean = team.reduce(sum, Add{}) / static_cast<float>(p.columns);
      forget_unpacked(now.dy);
      forget_unpacked(now.h);
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const int column = (v * stride + first) * N;
        if (column < columns) {
          float g[N], x[N];
          unpack(now.dy[v], g);
          unpack(now.h[v], x);
          input_gradient(g, x, now.rstd, scale[v], mean);
          if (dh != nullptr) {
            unpack(now.dh[v], x);
#pragma unroll
            for (int i = 0; i < N; ++i) g[i] += x[i];
          }
          store_vector<T, N>(p.dx + offset + column, g);
        }
      }
    }
    offset += offset_step;
  }
}

// Resident threads per multiprocessor: two blocks if registers suffice (with one vector per thread), else one.
template <int kVectors>
constexpr int kResident = kVectors == 1 ? 1024 : 512;

template <typename T, typename W, typename Y, int kVectors>
__global__ void __launch_bounds__(kMostThreads, kResident<kVectors> / kMostThreads)
    backward_vectorized(const BackwardPointers<T, W, Y> p) {
  constexpr int N = kVectorLength<T>;
  __shared__ TeamScratch<false> scratch;
  float share[kVectors][N] = {};
  backward_rows<T, W, Y, kVectors>(p, scratch, share);
  if (p.shares == nullptr) return;
  if constexpr (kVectors == 1) {
    __shared__ float sums[kFewThreads * N];
    if (blockDim.y > 1) add_teams(share, sums);
  }
  if (threadIdx.y == 0) store_share(p.shares, blockIdx.x, p.columns, threadIdx.x, blockDim.x, share);
}

}  // namespace rms_norm
}  // namespace kernel_pytorch
