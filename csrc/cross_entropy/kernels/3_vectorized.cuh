// Kernel 3: 16-byte accesses, with one update of the running maximum per vector.
#pragma once

#include "kernel_pytorch/cuda/online_softmax.cuh"
#include "parameters.cuh"

namespace kernel_pytorch {
namespace cross_entropy {

constexpr int kVectorThreads = 512;

// Number of a thread's loads in flight.
constexpr int kUnrolled = 4;

template <typename T, bool kCapped>
__global__ void __launch_bounds__(kVectorThreads) forward_vectorized(const ForwardPointers<T> p) {
  constexpr int N = kVectorLength<T>;
  __shared__ float scratch[2 * kMaxWarps];
  __shared__ float totals[kMaxWarps];
  const int64_t row = blockIdx.x;
  const T* const logits = p.logits + row_offset(row, p.columns);
  const float pivot = pivot_of<kCapped>(logits, p.softcap);
  OnlineSum softmax;
  float total = 0.0f;
  for (int64_t first = threadIdx.x * N; first < p.columns; first += kUnrolled * kVectorThreads * N) {
    Packed<T, N> raw[kUnrolled];
#pragma unroll
    for (int u = 0; u < kUnrolled; ++u) {  // start all loads before the first is used
      const int64_t column = first + u * kVectorThreads * N;
      if (column < p.columns) load_packed(logits + column, raw[u]);
    }
#pragma unroll
    for (int u = 0; u < kUnrolled; ++u) {
      if (first + u * kVectorThreads * N >= p.columns) break;
      float z[N];
      unpack(raw[u], z);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        z[i] = cap<kCapped>(z[i], p.softcap);
        total += z[i] - pivot;
      }
      softmax.add_all<kRounded<T>>(z);
    }
  }
  softmax = reduce_online(softmax, scratch);
  total = reduce_block(total, Add{}, totals);
  if (threadIdx.x == 0) write_loss<kCapped>(p, row, softmax, total);
}

// Loads 16 bytes that this thread may overwrite, bypassing the read-only cache, which requires constant memory.
template <typename T, int N>
__device__ __forceinline__ void load_own_vector(const T* source, float (&values)[N]) {
  static_assert(N * sizeof(T) == sizeof(uint4));
  const uint4 words = *reinterpret_cast<const uint4*>(source);
  T elements[N];
  memcpy(elements, &words, sizeof words);
#pragma unroll
  for (int i = 0; i < N; ++i) values[i] = widen(elements[i]);
}

// The blocks of gridDim.y share a row, without communication.
template <typename T, bool kCapped>
__global__ void __launch_bounds__(kVectorThreads) backward_vectorized(const BackwardPointers<T> p) {
  constexpr int N = kVectorLength<T>;
  const int64_t row = blockIdx.x;
  const int64_t offset = row_offset(row, p.columns);
  const RowGradient g = row_gradient(p, row);
  const int64_t step = static_cast<int64_t>(gridDim.y) * kVectorThreads * N;
  for (int64_t column = (blockIdx.y * static_cast<int64_t>(kVectorThreads) + threadIdx.x) * N; column < p.columns;
       column += step) {
    float values[N];
    load_own_vector<T, N>(p.logits + offset + column, values);
#pragma unroll
    for (int i = 0; i < N; ++i) values[i] = gradient_of<kCapped, kRounded<T>>(g, values[i], p.softcap, column + i);
    store_vector<T, N>(p.dlogits + offset + column, values);
  }
}

}  // namespace cross_entropy
}  // namespace kernel_pytorch
