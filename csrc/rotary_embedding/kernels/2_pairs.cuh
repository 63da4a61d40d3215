// Rung 2: one thread a pair, or a column that passes. Neighbours read neighbours; any length and alignment.
#pragma once

#include "kernel_pytorch/cuda/vector.cuh"
#include "parameters.cuh"

namespace kernel_pytorch {
namespace rotary_embedding {

constexpr int kPairThreads = 256;

template <typename T, typename C, bool kInterleaved>
__global__ void __launch_bounds__(kPairThreads) rotate_pairs(const Pointers<T, C> p) {
  const int slots = p.columns - p.pairs;  // of a head: its pairs, then its columns that pass
  const int64_t unit = blockIdx.x * static_cast<int64_t>(kPairThreads) + threadIdx.x;
  const int64_t row = unit / slots;
  if (row >= p.rows) return;
  const int slot = static_cast<int>(unit - row * slots);
  const int64_t token = row / p.heads;
  const T* x = p.x + head_offset(p.strides, token, row - token * p.heads);
  T* y = p.y + row_offset(row, p.columns);
  if (slot >= p.pairs) {
    y[slot + p.pairs] = x[slot + p.pairs];
    return;
  }
  const int64_t table = row_offset(token % p.table_rows, p.pairs) + slot;
  const int64_t first = first_of(slot, kInterleaved), second = second_of(slot, p.pairs, kInterleaved);
  const float a = widen(x[first]), b = widen(x[second]);
  const float c = widen(p.cos[table]), s = widen(p.sin[table]) * p.sign;
  y[first] = narrow<T>(a * c - b * s);
  y[second] = narrow<T>(b * c + a * s);
}

}  // namespace rotary_embedding
}  // namespace kernel_pytorch
