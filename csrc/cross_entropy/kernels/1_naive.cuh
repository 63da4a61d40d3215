// Kernel 1: one thread per row, three passes: maximum, sum, and mean if it is needed.
#pragma once

#include "parameters.cuh"

namespace kernel_pytorch {
namespace cross_entropy {

constexpr int kNaiveThreads = 128;

template <typename T, bool kCapped>
__global__ void __launch_bounds__(kNaiveThreads) forward_naive(const ForwardPointers<T> p) {
  const int64_t row = blockIdx.x * static_cast<int64_t>(kNaiveThreads) + threadIdx.x;
  if (row >= p.rows) return;
  const T* const logits = p.logits + row_offset(row, p.columns);
  float most = -INFINITY;
  for (int64_t column = 0; column < p.columns; ++column) {
    most = fmaxf(most, cap<kCapped>(widen(logits[column]), p.softcap));
  }
  const float shift = most == -INFINITY ? 0.0f : most;
  const float pivot = pivot_of<kCapped>(logits, p.softcap);
  float sum = 0.0f, lost = 0.0f, total = 0.0f;
  for (int64_t column = 0; column < p.columns; ++column) {
    const float z = cap<kCapped>(widen(logits[column]), p.softcap);
    // Kahan summation: without it, thousands of sequential additions would lose digits.
    const float term = expf(z - shift) - lost;
    const float next = sum + term;
    lost = (next - sum) - term;
    sum = next;
    total += z - pivot;
  }
  write_loss<kCapped>(p, row, {most, sum}, total);
}

}  // namespace cross_entropy
}  // namespace kernel_pytorch
