// Version 3: accesses of 16 bytes, and the row stays in registers: it is read once. `kVectors` vectors a thread; rows end
// on a vector, so a thread holds a vector whole or not at all.
#pragma once

#include "kernel_pytorch/cuda/reduce.cuh"
#include "kernel_pytorch/cuda/vector.cuh"
#include "kernel_pytorch/index.h"
#include "parameters.cuh"

namespace kernel_pytorch {
namespace rms_norm {

constexpr int kMaxThreads = 1024;

// More than this many threads have as many vectors as there may be (vectors_each in cuda.cu): fewer vectors, fewer threads.
template <int kVectors>
constexpr int kForwardThreads = kVectors >= 4 ? kMaxThreads : 256;

// The backward holds three numbers for each of the forward's one: fewer threads, so that they stay in registers.
template <int kVectors>
constexpr int kBackwardThreads = kVectors >= 4 ? 512 : 256;

// h of one vector: x, or x + residual rounded and written.
template <typename T, typename W, typename Y, int N>
__device__ __forceinline__ void load_h(const ForwardPointers<T, W, Y>& p, int64_t offset, float (&h)[N]) {
  load_vector<T, N>(p.x + offset, h);
  if (p.residual == nullptr) return;
  float residual[N];
  load_vector<T, N>(p.residual + offset, residual);
#pragma unroll
  for (int i = 0; i < N; ++i) h[i] = widen(narrow<T>(h[i] + residual[i]));
  store_vector<T, N>(p.h + offset, h);
}

// offset + weight of one vector; ones where there is no weight.
template <typename W, int N>
__device__ __forceinline__ void load_scale(const W* weight, int64_t offset, float added, float (&scale)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) scale[i] = 1.0f;
  if (weight == nullptr) return;
  load_vector<W, N>(weight + offset, scale);
#pragma unroll
  for (int i = 0; i < N; ++i) scale[i] += added;
}

template <typename T, typename W, typename Y, int kVectors>
__global__ void __launch_bounds__(kForwardThreads<kVectors>) forward_vectorized(const ForwardPointers<T, W, Y> p) {
  constexpr int N = kVectorLength<T>;
  __shared__ float scratch[kMaxWarps];
  const int64_t row = blockIdx.x;
  const int64_t offset = row_offset(row, p.columns);
  float h[kVectors][N];
  float sum = 0.0f;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int column = (v * blockDim.x + threadIdx.x) * N;
    if (column < p.columns) {
      load_h(p, offset + column, h[v]);
#pragma unroll
      for (int i = 0; i < N; ++i) sum += h[v][i] * h[v][i];
    }
  }
  sum = reduce_block(sum, Add{}, scratch);
  const float rstd = 1.0f / sqrtf(sum / static_cast<float>(p.columns) + p.eps);
  if (threadIdx.x == 0) p.rstd[row] = rstd;
  const int64_t weights = row_offset(row % p.weight_rows, p.columns);
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int column = (v * blockDim.x + threadIdx.x) * N;
    if (column < p.columns) {
      float scale[N];
      load_scale<W, N>(p.weight, weights + column, p.offset, scale);
#pragma unroll
      for (int i = 0; i < N; ++i) scale[i] *= h[v][i] * rstd;
      store_vector<Y, N>(p.y + offset + column, scale);
    }
  }
}

// dx of the rows of one share, and the share of dweight in registers until the last of them.
template <typename T, typename W, typename Y, int kVectors>
__global__ void __launch_bounds__(kBackwardThreads<kVectors>) backward_vectorized(const BackwardPointers<T, W, Y> p) {
  constexpr int N = kVectorLength<T>;
  __shared__ float scratch[2][kMaxWarps];
  const int64_t part = blockIdx.x;
  const int64_t weights = row_offset(part % p.weight_rows, p.columns);
  float share[kVectors][N] = {};
  int turn = 0;
  for (int64_t row = part; row < p.rows; row += p.parts, turn ^= 1) {
    const int64_t offset = row_offset(row, p.columns);
    const float rstd = p.rstd[row];
    float g[kVectors][N], x_hat[kVectors][N];
    float sum = 0.0f;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int column = (v * blockDim.x + threadIdx.x) * N;
      if (column < p.columns) {
        float scale[N];
        load_vector<Y, N>(p.dy + offset + column, g[v]);
        load_vector<T, N>(p.h + offset + column, x_hat[v]);
        load_scale<W, N>(p.weight, weights + column, p.offset, scale);
#pragma unroll
        for (int i = 0; i < N; ++i) {
          x_hat[v][i] *= rstd;
          share[v][i] += g[v][i] * x_hat[v][i];
          g[v][i] *= scale[i];
          sum += g[v][i] * x_hat[v][i];
        }
      }
    }
    if (p.dx == nullptr) continue;
    const float mean = reduce_block(sum, Add{}, scratch[turn]) / static_cast<float>(p.columns);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int column = (v * blockDim.x + threadIdx.x) * N;
      if (column < p.columns) {
#pragma unroll
        for (int i = 0; i < N; ++i) g[v][i] = rstd * (g[v][i] - x_hat[v][i] * mean);
        if (p.dh != nullptr) {
          float dh[N];
          load_vector<T, N>(p.dh + offset + column, dh);
#pragma unroll
          for (int i = 0; i < N; ++i) g[v][i] += dh[i];
        }
        store_vector<T, N>(p.dx + offset + column, g[v]);
      }
    }
  }
  if (p.shares == nullptr) return;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int column = (v * blockDim.x + threadIdx.x) * N;
    if (column < p.columns) store_vector<float, N>(p.shares + row_offset(part, p.columns) + column, share[v]);
  }
}

}  // namespace rms_norm
}  // namespace kernel_pytorch
