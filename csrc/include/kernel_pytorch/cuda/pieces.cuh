// Unaligned rows: single elements up to an aligned address, then 16-byte vectors, then single elements.
#pragma once

#include "kernel_pytorch/cuda/vector.cuh"
#include "kernel_pytorch/index.h"

namespace kernel_pytorch {

// Partition of one row of several tensors for the threads of a block.
template <int N>
struct Pieces {
  int columns;
  int head;     // elements before the first vector
  int vectors;  // 0 if the tensors have different alignments

  // Calls `visit(column)` for this thread's elements outside the vectors.
  template <typename Visit>
  __device__ __forceinline__ void for_each_single(const Visit& visit) const {
    const int inside = vectors * N;
    for (int i = threadIdx.x; i < columns - inside; i += blockDim.x) visit(i < head ? i : i + inside);
  }

  // Calls `visit(column, values...)` for this thread's vectors, with `kBatch` loads in flight at a time.
  template <int kBatch, typename T, typename Visit>
  __device__ __forceinline__ void for_each_vector(const T* row, const Visit& visit) const {
    for_each_batch<kBatch>([&](auto& places) {
      Packed<T, N> packed[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (places[i] < columns) load_packed(row + places[i], packed[i]);
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (places[i] >= columns) continue;
        float values[N];
        unpack(packed[i], values);
        visit(places[i], values);
      }
    });
  }

  template <int kBatch, typename T, typename Visit>
  __device__ __forceinline__ void for_each_vector(const T* row, const T* other_row, const Visit& visit) const {
    for_each_batch<kBatch>([&](auto& places) {
      Packed<T, N> packed[kBatch], others[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (places[i] >= columns) continue;
        load_packed(row + places[i], packed[i]);
        load_packed(other_row + places[i], others[i]);
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (places[i] >= columns) continue;
        float values[N], other_values[N];
        unpack(packed[i], values);
        unpack(others[i], other_values);
        visit(places[i], values, other_values);
      }
    });
  }

 private:
  // Calls `work(places)` with the first columns of vectors; beyond the last vector, with `columns`.
  template <int kBatch, typename Work>
  __device__ __forceinline__ void for_each_batch(const Work& work) const {
    for (int first = threadIdx.x; first < vectors; first += kBatch * blockDim.x) {
      int places[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int vector = first + i * static_cast<int>(blockDim.x);
        places[i] = vector < vectors ? head + vector * N : columns;
      }
      work(places);
    }
  }
};

// Partition of rows of `columns` elements that start at these addresses.
template <int N, typename T, typename... Others>
__device__ __forceinline__ Pieces<N> pieces_of(int columns, const T* row, const Others*... others) {
  const auto beyond = [](const void* address) { return static_cast<int>(reinterpret_cast<uint64_t>(address) % 16); };
  const bool together = ((sizeof(Others) == sizeof(T) && beyond(others) == beyond(row)) && ...);
  if (!together) return {columns, columns, 0};
  const int before = (16 - beyond(row)) % 16 / static_cast<int>(sizeof(T)), head = before < columns ? before : columns;
  return {columns, head, (columns - head) / N};
}

}  // namespace kernel_pytorch
