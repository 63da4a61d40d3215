// Kernel 2: 16-byte accesses. Consecutive threads continue from row to row, so that blocks are full for rows of any
// length. N = 1 supports rows of any length and alignment.
#pragma once

#include "1_naive.cuh"

namespace kernel_pytorch {
namespace gated {

constexpr int kThreads = 256;

// Start of a thread's vector, of which `count` elements exist.
struct Place {
  int64_t row;
  int64_t column;
  int count;
};

template <int N>
__device__ __forceinline__ Place place_of(const Sizes& s) {
  const int64_t vectors = ceil_divide(s.columns, N), index = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  const int64_t row = quotient(index, vectors), column = (index - row * vectors) * N;
  return {row, column, row < s.rows ? valid_elements(column, s.columns, N) : 0};
}

template <Activation A, typename T, int N>
__global__ void __launch_bounds__(kThreads) forward_vectorized(const ForwardPointers<T> p) {
  const Place place = place_of<N>(p.sizes);
  if (place.count == 0) return;
  const int64_t at = row_offset(place.row, p.sizes.stride) + place.column;
  float gate[N], up[N];
  load_all<T, N>(place.count, {p.gate + at, p.up + at}, gate, up);
#pragma unroll
  for (int i = 0; i < N; ++i) gate[i] = gate_one<A, kRounded<T>>(gate[i], up[i], p.sizes);
  store_elements<T, N>(p.y + row_offset(place.row, p.sizes.columns) + place.column, place.count, gate);
}

template <Activation A, typename T, int N>
__global__ void __launch_bounds__(kThreads) backward_vectorized(const BackwardPointers<T> p) {
  const Sizes& s = p.sizes;
  const Place place = place_of<N>(s);
  if (place.count == 0) return;
  const int64_t at = row_offset(place.row, s.stride) + place.column;
  float dy[N], gate[N], up[N];
  load_all<T, N>(place.count, {p.dy + row_offset(place.row, s.columns) + place.column, p.gate + at, p.up + at}, dy, gate,
                 up);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const Activated activated = activate<A, kRounded<T>>(at_most(gate[i], s.limit), s.alpha);
    const float u = at_least(at_most(up[i], s.limit), -s.limit);
    // As in PyTorch, clamped numbers have zero gradient, and with a limit NaN does too. relu's gradient is set to zero
    // below zero, where zero times an infinite up would be NaN.
    const bool unlimited = s.limit == INFINITY;
    const bool has_gradient = (unlimited || gate[i] <= s.limit) && !(A == Activation::kRelu && gate[i] <= 0.0f);
    gate[i] = has_gradient ? dy[i] * (u + s.offset) * activated.slope : 0.0f;
    up[i] = unlimited || fabsf(up[i]) <= s.limit ? dy[i] * activated.value : 0.0f;
  }
  if (p.dgate != nullptr) store_elements<T, N>(p.dgate + at, place.count, gate);
  if (p.dup != nullptr) store_elements<T, N>(p.dup + at, place.count, up);
}

}  // namespace gated
}  // namespace kernel_pytorch
