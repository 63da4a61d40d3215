// Version 3: accesses of 16 bytes, and the row stays in registers: it is read once. `kVectors` vectors a thread; rows end on
// a vector. A block is one row, or several rows of one warp each.
#pragma once

#include "kernel_pytorch/cuda/online_softmax.cuh"
#include "kernel_pytorch/cuda/rows.cuh"
#include "parameters.cuh"

namespace kernel_pytorch {
namespace softmax {

constexpr int kMaxThreads = 1024;

// The backward holds two numbers for each of the forward's one: fewer threads, so that they stay in registers.
template <int kVectors>
constexpr int kBackwardThreads = kVectors >= 4 ? 512 : 1024;

// Exponentials in the place of the scores that a thread has, and their sum. `first` is the vector that it begins with,
// `stride` how many later the next one lies.
template <int kVectors, int N>
__device__ __forceinline__ float exponentials(float (&z)[kVectors][N], float base, int first, int stride, int columns) {
  float sum = 0.0f;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if ((v * stride + first) * N < columns) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        z[v][i] = expf(z[v][i] - base);
        sum += z[v][i];
      }
    }
  }
  return sum;
}

// The scores that a thread has, and their maximum.
template <typename T, typename M, int kVectors, int N>
__device__ __forceinline__ float load_row(const T* x, const M* mask, int step, float scale, int first, int stride,
                                          int columns, float (&z)[kVectors][N]) {
  float most = -INFINITY;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int column = (v * stride + first) * N;
    if (column < columns) {
      load_scores<T, M, N>(x, mask, column, step, scale, z[v]);
#pragma unroll
      for (int i = 0; i < N; ++i) most = fmaxf(most, z[v][i]);
    }
  }
  return most;
}

template <typename Y, int kVectors, int N>
__device__ __forceinline__ void store_row(Y* y, float share, int first, int stride, int columns,
                                          float (&z)[kVectors][N]) {
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int column = (v * stride + first) * N;
    if (column < columns) {
#pragma unroll
      for (int i = 0; i < N; ++i) z[v][i] *= share;
      store_vector<Y, N>(y + column, z[v]);
    }
  }
}

template <typename T, typename M, typename Y, int kVectors>
__global__ void __launch_bounds__(kMaxThreads) forward_vectorized(const ForwardPointers<T, M, Y> p) {
  constexpr int N = kVectorLength<T>;
  __shared__ float scratch[2][kMaxWarps];
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (row >= p.rows) return;  // whole warps, and only where a warp needs no other
  const int64_t offset = row_offset(row, p.columns);
  const M* mask = mask_of(p, row);
  const int first = threadIdx.x, stride = blockDim.x;
  float z[kVectors][N];
  const float own = load_row<T, M>(p.x + offset, mask, p.broadcast.column_step, p.scale, first, stride, p.columns, z);
  const float base = base_of(reduce_block(own, Max{}, scratch[0]), mask != nullptr);
  const float sum = reduce_block(exponentials(z, base, first, stride, p.columns), Add{}, scratch[1]);
  store_row(p.y + offset, share_of_sum(sum), first, stride, p.columns, z);
}

template <typename T, int kVectors>
__global__ void __launch_bounds__(kBackwardThreads<kVectors>) backward_vectorized(const BackwardPointers<T> p) {
  constexpr int N = kVectorLength<T>;
  __shared__ float scratch[kMaxWarps];
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (row >= p.rows) return;
  const int64_t offset = row_offset(row, p.columns);
  float dy[kVectors][N], y[kVectors][N];
  float dot = 0.0f;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int column = (v * blockDim.x + threadIdx.x) * N;
    if (column < p.columns) {
      load_vector<T, N>(p.dy + offset + column, dy[v]);
      load_vector<T, N>(p.y + offset + column, y[v]);
#pragma unroll
      for (int i = 0; i < N; ++i) dot += dy[v][i] * y[v][i];
    }
  }
  dot = reduce_block(dot, Add{}, scratch);
  if (p.dots != nullptr && threadIdx.x == 0) p.dots[row] = dot;
  if (p.dx == nullptr) return;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int column = (v * blockDim.x + threadIdx.x) * N;
    if (column < p.columns) {
#pragma unroll
      for (int i = 0; i < N; ++i) y[v][i] *= (dy[v][i] - dot) * p.scale;
      store_vector<T, N>(p.dx + offset + column, y[v]);
    }
  }
}

}  // namespace softmax
}  // namespace kernel_pytorch
