// Parameters of the softmax kernels, and masking of scores.
#pragma once

#include <cstdint>

#include "kernel_pytorch/cuda/vector.cuh"
#include "kernel_pytorch/index.h"

namespace kernel_pytorch {
namespace softmax {

// Elements of a bool tensor.
struct Bool {
  uint8_t bits;
};

// T: element type of x; M: of the mask; Y: of y.
template <typename T, typename M, typename Y>
struct ForwardPointers {
  const T* x;
  const M* mask;  // may be null
  Y* y;
  int64_t rows;
  int columns;
  float scale;
  Broadcast broadcast;
};

template <typename T>
struct BackwardPointers {
  const T* dy;
  const T* y;
  T* dx;        // null if not needed
  float* dots;  // null if there is no dmask
  int64_t rows;
  int columns;
  float scale;
};

// M: element type of dmask.
template <typename T, typename M>
struct MaskPointers {
  const T* dy;
  const T* y;
  const float* dots;
  M* dmask;
  int columns;
  Broadcast broadcast;
};

// Mask of a row, or null.
template <typename T, typename M, typename Y>
__device__ __forceinline__ const M* mask_of(const ForwardPointers<T, M, Y>& p, int64_t row) {
  return p.mask == nullptr ? nullptr : p.mask + broadcast_offset(p.broadcast, row);
}

__device__ __forceinline__ float masked(float z, Bool mask) { return mask.bits != 0 ? z : -INFINITY; }
template <typename M>
__device__ __forceinline__ float masked(float z, M mask) {
  return __fadd_rn(z, widen(mask));
}

// Rounds a score before it is used: within a fused multiply-add it would differ from the maximum that was computed from
// it.
__device__ __forceinline__ float scaled(float x, float scale) { return __fmul_rn(x, scale); }

// One score; `step` is 0 if one element of the mask is broadcast along the whole row.
template <typename T, typename M>
__device__ __forceinline__ float score(const T* x, const M* mask, int column, int step, float scale) {
  const float z = scaled(widen(x[column]), scale);
  return mask == nullptr ? z : masked(z, mask[column * step]);
}

// Elements of a non-null mask for `N` scores from an aligned column, between load and use.
template <typename M, int N>
struct IncomingMask {
  M elements[N];

  __device__ __forceinline__ void load(const M* mask, int column, int step) {
    if (step == 0) {
      const M one = *mask;
#pragma unroll
      for (M& element : elements) element = one;
    } else if constexpr (sizeof(M) * N == 4) {
      const unsigned word = __ldg(reinterpret_cast<const unsigned*>(mask + column));
      memcpy(elements, &word, sizeof word);
    } else if constexpr (sizeof(M) * N == 8) {
      const uint2 words = __ldg(reinterpret_cast<const uint2*>(mask + column));
      memcpy(elements, &words, sizeof words);
    } else {
      Packed<M, N> packed;
      load_kept(mask + column, packed);
      memcpy(elements, packed.words, sizeof packed.words);
    }
  }

  __device__ __forceinline__ void apply(float (&z)[N]) const {
#pragma unroll
    for (int i = 0; i < N; ++i) z[i] = masked(z[i], elements[i]);
  }
};

template <int N>
__device__ __forceinline__ void scale_all(float scale, float (&z)[N]) {
#pragma unroll
  for (float& one : z) one = scaled(one, scale);
}

// Replaces `N` elements of x, from an aligned column, by their scores.
template <typename M, int N>
__device__ __forceinline__ void to_scores(const M* mask, int column, int step, float scale, float (&z)[N]) {
  scale_all(scale, z);
  if (mask == nullptr) return;
  IncomingMask<M, N> incoming;
  incoming.load(mask, column, step);
  incoming.apply(z);
}

// Gradient of a score. `rest` is the correction of `dot`: if it were added to `dot` first, rounding would remove it.
__device__ __forceinline__ float score_gradient(float dy, float y, float dot, float rest) {
  return y * ((dy - dot) - rest);
}

}  // namespace softmax
}  // namespace kernel_pytorch
