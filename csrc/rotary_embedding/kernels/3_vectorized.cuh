// Version 3: accesses of 16 bytes, or of 8 where half a rotation is no multiple of more. A thread rotates two vectors of a
// head, its pairs in registers: one of each half, or, interleaved, two neighbouring ones; or it copies two that pass. It does
// so for several heads of a token, whose cos and sin it reads once, and all of which are on their way at once.
#pragma once

#include "kernel_pytorch/cuda/rotate.cuh"
#include "kernel_pytorch/cuda/vector.cuh"
#include "parameters.cuh"

namespace kernel_pytorch {
namespace rotary_embedding {

constexpr int kVectorThreads = 256;

// Blocks are `(slots, groups of heads)`: a slot is two vectors of `N` elements. No group has heads of two tokens.
template <typename T, typename C, bool kInterleaved, int N, int kHeads>
__global__ void __launch_bounds__(kVectorThreads) rotate_vectorized(const Pointers<T, C> p) {
  const int groups = (p.heads + kHeads - 1) / kHeads;  // of a token
  const int64_t group = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  const int64_t token = quotient(group, groups);
  if (token * p.heads >= p.rows) return;
  const int head = static_cast<int>(group - token * groups) * kHeads;
  const int heads = kHeads == 1 ? 1 : p.heads - head;  // that are left
  const Slot slot = slot_at(threadIdx.x, p.pairs, N, kInterleaved);
  const T* const x = p.x + head_offset(p.strides, token, head);
  T* const y = p.y + row_offset(token * p.heads + head, p.columns);
  float a[kHeads][N], b[kHeads][N], c[N], s[N];
#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
    const T* const own = x + (i < heads ? i : 0) * p.strides.head;
    load_vector<T, N>(own + slot.first, a[i]);
    load_vector<T, N>(own + slot.second, b[i]);
  }
  if (!slot.passes) {
    const int64_t table = row_offset(remainder(token, p.table_rows), p.pairs) + threadIdx.x * N;
    load_vector<C, N>(p.cos + table, c);
    load_vector<C, N>(p.sin + table, s);
#pragma unroll
    for (int i = 0; i < kHeads; ++i) rotate_slot<kInterleaved>(c, s, p.sign, a[i], b[i]);
  }
#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
    if (i >= heads) break;
    store_vector<T, N>(y + row_offset(i, p.columns) + slot.first, a[i]);
    store_vector<T, N>(y + row_offset(i, p.columns) + slot.second, b[i]);
  }
}

}  // namespace rotary_embedding
}  // namespace kernel_pytorch
