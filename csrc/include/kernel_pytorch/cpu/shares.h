// Sums over rows, computed as partial sums whose rounding does not depend on the number of threads.
#pragma once

#include "kernel_pytorch/cpu/vector.h"

namespace kernel_pytorch {
namespace {

// Elements `begin` to `end` of the sum of `parts` partial sums of `size` elements each, added in order.
template <typename T>
inline void add_shares_in_order(const ComputeFor<T>* shares, T* sums, int64_t size, int64_t parts, int64_t begin,
                                int64_t end) {
  using Compute = ComputeFor<T>;
  for_vectors<Compute>(end - begin, [&](int64_t i, auto lanes) {
    Vector<Compute> sum = {}, lost = {};
    for (int64_t part = 0; part < parts; ++part) {
      // Kahan summation: the rounding error of an addition is corrected in the next one.
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
