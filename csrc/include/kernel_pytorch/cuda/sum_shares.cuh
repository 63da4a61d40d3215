// The gradient of a weight: the sum of the shares that blocks left behind, in their order.
#pragma once

#include <cuda_runtime.h>

#include "kernel_pytorch/cuda/vector.cuh"
#include "kernel_pytorch/index.h"

namespace kernel_pytorch {
namespace {

constexpr int kSumThreads = 1024;

// A block of x columns by y threads, a power of two: thread (x, y) adds shares y, y + blockDim.y, ... of column x; then the
// sums of a column meet. Weight row r is the sum of shares r, r + weight_rows, ...
template <typename W>
__global__ void __launch_bounds__(kSumThreads)
    sum_shares(const float* shares, W* dweight, int64_t parts, int columns, int weight_rows) {
  __shared__ float sums[kSumThreads];
  const int column = blockIdx.x * blockDim.x + threadIdx.x;
  const int weight_row = blockIdx.y;
  const int own = threadIdx.y * blockDim.x + threadIdx.x;
  float sum = 0.0f;
  if (column < columns) {
#pragma unroll 8  // as many on their way at once
    for (int64_t part = weight_row + static_cast<int64_t>(threadIdx.y) * weight_rows; part < parts;
         part += static_cast<int64_t>(blockDim.y) * weight_rows) {
      sum += shares[row_offset(part, columns) + column];
    }
  }
  sums[own] = sum;
  __syncthreads();
  for (unsigned half = blockDim.y / 2; half > 0; half /= 2) {
    if (threadIdx.y < half) sums[own] += sums[own + half * blockDim.x];
    __syncthreads();
  }
  if (threadIdx.y == 0 && column < columns) {
    dweight[row_offset(weight_row, columns) + column] = narrow<W>(sums[own]);
  }
}

// Some eight shares a thread. Columns are 32 bytes of shares at least.
template <typename W>
[[maybe_unused]] cudaError_t launch_sum_shares(const float* shares, W* dweight, int64_t parts, int columns,
                                               int weight_rows, cudaStream_t stream) {
  unsigned rows = 4;
  while (rows < 128 && int64_t{rows} * 8 * weight_rows < parts) rows *= 2;
  const unsigned across = rows <= 32 ? 32 : kSumThreads / rows;
  const dim3 grid(static_cast<unsigned>(ceil_divide(columns, across)), static_cast<unsigned>(weight_rows));
  sum_shares<W><<<grid, dim3(across, rows), 0, stream>>>(shares, dweight, parts, columns, weight_rows);
  return cudaGetLastError();
}

}  // namespace
}  // namespace kernel_pytorch
