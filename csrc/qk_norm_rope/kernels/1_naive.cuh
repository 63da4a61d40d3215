// Kernel 1: one thread per head. Neighbouring threads read addresses a whole head apart.
#pragma once

#include "parameters.cuh"

namespace kernel_pytorch {
namespace qk_norm_rope {

constexpr int kNaiveThreads = 128;

template <typename T, typename W, typename C, bool kInterleaved>
__global__ void __launch_bounds__(kNaiveThreads) norm_rope_naive(const ForwardPointers<T, W, C> p) {
  const int64_t index = blockIdx.x * static_cast<int64_t>(kNaiveThreads) + threadIdx.x;
  if (index >= p.tokens * (p.q.heads + p.k.heads)) return;
  const Row<T, W> row = row_of(p, index);
  float sum = 0.0f;
  for (int column = 0; column < p.columns; ++column) {
    const float value = widen(row.x[column]);
    sum += value * value;
  }
  const float rstd = 1.0f / sqrtf(sum / static_cast<float>(p.columns) + p.eps);
  *row.rstd = rstd;
  const auto normalized = [&](int64_t column) {
    return widen(row.x[column]) * rstd * (p.offset + widen(row.weight[column]));
  };
  for (int column = 0; column < p.columns; ++column) {
    row.y[column] = narrow<T>(rotated<kInterleaved>(p.tables, row.token, column, normalized));
  }
}

}  // namespace qk_norm_rope
}  // namespace kernel_pytorch
