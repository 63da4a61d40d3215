// Version 3: accesses of 16 bytes. A thread rotates two vectors of a head, its pairs in registers: one of each half, or,
// interleaved, two neighbouring ones; or it copies two that pass.
#pragma once

#include "kernel_pytorch/cuda/rotate.cuh"
#include "kernel_pytorch/cuda/vector.cuh"
#include "parameters.cuh"

namespace kernel_pytorch {
namespace rotary_embedding {

constexpr int kVectorThreads = 256;

// Blocks are `(slots, heads)`: a slot is two vectors.
template <typename T, typename C, bool kInterleaved>
__global__ void __launch_bounds__(kVectorThreads) rotate_vectorized(const Pointers<T, C> p) {
  constexpr int N = kVectorLength<T>;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (row >= p.rows) return;
  const int64_t token = quotient(row, p.heads);
  const T* x = p.x + head_offset(p.strides, token, row - token * p.heads);
  T* y = p.y + row_offset(row, p.columns);
  const Slot slot = slot_at(threadIdx.x, p.pairs, N, kInterleaved);
  float a[N], b[N];
  load_vector<T, N>(x + slot.first, a);
  load_vector<T, N>(x + slot.second, b);
  if (!slot.passes) {
    const int64_t table = row_offset(remainder(token, p.table_rows), p.pairs) + threadIdx.x * N;
    float c[N], s[N];
    load_vector<C, N>(p.cos + table, c);
    load_vector<C, N>(p.sin + table, s);
    rotate_slot<kInterleaved>(c, s, p.sign, a, b);
  }
  store_vector<T, N>(y + slot.first, a);
  store_vector<T, N>(y + slot.second, b);
}

}  // namespace rotary_embedding
}  // namespace kernel_pytorch
