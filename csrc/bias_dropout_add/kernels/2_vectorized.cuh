// Version 2: accesses of 16 bytes, a random word an element, and a thread takes several rows of its columns, so that it
// reads the bias once. With N of one it takes rows of any length and alignment.
#pragma once

#include "1_naive.cuh"

namespace kernel_pytorch {
namespace bias_dropout_add {

constexpr int kThreads = 256;
constexpr int kRowsEach = 4;

// `tiles` blocks go for a row.
template <typename T, int N>
__global__ void __launch_bounds__(kThreads) forward_vectorized(const ForwardPointers<T> p, unsigned tiles) {
  const unsigned group = blockIdx.x / tiles;
  const int64_t column = (static_cast<int64_t>(blockIdx.x - group * tiles) * blockDim.x + threadIdx.x) * N;
  if (column >= p.columns) return;
  float bias[N];
  load_bias<N>(p.bias, column, bias);
  const int64_t first = static_cast<int64_t>(group) * blockDim.y * kRowsEach + threadIdx.y;
#pragma unroll
  for (int i = 0; i < kRowsEach; ++i) {
    const int64_t row = first + static_cast<int64_t>(i) * blockDim.y;
    if (row < p.rows) {
      const int64_t at = row_offset(row, p.columns) + column;
      float z[N], residual[N];
      load_promoted<T, N>(p.x, at, z);
      load_promoted<T, N>(p.residual, at, residual);
#pragma unroll
      for (int j = 0; j < N; ++j) z[j] += bias[j];
      const DropoutRow dropout = dropout_row(p.dropout, row, p.columns);
      if (dropout.drops) drop<N>(dropout, column, z);
#pragma unroll
      for (int j = 0; j < N; ++j) z[j] += residual[j];
      store_some<T, N>(p.y + at, z);
    }
  }
}

constexpr int kShareThreads = 32;  // along the columns
constexpr int kShareRows = 8;

// dx of a share of the rows, 32 vectors of columns a block, and of these columns the share of dbias: every thread adds its
// rows in registers, then the eight of a column meet in shared memory.
template <typename T, int N>
__global__ void __launch_bounds__(kShareThreads* kShareRows) backward_shares(const BackwardPointers<T> p) {
  __shared__ float sums[kShareRows][kShareThreads * N];
  const int64_t column = (static_cast<int64_t>(blockIdx.x) * kShareThreads + threadIdx.x) * N;
  float share[N] = {};
  if (column < p.columns) {
    const Range range = share_of(p.rows, p.parts, blockIdx.y);
    for (int64_t row = range.begin + threadIdx.y; row < range.end; row += kShareRows) {
      const int64_t at = row_offset(row, p.columns) + column;
      float gradient[N];
      load_some<T, N>(p.dy + at, gradient);
      const DropoutRow dropout = dropout_row(p.dropout, row, p.columns);
      if (dropout.drops) drop<N>(dropout, column, gradient);
      if (p.dx.data != nullptr) store_as<N>(p.dx, at, gradient);
#pragma unroll
      for (int i = 0; i < N; ++i) share[i] += gradient[i];
    }
  }
  if (p.shares == nullptr) return;
  // Neighbours write neighbours: element i of all threads, then the next.
#pragma unroll
  for (int i = 0; i < N; ++i) sums[threadIdx.y][i * kShareThreads + threadIdx.x] = share[i];
  __syncthreads();
  for (int half = kShareRows / 2; half > 0; half /= 2) {
    if (threadIdx.y < half) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const int at = i * kShareThreads + static_cast<int>(threadIdx.x);
        sums[threadIdx.y][at] += sums[threadIdx.y + half][at];
      }
    }
    __syncthreads();
  }
  if (threadIdx.y != 0 || column >= p.columns) return;
#pragma unroll
  for (int i = 0; i < N; ++i) share[i] = sums[0][i * kShareThreads + threadIdx.x];
  store_some<float, N>(p.shares + row_offset(blockIdx.y, p.columns) + column, share);
}

}  // namespace bias_dropout_add
}  // namespace kernel_pytorch
