// Kernel 1: one thread per row. Neighbouring threads read addresses a whole row apart, so only one element of every 32
// bytes loaded from memory is used.
#pragma once

#include "kernel_pytorch/cuda/vector.cuh"
#include "kernel_pytorch/index.h"
#include "parameters.cuh"

namespace kernel_pytorch {
namespace rms_norm {

constexpr int kNaiveThreads = 128;

template <typename T, typename W, typename Y>
__global__ void __launch_bounds__(kNaiveThreads) forward_naive(const ForwardPointers<T, W, Y> p) {
  const int64_t row = blockIdx.x * static_cast<int64_t>(kNaiveThreads) + threadIdx.x;
  if (row >= p.rows) return;
  const int64_t offset = row_offset(row, p.columns);
  float sum = 0.0f;
  for (int column = 0; column < p.columns; ++column) {
    float value = widen(p.x[offset + column]);
    if (p.residual != nullptr) {
      const T rounded = narrow<T>(value + widen(p.residual[offset + column]));
      p.h[offset + column] = rounded;
      value = widen(rounded);
    }
    sum += value * value;
  }
  const float rstd = 1.0f / sqrtf(sum / static_cast<float>(p.columns) + p.eps);
  p.rstd[row] = rstd;
  const T* h = p.residual != nullptr ? p.h : p.x;
  const int64_t weights = row_offset(row % p.weight_rows, p.columns);
  for (int column = 0; column < p.columns; ++column) {
    const float scale = p.weight != nullptr ? p.offset + widen(p.weight[weights + column]) : 1.0f;
    p.y[offset + column] = narrow<Y>(widen(h[offset + column]) * rstd * scale);
  }
}

}  // namespace rms_norm
}  // namespace kernel_pytorch
