// Version 3: accesses of 16 bytes, and a head stays in the registers of a few neighbouring threads: it is read once. A
// thread holds two vectors that make up pairs, one of each half or, interleaved, two neighbouring ones, and turns them by
// itself; everything that it reads is on its way before the first of it is looked at.
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

template <typename T, typename W, typename C, bool kInterleaved>
__global__ void __launch_bounds__(kVectorThreads)
    norm_rope_vectorized(const ForwardPointers<T, W, C> p, const int lanes) {
  const Lane lane = lane_of<kInterleaved>(lanes, p.columns, p.tables.pairs);
  const int64_t rows = p.tokens * (p.q.heads + p.k.heads);
  const int64_t index = blockIdx.x * static_cast<int64_t>(kVectorThreads / lanes) + lane.group;
  const bool holds = lane.holds && index < rows;
  const Row<T, W> row = row_of(p, index < rows ? index : 0);
  Pair h, weight;
  Angles angles;
  if (holds) {
    h.load(row.x, lane.slot);
    weight.load(row.weight, lane.slot);
  }
  angles.load(p.tables, lane, row.token, holds);
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kElements; ++i) sum += h.a[i] * h.a[i] + h.b[i] * h.b[i];
  const float rstd = 1.0f / sqrtf(reduce_lanes(sum, lanes) / static_cast<float>(p.columns) + p.eps);
  if (!holds) return;
  if (lane.own == 0) *row.rstd = rstd;
#pragma unroll
  for (int i = 0; i < kElements; ++i) {
    h.a[i] *= rstd * (p.offset + weight.a[i]);
    h.b[i] *= rstd * (p.offset + weight.b[i]);
  }
  angles.turn<kInterleaved>(h, p.tables.sign);
  h.store(row.y, lane.slot);
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
template <bool kInterleaved, typename T, typename W, typename C>
__device__ __forceinline__ void backward_heads(const BackwardPointers<T, W, C>& p, const BackwardHeads<T, W>& side,
                                               const Lane& lane, float* sums) {
  if (side.dx == nullptr && side.shares == nullptr) return;  // an empty dy is null too
  const int groups = kVectorThreads / lane.lanes;
  const int64_t rows = p.tokens * side.heads;
  Pair scale, share;
  if (lane.holds) scale.load(side.weight, lane.slot);
#pragma unroll
  for (int i = 0; i < kElements; ++i) {
    scale.a[i] += p.offset;
    scale.b[i] += p.offset;
  }
  for (int64_t first = blockIdx.x * static_cast<int64_t>(groups); first < rows;
       first += gridDim.x * static_cast<int64_t>(groups)) {
    const bool holds = lane.holds && first + lane.group < rows;
    const int64_t row = holds ? first + lane.group : 0;
    const int64_t token = quotient(row, side.heads), head = row - token * side.heads;
    Pair g, x;
    Angles angles;
    if (holds) {
      g.load(side.dy + head_offset(side.dy_strides, token, head), lane.slot);
      x.load(side.x + head_offset(side.strides, token, head), lane.slot);
    }
    angles.load(p.tables, lane, token, holds);
    const float rstd = side.rstd[row];
    angles.turn<kInterleaved>(g, p.tables.sign);
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      sum += scale_gradient(g.a[i], x.a[i], rstd, scale.a[i], share.a[i]);
      sum += scale_gradient(g.b[i], x.b[i], rstd, scale.b[i], share.b[i]);
    }
    if (side.dx == nullptr) continue;
    const float mean = reduce_lanes(sum, lane.lanes) / static_cast<float>(p.columns);
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      g.a[i] = rstd * (g.a[i] - x.a[i] * mean);
      g.b[i] = rstd * (g.b[i] - x.b[i] * mean);
    }
    if (holds) g.store(side.dx + row_offset(row, p.columns), lane.slot);
  }
  if (side.shares != nullptr) {
    store_share(share, lane, p.columns, sums, side.shares + row_offset(blockIdx.x, p.columns));
  }
}

template <typename T, typename W, typename C, bool kInterleaved>
__global__ void __launch_bounds__(kVectorThreads, kResident)
    norm_rope_backward_vectorized(const BackwardPointers<T, W, C> p, const int lanes) {
  __shared__ __align__(16) float sums[kVectorThreads * kSlot];
  const Lane lane = lane_of<kInterleaved>(lanes, p.columns, p.tables.pairs);
  backward_heads<kInterleaved>(p, p.q, lane, sums);
  backward_heads<kInterleaved>(p, p.k, lane, sums);
}

}  // namespace qk_norm_rope
}  // namespace kernel_pytorch
