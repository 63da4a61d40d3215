// Kernel 3: 16-byte accesses, or 8-byte ones if the number of pairs requires that. A thread rotates pairs in two
// vectors of a head, one from each half or, if interleaved, two neighbouring ones; or it copies two that pass. It
// processes several heads of a token with the same cos and sin, and starts the loads of all heads at once.
#pragma once

#include "kernel_pytorch/cuda/rotate.cuh"
#include "parameters.cuh"

namespace kernel_pytorch {
namespace rotary_embedding {

constexpr int kVectorThreads = 256;

// This thread's two vectors of a head between load and use: as stored in memory if they fill 16 bytes.
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

// Blocks are `(slots, groups of heads)`: a slot is two vectors of `N` elements.
template <typename T, typename C, bool kInterleaved, int N, int kHeads>
__global__ void __launch_bounds__(kVectorThreads) rotate_vectorized(const Pointers<T, C> p) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (index >= count_groups<kHeads>(p)) return;
  const HeadGroup<T> group = group_of<kHeads>(p, index);
  const int heads = kHeads == 1 ? 1 : group.heads;
  const Slot slot = slot_at(threadIdx.x, p.pairs, N, kInterleaved);
  const int64_t table = table_offset(p, group.token);
  IncomingSlot<T, N> incoming[kHeads];
#pragma unroll
  for (int i = 0; i < kHeads; ++i) incoming[i].load(group.x + (i < heads ? i : 0) * group.stride, slot);
  float c[N], s[N];
  if (!slot.passes && table >= 0) {
    load_vector<C, N>(p.cos + table + threadIdx.x * N, c);
    load_vector<C, N>(p.sin + table + threadIdx.x * N, s);
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) c[i] = s[i] = nan_value();  // for a position outside of the tables
  }
  T* y = group.y;  // advanced from head to head: nvcc splits stores to y + i * columns into 8-byte ones
#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
    if (i >= heads) break;
    float a[N], b[N];
    incoming[i].read(a, b);
    if (!slot.passes) rotate_slot<kInterleaved>(c, s, p.sign, a, b);
    store_vector<T, N>(y + slot.first, a);
    store_vector<T, N>(y + slot.second, b);
    y += p.columns;
  }
}

}  // namespace rotary_embedding
}  // namespace kernel_pytorch
