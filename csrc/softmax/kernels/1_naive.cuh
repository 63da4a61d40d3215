// Kernel 1: one thread per row, with one pass for maximum and sum and one for the result.
#pragma once

#include "kernel_pytorch/cuda/online_softmax.cuh"
#include "parameters.cuh"

namespace kernel_pytorch {
namespace softmax {

constexpr int kNaiveThreads = 128;

template <typename T, typename M, typename Y>
__global__ void __launch_bounds__(kNaiveThreads) forward_naive(const ForwardPointers<T, M, Y> p) {
  const int64_t row = blockIdx.x * static_cast<int64_t>(kNaiveThreads) + threadIdx.x;
  if (row >= p.rows) return;
  const int64_t offset = row_offset(row, p.columns);
  const T* x = p.x + offset;
  const M* mask = mask_of(p, row);
  const int step = p.broadcast.column_step;
  OnlineSum s;
  for (int column = 0; column < p.columns; ++column) s.add(score(x, mask, column, step, p.scale));
  const float base = base_of(s.most, mask != nullptr);
  const float share = share_of_sum(s.sum);
  for (int column = 0; column < p.columns; ++column) {
    p.y[offset + column] = narrow<Y>(expf(score(x, mask, column, step, p.scale) - base) * share);
  }
}

}  // namespace softmax
}  // namespace kernel_pytorch
