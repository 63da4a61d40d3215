// Kernel 2: 16-byte accesses, one random word per element. In the forward a thread processes one vector of the
// flattened tensor, for rows of any length: random numbers are most of its work, so more threads help more than more
// loads in flight. In the backward it processes several rows of its columns, and prefetches the next ones. N = 1
// supports rows of any length and alignment.
#pragma once

#include "1_naive.cuh"

namespace kernel_pytorch {
namespace bias_dropout_add {

constexpr int kThreads = 256;

// No vector crosses the end of a row.
template <typename T, int N>
__global__ void __launch_bounds__(kThreads) forward_vectorized(const ForwardPointers<T> p) {
  const int64_t at = (blockIdx.x * int64_t{kThreads} + threadIdx.x) * N;
  if (at >= p.rows * p.columns) return;
  float z[N], bias[N], residual[N];
  load_promoted<T, N>(p.x, at, z);
  load_promoted<T, N>(p.residual, at, residual);
  const int64_t row = quotient(at, p.columns), column = at - row_offset(row, p.columns);
  load_bias<N>(p.bias, column, bias);
#pragma unroll
  for (int i = 0; i < N; ++i) z[i] += bias[i];
  const DropoutRow dropout = dropout_row(p.dropout, row, p.columns);
  if (dropout.drops) drop<N>(dropout, column, z);
#pragma unroll
  for (int i = 0; i < N; ++i) z[i] += residual[i];
  store_some<T, N>(p.y + at, z);
}

constexpr int kShareThreads = 32;  // along the columns
constexpr int kShareRows = 8;
constexpr int kAtOnce = 2;    // rows per thread
constexpr int kShareBlocks = 3;  // per multiprocessor

// Two rows of dy between load and use. Rows beyond the end of a part are read as its last row.
template <typename T, int N>
struct RowPair {
  Incoming<T, N> dy[kAtOnce];

  __device__ __forceinline__ void load(const BackwardPointers<T>& p, int64_t first, int64_t last, int64_t column) {
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      dy[k].load(p.dy + row_offset(smaller(first + k * kShareRows, last), p.columns) + column);
    }
  }
};

// dx for one part of the rows and 32 vectors of columns per block, and the partial sum of dbias for these columns. Each
// thread adds its rows in registers and prefetches the next two; then the block adds the eight sums of a column.
template <typename T, int N>
__global__ void __launch_bounds__(kShareThreads* kShareRows, kShareBlocks) backward_shares(const BackwardPointers<T> p) {
  __shared__ float sums[kShareRows][kShareThreads * N];
  const int64_t column = (static_cast<int64_t>(blockIdx.x) * kShareThreads + threadIdx.x) * N;
  const Range range = share_of(p.rows, p.parts, blockIdx.y);
  float share[N] = {};
  if (column < p.columns && range.begin < range.end) {
    constexpr int kStep = kShareRows * kAtOnce;
    DropoutRow dropout = dropout_row(p.dropout, 0, p.columns);
    RowPair<T, N> next;
    next.load(p, range.begin + threadIdx.y, range.end - 1, column);
    for (int64_t first = range.begin + threadIdx.y; first < range.end; first += kStep) {
      const RowPair<T, N> now = next;
      if (first + kStep < range.end) next.load(p, first + kStep, range.end - 1, column);
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        const int64_t row = first + k * kShareRows;
        if (row >= range.end) break;
        float gradient[N];
        now.dy[k].read(gradient);
        dropout.counter = dropout_counter(row, 0, p.columns);
        if (dropout.drops) drop<N>(dropout, column, gradient);
        if (p.dx.data != nullptr) store_as<N>(p.dx, row_offset(row, p.columns) + column, gradient);
#pragma unroll
        for (int i = 0; i < N; ++i) share[i] += gradient[i];
      }
    }
  }
  if (p.shares == nullptr) return;
  // Coalesced writes: element i of all threads, then element i + 1.
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
