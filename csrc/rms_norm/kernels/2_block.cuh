// Version 2: one block a row. Neighbouring threads read neighbouring elements, sums meet through warps and shared memory.
// It walks the row twice, and takes rows of any length and alignment.
#pragma once

#include "kernel_pytorch/cuda/reduce.cuh"
#include "kernel_pytorch/cuda/vector.cuh"
#include "kernel_pytorch/index.h"
#include "parameters.cuh"

namespace kernel_pytorch {
namespace rms_norm {

constexpr int kBlockThreads = 256;

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

// The same walk for the gradients, of one share of the rows: dx as it goes, the share of dweight in global memory, where
// every column belongs to one thread.
template <typename T, typename W, typename Y>
__global__ void __launch_bounds__(kBlockThreads) backward_block(const BackwardPointers<T, W, Y> p) {
  __shared__ float scratch[2][kMaxWarps];
  const int64_t part = blockIdx.x;
  const int64_t weights = row_offset(part % p.weight_rows, p.columns);
  float* share = p.shares != nullptr ? p.shares + row_offset(part, p.columns) : nullptr;
  if (share != nullptr) {
    for (int column = threadIdx.x; column < p.columns; column += kBlockThreads) share[column] = 0.0f;
  }
  int turn = 0;
  for (int64_t row = part; row < p.rows; row += p.parts, turn ^= 1) {
    const int64_t offset = row_offset(row, p.columns);
    const float rstd = p.rstd[row];
    float sum = 0.0f;
    for (int column = threadIdx.x; column < p.columns; column += kBlockThreads) {
      const float dy = widen(p.dy[offset + column]);
      const float x_hat = widen(p.h[offset + column]) * rstd;
      const float scale = p.weight != nullptr ? p.offset + widen(p.weight[weights + column]) : 1.0f;
      sum += dy * scale * x_hat;
      if (share != nullptr) share[column] += dy * x_hat;
    }
    if (p.dx == nullptr) continue;
    const float mean = reduce_block(sum, Add{}, scratch[turn]) / static_cast<float>(p.columns);
    for (int column = threadIdx.x; column < p.columns; column += kBlockThreads) {
      const float x_hat = widen(p.h[offset + column]) * rstd;
      const float scale = p.weight != nullptr ? p.offset + widen(p.weight[weights + column]) : 1.0f;
      float dx = rstd * (widen(p.dy[offset + column]) * scale - x_hat * mean);
      if (p.dh != nullptr) dx += widen(p.dh[offset + column]);
      p.dx[offset + column] = narrow<T>(dx);
    }
  }
}

}  // namespace rms_norm
}  // namespace kernel_pytorch
