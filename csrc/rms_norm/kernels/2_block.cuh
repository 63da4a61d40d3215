// Kernel 2: one block per row. Neighbouring threads read neighbouring elements; sums are reduced over warps and shared
// memory. It reads each row twice, and supports rows of any length and alignment.
#pragma once

#include "kernel_pytorch/cuda/reduce.cuh"
#include "kernel_pytorch/cuda/vector.cuh"
#include "kernel_pytorch/index.h"
#include "parameters.cuh"

namespace kernel_pytorch {
namespace rms_norm {

constexpr int kBlockThreads = 256, kMostBlockThreads = 1024;

template <typename T, typename W, typename Y>
__global__ void __launch_bounds__(kBlockThreads) forward_block(const ForwardPointers<T, W, Y> p) {
  __shared__ float scratch[kMaxWarps];
  const int64_t row = blockIdx.x;
  const int64_t offset = row_offset(row, p.columns);
  float sum = 0.0f;
  for (int column = threadIdx.x; column < p.columns; column += kBlockThreads) {
    float value = widen(p.x[offset + column]);
    if (p.residual != nullptr) {
      const T rounded = narrow<T>(value + widen(p.residual[offset + column]));
      p.h[offset + column] = rounded;
      value = widen(rounded);
    }
    sum += value * value;
  }
  sum = reduce_block(sum, Add{}, scratch);
  const float rstd = 1.0f / sqrtf(sum / static_cast<float>(p.columns) + p.eps);
  if (threadIdx.x == 0) p.rstd[row] = rstd;
  const T* h = p.residual != nullptr ? p.h : p.x;
  const int64_t weights = row_offset(row % p.weight_rows, p.columns);
  for (int column = threadIdx.x; column < p.columns; column += kBlockThreads) {
    const float scale = p.weight != nullptr ? p.offset + widen(p.weight[weights + column]) : 1.0f;
    p.y[offset + column] = narrow<Y>(widen(h[offset + column]) * rstd * scale);
  }
}

// Same for the gradient of x, without that of the weight.
template <typename T, typename W, typename Y>
__global__ void __launch_bounds__(kMostBlockThreads) backward_block(const BackwardPointers<T, W, Y> p) {
  __shared__ float scratch[kMaxWarps];
  const int64_t row = blockIdx.x, offset = row_offset(row, p.columns);
  const int64_t weights = row_offset(row % p.weight_rows, p.columns);
  const int step = static_cast<int>(blockDim.x);
  const float rstd = p.rstd[row];
  const auto scaled = [&](int column) {
    return widen(p.dy[offset + column]) * (p.weight != nullptr ? p.offset + widen(p.weight[weights + column]) : 1.0f);
  };
  float sum = 0.0f;
  for (int column = threadIdx.x; column < p.columns; column += step) {
    sum += scaled(column) * widen(p.h[offset + column]) * rstd;
  }
  const float mean = reduce_block(sum, Add{}, scratch) / static_cast<float>(p.columns);
  for (int column = threadIdx.x; column < p.columns; column += step) {
    float dx = rstd * (scaled(column) - widen(p.h[offset + column]) * rstd * mean);
    if (p.dh != nullptr) dx += widen(p.dh[offset + column]);
    p.dx[offset + column] = narrow<T>(dx);
  }
}

// Partial sum of dweight over the rows of one part: one thread per column.
template <typename T, typename W, typename Y>
__global__ void __launch_bounds__(kBlockThreads) backward_columns(const BackwardPointers<T, W, Y> p) {
  const unsigned tiles = (p.columns + kBlockThreads - 1) / kBlockThreads;
  const int64_t part = blockIdx.x / tiles;
  const int column = static_cast<int>(blockIdx.x % tiles) * kBlockThreads + threadIdx.x;
  if (column >= p.columns) return;
  float share = 0.0f;
#pragma unroll 4  // loads in flight
  for (int64_t row = part; row < p.rows; row += p.parts) {
    const int64_t at = row_offset(row, p.columns) + column;
    share += widen(p.dy[at]) * widen(p.h[at]) * p.rstd[row];
  }
  p.shares[row_offset(part, p.columns) + column] = share;
}

}  // namespace rms_norm
}  // namespace kernel_pytorch
