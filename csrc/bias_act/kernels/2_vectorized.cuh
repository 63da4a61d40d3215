// Kernel 2: 16-byte accesses. In the forward a thread processes several vectors of the flattened tensor, a block's
// width apart, for rows of any length; in the backward several rows of its columns. It starts all loads before it uses
// the first result. N = 1 supports rows of any length and alignment.
#pragma once

#include "1_naive.cuh"

namespace kernel_pytorch {
namespace bias_act {

constexpr int kThreads = 256;
constexpr int kVectorsEach = 4;

// With a bias, no vector crosses the end of a row. The last block, which may be partial, processes single elements.
template <Activation A, typename T, int N>
__global__ void __launch_bounds__(kThreads) forward_vectorized(const ForwardPointers<T> p) {
  constexpr int kStep = kThreads * N, kTile = kStep * kVectorsEach;
  const int64_t begin = blockIdx.x * int64_t{kTile}, total = p.rows * p.columns;
  const auto activated = [](float z, float bias) { return activate<A, kRounded<T>>(z + bias).value; };
  const bool biased = p.bias.data != nullptr;
  if (begin + kTile > total) {
    for (int64_t at = begin + threadIdx.x; at < total; at += kThreads) {
      float bias[1];
      load_bias<T, 1>(p.bias, biased ? remainder(at, p.columns) : 0, 1, bias);
      p.y[at] = narrow<T>(activated(widen(p.x[at]), bias[0]));
    }
    return;
  }
  const int64_t first = begin + int64_t{N} * threadIdx.x;
  Incoming<T, N> x[kVectorsEach];
#pragma unroll
  for (int i = 0; i < kVectorsEach; ++i) x[i].load(p.x + first + i * kStep);
  float bias[kVectorsEach][N];
  int64_t column = biased ? remainder(first, p.columns) : 0;
  const int64_t step = biased ? remainder(kStep, p.columns) : 0;
#pragma unroll
  for (int i = 0; i < kVectorsEach; ++i) {
    load_bias<T, N>(p.bias, column, N, bias[i]);
    column += step;
    if (column >= p.columns) column -= p.columns;
  }
#pragma unroll
  for (int i = 0; i < kVectorsEach; ++i) {
    float z[N];
    x[i].read(z);
#pragma unroll
    for (int j = 0; j < N; ++j) z[j] = activated(z[j], bias[i][j]);
    store_elements<T, N>(p.y + first + i * kStep, N, z);
  }
}

constexpr int kShareThreads = 32;  // along the columns
constexpr int kShareRows = 8;
constexpr int kAtOnce = 2;       // rows per thread
// Minimum number of blocks per multiprocessor: gelu's derivative in float32 for 16-bit inputs needs more registers.
template <typename T, bool kHalf>
constexpr int kShareBlocks = kRounded<T> && !kHalf ? 2 : 3;

// Two rows of dy and x between load and use. Rows beyond the end of a part are read as its last row.
template <Activation A, typename T, int N>
struct RowPair {
  Incoming<T, N> dy[kAtOnce];
  Incoming<T, N> x[kAtOnce];

  __device__ __forceinline__ void load(const BackwardPointers<T>& p, int64_t first, int64_t last, int64_t column) {
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const int64_t at = row_offset(smaller(first + k * kShareRows, last), p.columns) + column;
      dy[k].load(p.dy + at);
      if constexpr (A != Activation::kIdentity) x[k].load(p.x + at);
    }
  }
};

// dx for one part of the rows and 32 vectors of columns per block, and the partial sum of dbias for these columns. Each
// thread adds its rows in registers and prefetches the next two; then the block reduces the eight sums of a column in
// shared memory. kHalf: dx and dbias are rounded to 16 bits.
template <Activation A, typename T, int N, bool kHalf>
__global__ void __launch_bounds__(kShareThreads* kShareRows, kShareBlocks<T, kHalf>) backward_shares(const BackwardPointers<T> p) {
  __shared__ float sums[kShareRows][kShareThreads * N];
  const int64_t column = (static_cast<int64_t>(blockIdx.x) * kShareThreads + threadIdx.x) * N;
  const int count = valid_elements(column, p.columns, N);
  const Range range = share_of(p.rows, p.parts, blockIdx.y);
  float bias[N], share[N] = {};
  if (count > 0 && range.begin < range.end) {
    constexpr int kStep = kShareRows * kAtOnce;
    RowPair<A, T, N> next;
    next.load(p, range.begin + threadIdx.y, range.end - 1, column);
    load_bias<T, N>(p.bias, column, count, bias);
    for (int64_t first = range.begin + threadIdx.y; first < range.end; first += kStep) {
      const RowPair<A, T, N> now = next;
      if (first + kStep < range.end) next.load(p, first + kStep, range.end - 1, column);
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        const int64_t row = first + k * kShareRows;
        if (row >= range.end) break;
        float gradient[N];
        now.dy[k].read(gradient);
        if constexpr (A != Activation::kIdentity) {
          float z[N];
          now.x[k].read(z);
#pragma unroll
          for (int i = 0; i < N; ++i) gradient[i] *= activate<A, kHalf>(z[i] + bias[i]).slope;
        }
        if (p.dx != nullptr) store_elements<T, N>(p.dx + row_offset(row, p.columns) + column, count, gradient);
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
  if (threadIdx.y != 0 || count == 0) return;
#pragma unroll
  for (int i = 0; i < N; ++i) share[i] = sums[0][i * kShareThreads + threadIdx.x];
  store_elements<float, N>(p.shares + row_offset(blockIdx.y, p.columns) + column, count, share);
}

}  // namespace bias_act
}  // namespace kernel_pytorch
