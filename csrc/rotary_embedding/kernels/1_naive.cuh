// Kernel 1: one thread per head. Neighbouring threads read addresses a whole head apart.
#pragma once

#include "parameters.cuh"

namespace kernel_pytorch {
namespace rotary_embedding {

constexpr int kNaiveThreads = 128;

template <typename T, typename C, bool kInterleaved>
__global__ void __launch_bounds__(kNaiveThreads) rotate_naive(const Pointers<T, C> p) {
  const int64_t index = blockIdx.x * static_cast<int64_t>(kNaiveThreads) + threadIdx.x;
  if (index >= count_groups<1>(p)) return;
  const HeadGroup<T> head = group_of<1>(p, index);
  const int64_t table = table_offset(p, head.token);
#pragma unroll 1
  for (int pair = 0; pair < p.pairs; ++pair) {
    const int64_t first = first_of(pair, kInterleaved), second = second_of(pair, p.pairs, kInterleaved);
    const float a = widen(head.x[first]), b = widen(head.x[second]);
    const Angle angle = angle_at(p, table, pair);
    head.y[first] = narrow<T>(a * angle.cos - b * angle.sin);
    head.y[second] = narrow<T>(b * angle.cos + a * angle.sin);
  }
#pragma unroll 1
  for (int column = 2 * p.pairs; column < p.columns; ++column) head.y[column] = head.x[column];
}

}  // namespace rotary_embedding
}  // namespace kernel_pytorch
