// Kernel 2: one thread per pair or passed column. Neighbouring threads read neighbours; any length and alignment.
#pragma once

#include "parameters.cuh"

namespace kernel_pytorch {
namespace rotary_embedding {

constexpr int kPairThreads = 256;

template <typename T, typename C, bool kInterleaved>
__global__ void __launch_bounds__(kPairThreads) rotate_pairs(const Pointers<T, C> p) {
  const int slots = p.columns - p.pairs;  // per head: its pairs, then its columns that pass
  const int64_t unit = blockIdx.x * static_cast<int64_t>(kPairThreads) + threadIdx.x;
  const int64_t index = quotient(unit, slots);
  if (index >= count_groups<1>(p)) return;
  const int slot = static_cast<int>(unit - index * slots);
  const HeadGroup<T> head = group_of<1>(p, index);
  if (slot >= p.pairs) {
    head.y[slot + p.pairs] = head.x[slot + p.pairs];
    return;
  }
  const Angle angle = angle_at(p, table_offset(p, head.token), slot);
  const int64_t first = first_of(slot, kInterleaved), second = second_of(slot, p.pairs, kInterleaved);
  const float a = widen(head.x[first]), b = widen(head.x[second]);
  head.y[first] = narrow<T>(a * angle.cos - b * angle.sin);
  head.y[second] = narrow<T>(b * angle.cos + a * angle.sin);
}

}  // namespace rotary_embedding
}  // namespace kernel_pytorch
