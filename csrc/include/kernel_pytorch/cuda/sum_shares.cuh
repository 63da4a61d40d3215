// The gradients of one or two parameters, of dtypes known at run time: the shares that blocks leave behind, and their sums,
// in their order, in one launch.
#pragma once

#include <cuda_runtime.h>

#include <type_traits>

#include "kernel_pytorch/cuda/any_type.cuh"
#include "kernel_pytorch/index.h"

namespace kernel_pytorch {

// The sum of what the teams of a block, a power of two of them, have each: in the registers of the first.
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

// What a thread has of one share.
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
  const float* shares;  // `(parts, columns)`, from an address that is aligned to 16 bytes
  Output sum;           // `(rows, columns)`; no data where there are no shares
};

// A block of x times `N` columns by y threads, a power of two: thread (x, y) adds shares y, y + blockDim.y, ... of its columns;
// then the sums of a column meet. Row r of a parameter is the sum of shares r, r + rows, ...; after the rows of the first
// parameter the grid has those of the second.
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
#pragma unroll 8  // as many on their way at once
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

// Some eight shares a thread, of 32 columns a block: 128 bytes of each share.
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
