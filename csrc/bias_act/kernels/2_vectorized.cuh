// Version 2: accesses of 16 bytes, and a thread takes several rows of its columns, so that it reads the bias once. With N
// of one it takes rows of any length and alignment.
#pragma once

#include "1_naive.cuh"

namespace kernel_pytorch {
namespace bias_act {

constexpr int kThreads = 256;
constexpr int kRowsEach = 4;

// `tiles` blocks go for a row.
template <Activation A, typename T, int N>
__global__ void __launch_bounds__(kThreads) forward_vectorized(const ForwardPointers<T> p, unsigned tiles) {
  const unsigned group = blockIdx.x / tiles;
  const int64_t column = (static_cast<int64_t>(blockIdx.x - group * tiles) * blockDim.x + threadIdx.x) * N;
  const int count = valid_elements(column, p.columns, N);
  if (count == 0) return;
  float bias[N];
  load_bias<T, N>(p.bias, column, count, bias);
  const int64_t first = static_cast<int64_t>(group) * blockDim.y * kRowsEach + threadIdx.y;
  const T* sources[kRowsEach];
#pragma unroll
  for (int i = 0; i < kRowsEach; ++i) {  // rows beyond the last are read as it
    sources[i] = p.x + row_offset(smaller(first + static_cast<int64_t>(i) * blockDim.y, p.rows - 1), p.columns) + column;
  }
  float z[kRowsEach][N];
  static_assert(kRowsEach == 4);
  load_all<T, N>(count, sources, z[0], z[1], z[2], z[3]);
#pragma unroll
  for (int i = 0; i < kRowsEach; ++i) {
    const int64_t row = first + static_cast<int64_t>(i) * blockDim.y;
    if (row < p.rows) {
#pragma unroll
      for (int j = 0; j < N; ++j) z[i][j] = activate<A, kRounded<T>>(z[i][j] + bias[j]).value;
      store_elements<T, N>(p.y + row_offset(row, p.columns) + column, count, z[i]);
    }
  }
}

constexpr int kShareThreads = 32;  // along the columns
constexpr int kShareRows = 8;
constexpr int kAtOnce = 2;  // rows of a thread

// dx of a share of the rows, 32 vectors of columns a block, and of these columns the share of dbias: every thread adds its
// rows in registers, then the eight of a column meet in shared memory. kHalf: both are rounded to 16 bits.
template <Activation A, typename T, int N, bool kHalf>
__global__ void __launch_bounds__(kShareThreads* kShareRows) backward_shares(const BackwardPointers<T> p) {
  __shared__ float sums[kShareRows][kShareThreads * N];
  const int64_t column = (static_cast<int64_t>(blockIdx.x) * kShareThreads + threadIdx.x) * N;
  const int count = valid_elements(column, p.columns, N);
  float bias[N], share[N] = {};
  if (count > 0) {
    load_bias<T, N>(p.bias, column, count, bias);
    const Range range = share_of(p.rows, p.parts, blockIdx.y);
    for (int64_t first = range.begin + threadIdx.y; first < range.end; first += kShareRows * kAtOnce) {
      float gradient[kAtOnce][N], z[kAtOnce][N];
      const int64_t second = smaller(first + kShareRows, range.end - 1);  // beyond the last it is read as that
      const int64_t at[kAtOnce] = {row_offset(first, p.columns) + column, row_offset(second, p.columns) + column};
      if constexpr (A != Activation::kIdentity) {
        load_all<T, N>(count, {p.dy + at[0], p.x + at[0], p.dy + at[1], p.x + at[1]}, gradient[0], z[0], gradient[1], z[1]);
      } else {
        load_all<T, N>(count, {p.dy + at[0], p.dy + at[1]}, gradient[0], gradient[1]);
      }
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        const int64_t row = first + k * kShareRows;
        if (row >= range.end) break;
        if constexpr (A != Activation::kIdentity) {
#pragma unroll
          for (int i = 0; i < N; ++i) gradient[k][i] *= activate<A, kHalf>(z[k][i] + bias[i]).slope;
        }
        if (p.dx != nullptr) store_elements<T, N>(p.dx + at[k], count, gradient[k]);
#pragma unroll
        for (int i = 0; i < N; ++i) share[i] += gradient[k][i];
      }
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
  if (threadIdx.y != 0 || count == 0) return;
#pragma unroll
  for (int i = 0; i < N; ++i) share[i] = sums[0][i * kShareThreads + threadIdx.x];
  store_elements<float, N>(p.shares + row_offset(blockIdx.y, p.columns) + column, count, share);
}

}  // namespace bias_act
}  // namespace kernel_pytorch
