// Parameters of the kernels of QK-norm and rotary position embedding: typed pointers and sizes.
#pragma once

#include "kernel_pytorch/cuda/vector.cuh"
#include "kernel_pytorch/rotary.h"

namespace kernel_pytorch {
namespace qk_norm_rope {

// C: element type of cos and sin.
template <typename C>
struct Tables {
  const C* cos;
  const C* sin;
  int64_t rows;
  int pairs;
  float sign;  // of sin
};

// q or k. T: element type of x and y; W: of the weight.
template <typename T, typename W>
struct ForwardHeads {
  const T* x;
  const W* weight;
  T* y;  // contiguous
  float* rstd;
  HeadStrides strides;  // of x
  int heads;
};

template <typename T, typename W, typename C>
struct ForwardPointers {
  ForwardHeads<T, W> q;
  ForwardHeads<T, W> k;
  Tables<C> tables;
  int64_t tokens;
  int columns;
  float eps;
  float offset;
};

template <typename T, typename W>
struct BackwardHeads {
  const T* dy;  // null if no gradient of this side is needed
  const T* x;
  const W* weight;
  const float* rstd;
  T* dx;          // null if not needed; contiguous
  float* shares;  // partial sums `(parts, columns)`; null if dweight is not needed
  HeadStrides dy_strides;
  HeadStrides strides;  // of x
  int heads;
};

// Each block computes one part.
template <typename T, typename W, typename C>
struct BackwardPointers {
  BackwardHeads<T, W> q;
  BackwardHeads<T, W> k;
  Tables<C> tables;
  int64_t tokens;
  int columns;
  float offset;
};

// One head, counted through the heads of q, then of k. Fields are selected separately: selecting between structures
// would put both on the stack.
template <typename T, typename W>
struct Row {
  const T* x;
  const W* weight;
  T* y;
  float* rstd;
  int64_t token;
};

template <typename T, typename W, typename C>
__device__ __forceinline__ Row<T, W> row_of(const ForwardPointers<T, W, C>& p, int64_t index) {
  const int64_t queries = p.tokens * p.q.heads;
  const bool key = index >= queries;
  const int64_t row = key ? index - queries : index;
  const int heads = key ? p.k.heads : p.q.heads;
  const int64_t token = quotient(row, heads);
  const HeadStrides strides = {key ? p.k.strides.token : p.q.strides.token, key ? p.k.strides.head : p.q.strides.head};
  return {(key ? p.k.x : p.q.x) + head_offset(strides, token, row - token * heads), key ? p.k.weight : p.q.weight,
          (key ? p.k.y : p.q.y) + row_offset(row, p.columns), (key ? p.k.rstd : p.q.rstd) + row, token};
}

// Number of groups of `size` heads per token; the last one may be smaller.
KP_HOST_DEVICE constexpr int groups_of(int heads, int size) { return (heads + size - 1) / size; }

// Several heads of one token, either all of q or all of k.
template <typename T, typename W>
struct HeadGroup {
  const T* x;  // of the first head
  const W* weight;
  T* y;
  float* rstd;
  int64_t token;
  int64_t stride;  // of x, between heads
  int heads;       // remaining heads of the token, which may exceed the group's size
};

// Groups are numbered through those of q, token by token, then those of k.
template <int kHeads, typename T, typename W, typename C>
__device__ __forceinline__ HeadGroup<T, W> group_of(const ForwardPointers<T, W, C>& p, int64_t index) {
  const int64_t queries = p.tokens * groups_of(p.q.heads, kHeads);
  const bool key = index >= queries;
  const int heads = key ? p.k.heads : p.q.heads, groups = groups_of(heads, kHeads);
  const int64_t group = key ? index - queries : index;
  const int64_t token = quotient(group, groups);
  const int head = static_cast<int>(group - token * groups) * kHeads;
  const HeadStrides strides = {key ? p.k.strides.token : p.q.strides.token, key ? p.k.strides.head : p.q.strides.head};
  const int64_t row = token * heads + head;
  return {(key ? p.k.x : p.q.x) + head_offset(strides, token, head),
          key ? p.k.weight : p.q.weight,
          (key ? p.k.y : p.q.y) + row_offset(row, p.columns),
          (key ? p.k.rstd : p.q.rstd) + row,
          token,
          strides.head,
          heads - head};
}

// One column of a rotated head; `value(column)` reads the head before rotation.
template <bool kInterleaved, typename C, typename Value>
__device__ __forceinline__ float rotated(const Tables<C>& tables, int64_t token, int64_t column, const Value& value) {
  const float own = value(column);
  if (column >= 2 * tables.pairs) return own;
  const Partner partner = partner_of(column, tables.pairs, kInterleaved);
  const int64_t table = row_offset(token % tables.rows, tables.pairs) + partner.pair;
  const float sine = widen(tables.sin[table]) * tables.sign;
  return own * widen(tables.cos[table]) + value(partner.column) * (partner.second ? sine : -sine);
}

}  // namespace qk_norm_rope
}  // namespace kernel_pytorch
