// Version 3: accesses of 16 bytes, and a head stays in the registers of a few neighbouring threads: it is read once. A
// thread holds two vectors that make up pairs, one of each half or, interleaved, two neighbouring ones, and turns them by
// itself. It does so for several heads of a token, whose cos, sin and weight it reads once: beside 16-bit heads those are
// most of what is read. Everything is on its way before the first of it is looked at.
#pragma once

#include "kernel_pytorch/cuda/reduce.cuh"
#include "kernel_pytorch/cuda/rotate.cuh"
#include "parameters.cuh"

namespace kernel_pytorch {
namespace qk_norm_rope {

constexpr int kElements = 8;  // of a vector: 16 bytes, or twice that
constexpr int kSlot = 2 * kElements;
constexpr int kVectorThreads = 256;
constexpr int kResident = 2;  // blocks of a backward on a multiprocessor: all shares side by side

// Where a thread stands: `lanes` threads, a power of two up to a warp, have a head between them. Those beyond its end
// hold zeros.
struct Lane {
  int lanes;
  int own;
  int group;  // of the block
  Slot slot;
  bool holds;
};

template <bool kInterleaved>
__device__ __forceinline__ Lane lane_of(int lanes, int columns, int pairs) {
  const int own = threadIdx.x % lanes;
  return {lanes, own, static_cast<int>(threadIdx.x) / lanes, slot_at(own, pairs, kElements, kInterleaved),
          own * kSlot < columns};
}

// Of a head, for all its threads.
__device__ __forceinline__ float reduce_lanes(float value, int lanes) {
  for (int mask = lanes / 2; mask > 0; mask /= 2) value += __shfl_xor_sync(0xffffffffu, value, mask);
  return value;
}

// The two vectors of a head that a thread has.
struct Pair {
  float a[kElements] = {};
  float b[kElements] = {};

  template <typename T>
  __device__ __forceinline__ void load(const T* head, const Slot& slot) {
    load_vector<T, kElements>(head + slot.first, a);
    load_vector<T, kElements>(head + slot.second, b);
  }

  template <typename T>
  __device__ __forceinline__ void store(T* head, const Slot& slot) const {
    store_vector<T, kElements>(head + slot.first, a);
    store_vector<T, kElements>(head + slot.second, b);
  }
};

// The same as it lies in memory: half the registers, where elements are of 16 bits.
template <typename T>
struct PackedPair {
  Packed<T, kElements> a;
  Packed<T, kElements> b;

  __device__ __forceinline__ void load(const T* head, const Slot& slot) {
    load_packed(head + slot.first, a);
    load_packed(head + slot.second, b);
  }

  __device__ __forceinline__ Pair unpacked() const {
    Pair pair;
    unpack(a, pair.a);
    unpack(b, pair.b);
    return pair;
  }
};

// cos and sin of a thread's pairs.
struct Angles {
  float c[kElements];
  float s[kElements];
  bool turns;

  template <typename C>
  __device__ __forceinline__ void load(const Tables<C>& tables, const Lane& lane, int64_t token, bool holds) {
    turns = holds && !lane.slot.passes;
    if (!turns) return;
    const int64_t at = row_offset(remainder(token, tables.rows), tables.pairs) + lane.own * kElements;
    load_vector<C, kElements>(tables.cos + at, c);
    load_vector<C, kElements>(tables.sin + at, s);
  }

  template <bool kInterleaved>
  __device__ __forceinline__ void turn(Pair& pair, float sign) const {
    if (turns) rotate_slot<kInterleaved>(c, s, sign, pair.a, pair.b);
  }
};

template <typename T, typename W, typename C, bool kInterleaved, int kHeads>
__global__ void __launch_bounds__(kVectorThreads)
    norm_rope_vectorized(const ForwardPointers<T, W, C> p, const int lanes) {
  const Lane lane = lane_of<kInterleaved>(lanes, p.columns, p.tables.pairs);
  const int64_t index = blockIdx.x * static_cast<int64_t>(kVectorThreads / lanes) + lane.group;
  const int64_t groups = p.tokens * (groups_of(p.q.heads, kHeads) + groups_of(p.k.heads, kHeads));
  const HeadGroup<T, W> group = group_of<kHeads>(p, index < groups ? index : 0);
  const int heads = lane.holds && index < groups ? group.heads : 0;
  PackedPair<T> packed[kHeads] = {};
  Pair weight;
  Angles angles;
#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
    if (i < heads) packed[i].load(group.x + i * group.stride, lane.slot);
  }
  if (heads > 0) weight.load(group.weight, lane.slot);
  angles.load(p.tables, lane, group.token, heads > 0);
#pragma unroll
  for (int i = 0; i < kElements; ++i) {
    weight.a[i] += p.offset;
    weight.b[i] += p.offset;
  }
#pragma unroll
  for (int n = 0; n < kHeads; ++n) {
    Pair h = packed[n].unpacked();
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kElements; ++i) sum += h.a[i] * h.a[i] + h.b[i] * h.b[i];
    const float rstd = 1.0f / sqrtf(reduce_lanes(sum, lanes) / static_cast<float>(p.columns) + p.eps);
    if (n >= heads) continue;
    if (lane.own == 0) group.rstd[n] = rstd;
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      h.a[i] *= rstd * weight.a[i];
      h.b[i] *= rstd * weight.b[i];
    }
    angles.turn<kInterleaved>(h, p.tables.sign);
    h.store(group.y + row_offset(n, p.columns), lane.slot);
  }
}

// What an element of the gradient is made of and adds to; the element of x becomes x_hat.
__device__ __forceinline__ float scale_gradient(float& g, float& x, float rstd, float scale, float& share) {
  x *= rstd;
  share += g * x;
  g *= scale;
  return g * x;
}

// The sum of what the groups of a block have of dweight, as the block's share.
__device__ __forceinline__ void store_share(const Pair& share, const Lane& lane, int columns, float* sums,
                                            float* target) {
  const int width = lane.lanes * kSlot, groups = kVectorThreads / lane.lanes;
  __syncthreads();  // the sums of the other side have been read
  float* const own = sums + lane.group * width;
#pragma unroll
  for (int i = 0; i < kElements; i += 4) {
    *reinterpret_cast<float4*>(own + lane.slot.first + i) = {share.a[i], share.a[i + 1], share.a[i + 2], share.a[i + 3]};
    *reinterpret_cast<float4*>(own + lane.slot.second + i) = {share.b[i], share.b[i + 1], share.b[i + 2], share.b[i + 3]};
  }
  __syncthreads();
  for (int column = threadIdx.x; column < columns; column += kVectorThreads) {
    float total = 0.0f;
    for (int group = 0; group < groups; ++group) total += sums[group * width + column];
    target[column] = total;
  }
}

// The gradients of q, or of k: the heads of one part, and its share of dweight, in registers until the last of them.
template <bool kInterleaved, int kHeads, typename T, typename W, typename C>
__device__ __forceinline__ void backward_heads(const BackwardPointers<T, W, C>& p, const BackwardHeads<T, W>& side,
                                               const Lane& lane, float* sums) {
  if (side.dx == nullptr && side.shares == nullptr) return;  // an empty dy is null too
  const unsigned of_block = kVectorThreads / lane.lanes, of_token = groups_of(side.heads, kHeads);
  const auto groups = static_cast<unsigned>(p.tokens) * of_token;  // below 2^31, or this is not launched
  Pair scale, share;
  if (lane.holds) scale.load(side.weight, lane.slot);
#pragma unroll
  for (int i = 0; i < kElements; ++i) {
    scale.a[i] += p.offset;
    scale.b[i] += p.offset;
  }
  for (unsigned first = blockIdx.x * of_block; first < groups; first += gridDim.x * of_block) {
    const bool there = first + lane.group < groups;
    const unsigned group = there ? first + lane.group : 0;
    const unsigned token = group / of_token, head = (group - token * of_token) * kHeads;
    const int64_t row = static_cast<int64_t>(token) * side.heads + head;
    const int heads = lane.holds && there ? side.heads - static_cast<int>(head) : 0;
    const T* const from_dy = side.dy + head_offset(side.dy_strides, token, head);
    const T* const from_x = side.x + head_offset(side.strides, token, head);
    PackedPair<T> dy[kHeads] = {}, h[kHeads] = {};
    Angles angles;
    float rstd[kHeads];
#pragma unroll
    for (int n = 0; n < kHeads; ++n) {
      if (n < heads) {
        dy[n].load(from_dy + n * side.dy_strides.head, lane.slot);
        h[n].load(from_x + n * side.strides.head, lane.slot);
      }
      rstd[n] = n < heads ? side.rstd[row + n] : 0.0f;
    }
    angles.load(p.tables, lane, token, heads > 0);
#pragma unroll
    for (int n = 0; n < kHeads; ++n) {
      Pair g = dy[n].unpacked(), x = h[n].unpacked();
      angles.turn<kInterleaved>(g, p.tables.sign);
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < kElements; ++i) {
        sum += scale_gradient(g.a[i], x.a[i], rstd[n], scale.a[i], share.a[i]);
        sum += scale_gradient(g.b[i], x.b[i], rstd[n], scale.b[i], share.b[i]);
      }
      if (side.dx == nullptr) continue;
      const float mean = reduce_lanes(sum, lane.lanes) / static_cast<float>(p.columns);
#pragma unroll
      for (int i = 0; i < kElements; ++i) {
        g.a[i] = rstd[n] * (g.a[i] - x.a[i] * mean);
        g.b[i] = rstd[n] * (g.b[i] - x.b[i] * mean);
      }
      if (n < heads) g.store(side.dx + row_offset(row + n, p.columns), lane.slot);
    }
  }
  if (side.shares != nullptr) {
    store_share(share, lane, p.columns, sums, side.shares + row_offset(blockIdx.x, p.columns));
  }
}

template <typename T, typename W, typename C, bool kInterleaved, int kHeads>
__global__ void __launch_bounds__(kVectorThreads, kResident)
    norm_rope_backward_vectorized(const BackwardPointers<T, W, C> p, const int lanes) {
  __shared__ __align__(16) float sums[kVectorThreads * kSlot];
  const Lane lane = lane_of<kInterleaved>(lanes, p.columns, p.tables.pairs);
  backward_heads<kInterleaved, kHeads>(p, p.q, lane, sums);
  backward_heads<kInterleaved, kHeads>(p, p.k, lane, sums);
}

}  // namespace qk_norm_rope
}  // namespace kernel_pytorch
