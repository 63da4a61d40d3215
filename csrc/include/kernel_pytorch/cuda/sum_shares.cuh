// Gradients of one or two parameters with run-time dtypes: adds the partial sums of the blocks in order, in one launch.
#pragma once

#include <cuda_runtime.h>

#include <type_traits>

#include "kernel_pytorch/cuda/any_type.cuh"
#include "kernel_pytorch/index.h"

namespace kernel_pytorch {

// Sum over the teams of a block, whose number is a power of two; the first team gets the result in registers.
template <int kVectors, int N>
__device__ __forceinline__ void add_teams(float (&share)[kVectors][N], float* sums) {
  static_assert(kVectors == 1);
  const int width = blockDim.x * N;
#pragma unroll
  for (int i = 0; i < N; ++i) sums[threadIdx.y * width + threadIdx.x * N + i] = share[0][i];
  for (unsigned half = blockDim.y / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.y >= half) continue;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const int at = threadIdx.y * width + threadIdx.x * N + i;
      share[0][i] += sums[at + half * width];
      sums[at] = share[0][i];
    }
  }
}

// Stores a thread's part of one partial sum.
template <int kVectors, int N>
__device__ __forceinline__ void store_share(float* shares, int64_t part, int columns, int first, int stride,
                                            const float (&share)[kVectors][N]) {
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int column = (v * stride + first) * N;
    if (column < columns) store_vector<float, N>(shares + row_offset(part, columns) + column, share[v]);
  }
}

namespace {

constexpr int kSumThreads = 1024;

struct Shares {
  const float* shares;  // `(parts, columns)`, 16-byte aligned
  Output sum;           // `(rows, columns)`; null data if there are no partial sums
};

// Each block has x threads for x times `N` columns, and y threads, a power of two: thread (x, y) adds partial sums y,
// y + blockDim.y, ... of its columns; then the block reduces them over y. Row r of a parameter is the sum of partial
// sums r, r + rows, ...; the grid has the rows of the first parameter, then those of the second.
template <int N>
__global__ void __launch_bounds__(kSumThreads)
    sum_shares(const Shares first, const Shares second, int64_t parts, int columns, int rows) {
  __shared__ float sums[kSumThreads][N];
  const bool is_first = blockIdx.y < rows;
  const Output target = {is_first ? first.sum.data : second.sum.data, is_first ? first.sum.dtype : second.sum.dtype};
  const int row = static_cast<int>(blockIdx.y) - (is_first ? 0 : rows);
  const int column = (blockIdx.x * blockDim.x + threadIdx.x) * N;
  const int own = threadIdx.y * blockDim.x + threadIdx.x;
  float sum[N] = {};
  if (column < columns) {
    const int64_t begin = row + static_cast<int64_t>(threadIdx.y) * rows, step = static_cast<int64_t>(blockDim.y) * rows;
    const float* share = (is_first ? first.shares : second.shares) + row_offset(begin, columns) + column;
#pragma unroll 8  // loads in flight
    for (int64_t part = begin; part < parts; part += step, share += row_offset(step, columns)) {
      float found[N];
      load_some(share, found);
#pragma unroll
      for (int i = 0; i < N; ++i) sum[i] += found[i];
    }
  }
#pragma unroll
  for (int i = 0; i < N; ++i) sums[own][i] = sum[i];
  __syncthreads();
  for (unsigned half = blockDim.y / 2; half > 0; half /= 2) {
    if (threadIdx.y < half) {
#pragma unroll
      for (int i = 0; i < N; ++i) sums[own][i] += sums[own + half * blockDim.x][i];
    }
    __syncthreads();
  }
  if (threadIdx.y != 0 || column >= columns) return;
#pragma unroll
  for (int i = 0; i < N; ++i) sum[i] = sums[own][i];
  store_as<N>(target, row_offset(row, columns) + column, sum);
}

// About eight partial sums per thread, and 32 columns per block: 128 bytes of each partial sum.
[[maybe_unused]] cudaError_t launch_sums(Shares first, Shares second, int64_t parts, int64_t columns, int rows,
                                         cudaStream_t stream) {
  if (!first.sum) first = second;
  if (!first.sum) return cudaSuccess;
  const bool both = second.sum && second.sum.data != first.sum.data;
  unsigned down = 4;
  while (down < 128 && int64_t{down} * 8 * rows < parts) down *= 2;
  const auto launch = [&](auto n, unsigned across) {
    constexpr int N = decltype(n)::value;
    const dim3 grid(static_cast<unsigned>(ceil_divide(columns, across * N)), static_cast<unsigned>(both ? 2 * rows : rows));
    sum_shares<N><<<grid, dim3(across, down), 0, stream>>>(first, second, parts, static_cast<int>(columns), rows);
    return cudaGetLastError();
  };
  if (columns % 4 == 0) return launch(std::integral_constant<int, 4>{}, 8);
  return launch(std::integral_constant<int, 1>{}, down <= 32 ? 32 : kSumThreads / down);
}

}  // namespace
}  // namespace kernel_pytorch
