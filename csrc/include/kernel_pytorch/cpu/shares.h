// Sums over rows that are taken in shares, so that they round in the same way whoever computes them.
#pragma once

#include "kernel_pytorch/cpu/vector.h"

namespace kernel_pytorch {
namespace {

// Elements `begin` to `end` of the sum of `parts` shares of `size` elements each, in their order.
template <typename T>
inline void add_shares_in_order(const ComputeFor<T>* shares, T* sums, int64_t size, int64_t parts, int64_t begin,
                                int64_t end) {
  using Compute = ComputeFor<T>;
  for_vectors<Compute>(end - begin, [&](int64_t i, auto lanes) {
    Vector<Compute> sum = {}, lost = {};
    for (int64_t part = 0; part < parts; ++part) {
      // Kahan: what an addition rounds away is added to the next.
      const Vector<Compute> term = load(shares + part * size + begin + i, lanes) - lost;
      const Vector<Compute> next = sum + term;
      lost = (next - sum) - term;
      sum = next;
    }
    store(sums + begin + i, sum, lanes);
  });
}

}  // namespace
}  // namespace kernel_pytorch
