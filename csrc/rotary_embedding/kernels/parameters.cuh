// Parameters of the rotary position embedding kernels, and assignment of heads to threads.
#pragma once

#include "../rotary_embedding.h"
#include "kernel_pytorch/cuda/vector.cuh"
#include "kernel_pytorch/rotary.h"

namespace kernel_pytorch {
namespace rotary_embedding {

// q or k. T: element type of x and y.
template <typename T>
struct HeadPointers {
  const T* x;
  T* y;                 // contiguous
  HeadStrides strides;  // of x
  int heads;
};

// C: element type of cos and sin.
template <typename T, typename C>
struct Pointers {
  HeadPointers<T> q;
  HeadPointers<T> k;  // no heads if a single tensor is rotated
  const C* cos;
  const C* sin;
  Positions positions;
  int64_t tokens;
  int64_t table_rows;
  int columns;
  int pairs;
  float sign;  // of sin
};

// Groups of kHeads heads of one token are numbered through those of q, token by token, then those of k.
template <int kHeads>
KP_HOST_DEVICE constexpr int groups_of(int heads) {
  return (heads + kHeads - 1) / kHeads;
}

template <int kHeads, typename T, typename C>
KP_HOST_DEVICE int64_t count_groups(const Pointers<T, C>& p) {
  return p.tokens * (int64_t{groups_of<kHeads>(p.q.heads)} + groups_of<kHeads>(p.k.heads));
}

template <typename T>
struct HeadGroup {
  const T* x;  // of the first head
  T* y;
  int64_t token;
  int64_t stride;  // of x, between heads
  int heads;       // remaining heads of the token, which may exceed the group's size
};

// Fields are selected separately: selecting between structures would put both on the stack.
template <int kHeads, typename T, typename C>
__device__ __forceinline__ HeadGroup<T> group_of(const Pointers<T, C>& p, int64_t index) {
  const int64_t queries = p.tokens * groups_of<kHeads>(p.q.heads);
  const bool key = index >= queries;
  const int heads = key ? p.k.heads : p.q.heads, groups = groups_of<kHeads>(heads);
  const int64_t group = key ? index - queries : index;
  const int64_t token = quotient(group, groups);
  const int head = static_cast<int>(group - token * groups) * kHeads;
  const HeadStrides strides = {key ? p.k.strides.token : p.q.strides.token, key ? p.k.strides.head : p.q.strides.head};
  return {(key ? p.k.x : p.q.x) + head_offset(strides, token, head),
          (key ? p.k.y : p.q.y) + row_offset(token * heads + head, p.columns), token, strides.head, heads - head};
}

__device__ __forceinline__ float nan_value() { return __uint_as_float(0x7fc00000u); }

// Offset of cos and sin of a token; negative for a position outside of the tables, which must not be read.
template <typename T, typename C>
__device__ __forceinline__ int64_t table_offset(const Pointers<T, C>& p, int64_t token) {
  return row_offset(table_row(p.positions, p.table_rows, token), p.pairs);
}

struct Angle {
  float cos;
  float sin;
};

template <typename T, typename C>
__device__ __forceinline__ Angle angle_at(const Pointers<T, C>& p, int64_t offset, int pair) {
  if (offset < 0) return {nan_value(), nan_value()};
  return {widen(p.cos[offset + pair]), widen(p.sin[offset + pair]) * p.sign};
}

}  // namespace rotary_embedding
}  // namespace kernel_pytorch
