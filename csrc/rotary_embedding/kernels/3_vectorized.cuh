// Version 3: accesses of 16 bytes. A thread rotates two vectors of a head, its pairs in registers: one of each half, or,
// interleaved, two neighbouring ones; or it copies two that pass.
#pragma once

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
  const int64_t token = row / p.heads;
  const T* x = p.x + head_offset(p.strides, token, row - token * p.heads);
  T* y = p.y + row_offset(row, p.columns);
  const Slot slot = slot_at(threadIdx.x, p.pairs, N, kInterleaved);
  float a[N], b[N];
  load_vector<T, N>(x + slot.first, a);
  load_vector<T, N>(x + slot.second, b);
  if (!slot.passes) {
    const int64_t table = row_offset(token % p.table_rows, p.pairs) + threadIdx.x * N;
    float c[N], s[N];
    load_vector<C, N>(p.cos + table, c);
    load_vector<C, N>(p.sin + table, s);
    if constexpr (kInterleaved) {
#pragma unroll
      for (int i = 0; i < N / 2; ++i) {
        const float sine = s[i] * p.sign, other_sine = s[i + N / 2] * p.sign;
        const float even = a[2 * i], other_even = b[2 * i];
        a[2 * i] = even * c[i] - a[2 * i + 1] * sine;
        a[2 * i + 1] = a[2 * i + 1] * c[i] + even * sine;
        b[2 * i] = other_even * c[i + N / 2] - b[2 * i + 1] * other_sine;
        b[2 * i + 1] = b[2 * i + 1] * c[i + N / 2] + other_even * other_sine;
      }
    } else {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const float one = a[i], sine = s[i] * p.sign;
        a[i] = one * c[i] - b[i] * sine;
        b[i] = b[i] * c[i] + one * sine;
      }
    }
  }
  store_vector<T, N>(y + slot.first, a);
  store_vector<T, N>(y + slot.second, b);
}

}  // namespace rotary_embedding
}  // namespace kernel_pytorch
