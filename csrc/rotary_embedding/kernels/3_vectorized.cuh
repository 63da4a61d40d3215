// Rung 3: accesses of 16 bytes, or of 8 where half a rotation is no multiple of more. A thread rotates two vectors of a
// head, its pairs in registers: one of each half, or, interleaved, two neighbouring ones; or it copies two that pass. It does
// so for several heads of a token, whose cos and sin it reads once, and all of which are on their way at once.
#pragma once

#include "kernel_pytorch/cuda/rotate.cuh"
#include "kernel_pytorch/cuda/vector.cuh"
#include "parameters.cuh"

namespace kernel_pytorch {
namespace rotary_embedding {

constexpr int kVectorThreads = 256;

// The two vectors of a head that a thread has, on their way: as they lie in memory, where they fill 16 bytes.
template <typename T, int N>
struct IncomingSlot {
  static constexpr bool kPacked = N * sizeof(T) >= 16;
  using Vector = std::conditional_t<kPacked, Packed<T, kPacked ? N : kVectorLength<T>>, float[N]>;
  Vector a;
  Vector b;

  __device__ __forceinline__ void load(const T* head, const Slot& slot) {
    if constexpr (kPacked) {
      load_packed(head + slot.first, a);
      load_packed(head + slot.second, b);
    } else {
      load_vector<T, N>(head + slot.first, a);
      load_vector<T, N>(head + slot.second, b);
    }
  }

  __device__ __forceinline__ void read(float (&first)[N], float (&second)[N]) const {
    if constexpr (kPacked) {
      unpack(a, first);
      unpack(b, second);
    } else {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        first[i] = a[i];
        second[i] = b[i];
      }
    }
  }
};

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
  IncomingSlot<T, N> incoming[kHeads];
#pragma unroll
  for (int i = 0; i < kHeads; ++i) incoming[i].load(x + (i < heads ? i : 0) * p.strides.head, slot);
  float c[N], s[N];
  if (!slot.passes) {
    const int64_t table = row_offset(remainder(token, p.table_rows), p.pairs) + threadIdx.x * N;
    load_vector<C, N>(p.cos + table, c);
    load_vector<C, N>(p.sin + table, s);
  }
#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
    if (i >= heads) break;
    float a[N], b[N];
    incoming[i].read(a, b);
    if (!slot.passes) rotate_slot<kInterleaved>(c, s, p.sign, a, b);
    store_vector<T, N>(y + row_offset(i, p.columns) + slot.first, a);
    store_vector<T, N>(y + row_offset(i, p.columns) + slot.second, b);
  }
}

}  // namespace rotary_embedding
}  // namespace kernel_pytorch
