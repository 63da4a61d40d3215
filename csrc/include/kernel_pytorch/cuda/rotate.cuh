// Rotation of a slot: the two vectors of a head that a thread holds.
#pragma once

#include "kernel_pytorch/rotary.h"

namespace kernel_pytorch {

// `c` and `s` belong to the slot's pairs: element i of a with element i of b, or, interleaved, neighbours, a before b.
template <bool kInterleaved, int N>
__device__ __forceinline__ void rotate_slot(const float (&c)[N], const float (&s)[N], float sign, float (&a)[N],
                                            float (&b)[N]) {
  if constexpr (kInterleaved) {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      const float sine = s[i] * sign, other_sine = s[i + N / 2] * sign;
      const float even = a[2 * i], other_even = b[2 * i];
      a[2 * i] = even * c[i] - a[2 * i + 1] * sine;
      a[2 * i + 1] = a[2 * i + 1] * c[i] + even * sine;
      b[2 * i] = other_even * c[i + N / 2] - b[2 * i + 1] * other_sine;
      b[2 * i + 1] = b[2 * i + 1] * c[i + N / 2] + other_even * other_sine;
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float one = a[i], sine = s[i] * sign;
      a[i] = one * c[i] - b[i] * sine;
      b[i] = b[i] * c[i] + one * sine;
    }
  }
}

}  // namespace kernel_pytorch
