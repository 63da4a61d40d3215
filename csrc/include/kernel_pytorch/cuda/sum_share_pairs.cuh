// The gradients of one or two parameters, of dtypes known at run time, in one launch: the sums of the shares that blocks
// left behind, in their order.
#pragma once

#include "kernel_pytorch/cuda/any_type.cuh"
#include "kernel_pytorch/cuda/launch.cuh"
#include "kernel_pytorch/cuda/sum_shares.cuh"
#include "kernel_pytorch/index.h"

namespace kernel_pytorch {
namespace {

struct Shares {
  const float* shares;  // `(parts, columns)`
  Output sum;           // `(columns,)`; no data where there are no shares
};

// A block of 32 columns by 32 threads: thread (x, y) adds shares y, y + 32, ... of column x; then the 32 sums meet. Blocks
// of the grid's second row take the second parameter.
__global__ void __launch_bounds__(kSumThreads* kSumRows)
    sum_share_pairs(const Shares first, const Shares second, int64_t parts, int columns) {
  __shared__ float sums[kSumRows][kSumThreads + 1];
  const float* shares = blockIdx.y == 0 ? first.shares : second.shares;
  const Output target = {blockIdx.y == 0 ? first.sum.data : second.sum.data,
                         blockIdx.y == 0 ? first.sum.dtype : second.sum.dtype};
  const int column = blockIdx.x * kSumThreads + threadIdx.x;
  float sum[1] = {0.0f};
  if (column < columns) {
    for (int64_t part = threadIdx.y; part < parts; part += kSumRows) {
      sum[0] += shares[row_offset(part, columns) + column];
    }
  }
  sums[threadIdx.y][threadIdx.x] = sum[0];
  __syncthreads();
  for (int half = kSumRows / 2; half > 0; half /= 2) {
    if (threadIdx.y < half) sums[threadIdx.y][threadIdx.x] += sums[threadIdx.y + half][threadIdx.x];
    __syncthreads();
  }
  if (threadIdx.y != 0 || column >= columns) return;
  sum[0] = sums[0][threadIdx.x];
  store_as<1>(target, column, sum);
}

[[maybe_unused]] cudaError_t launch_sums(Shares first, Shares second, int64_t parts, int columns, cudaStream_t stream) {
  if (!first.sum) first = second;
  if (!first.sum) return cudaSuccess;
  const bool both = second.sum && second.sum.data != first.sum.data;
  const dim3 grid(static_cast<unsigned>(ceil_divide(columns, kSumThreads)), both ? 2 : 1);
  sum_share_pairs<<<grid, dim3(kSumThreads, kSumRows), 0, stream>>>(first, second, parts, columns);
  return launched();
}

}  // namespace
}  // namespace kernel_pytorch
