// Rung 1: one thread a head. Neighbouring threads read addresses a whole head apart.
#pragma once

#include "kernel_pytorch/cuda/vector.cuh"
#include "parameters.cuh"

namespace kernel_pytorch {
namespace rotary_embedding {

constexpr int kNaiveThreads = 128;

template <typename T, typename C, bool kInterleaved>
__global__ void __launch_bounds__(kNaiveThreads) rotate_naive(const Pointers<T, C> p) {
  const int64_t row = blockIdx.x * static_cast<int64_t>(kNaiveThreads) + threadIdx.x;
  if (row >= p.rows) return;
  const int64_t token = row / p.heads;
  const T* x = p.x + head_offset(p.strides, token, row - token * p.heads);
  T* y = p.y + row_offset(row, p.columns);
  const int64_t table = row_offset(token % p.table_rows, p.pairs);
#pragma unroll 1
  for (int pair = 0; pair < p.pairs; ++pair) {
    const int64_t first = first_of(pair, kInterleaved), second = second_of(pair, p.pairs, kInterleaved);
    const float a = widen(x[first]), b = widen(x[second]);
    const float c = widen(p.cos[table + pair]), s = widen(p.sin[table + pair]) * p.sign;
    y[first] = narrow<T>(a * c - b * s);
    y[second] = narrow<T>(b * c + a * s);
  }
  for (int column = 2 * p.pairs; column < p.columns; ++column) y[column] = x[column];
}

}  // namespace rotary_embedding
}  // namespace kernel_pytorch
