// Kernel 3: 16-byte accesses; a head is read once and stays in the registers of a few neighbouring threads. A thread
// holds two vectors that form pairs, one from each half of the head or, if interleaved, two neighbouring ones, and
// rotates them without communication. It processes several heads of a token with the same cos, sin and weight, which
// are most of the traffic if heads have 16 bits. All loads are started before the first result is used.
#pragma once

#include "kernel_pytorch/cuda/math.cuh"
#include "kernel_pytorch/cuda/reduce.cuh"
#include "kernel_pytorch/cuda/rotate.cuh"
#include "parameters.cuh"

namespace kernel_pytorch {
namespace qk_norm_rope {

constexpr int kElements = 8;  // per vector: 16 or 32 bytes
constexpr int kSlot = 2 * kElements;
constexpr int kBackwardThreads = 256;
constexpr int kForwardThreads = 128;
constexpr int kResident = 2;  // blocks of a backward per multiprocessor: all parts run at once

// Position of a thread: `lanes` threads, a power of two up to a warp size, share a head. Those beyond the end of the
// head hold zeros.
struct Lane {
  int lanes;
  int own;
  int group;  // within the block
  Slot slot;
  bool holds;
};

template <bool kInterleaved>
__device__ __forceinline__ Lane lane_of(int lanes, int columns, int pairs) {
  const int own = threadIdx.x % lanes;
  return {lanes, own, static_cast<int>(threadIdx.x) / lanes, slot_at(own, pairs, kElements, kInterleaved),
          own * kSlot < columns};
}

// Sums over the threads of each head, for several heads at once.
template <int kHeads>
__device__ __forceinline__ void reduce_lanes(float (&values)[kHeads], int lanes) {
#pragma unroll
  for (int mask = kWarp / 2; mask > 0; mask /= 2) {
    if (mask >= lanes) continue;
#pragma unroll
    for (float& value : values) value += __shfl_xor_sync(0xffffffffu, value, mask);
  }
}

// This thread's two vectors of a head.
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

// Same as stored in memory: 16-bit elements take half the registers.
template <typename T>
struct PackedPair {
  Packed<T, kElements> vectors[2];

  __device__ __forceinline__ void load(const T* head, const Slot& slot) {
    load_packed(head + slot.first, vectors[0]);
    load_packed(head + slot.second, vectors[1]);
  }

  __device__ __forceinline__ Pair unpacked() const {
    Pair pair;
    unpack(vectors[0], pair.a);
    unpack(vectors[1], pair.b);
    return pair;
  }
};

// cos and sin of this thread's pairs; sin includes its sign.
struct Angles {
  float c[kElements] = {};
  float s[kElements] = {};
  bool turns;

  template <typename C>
  __device__ __forceinline__ void load(const Tables<C>& tables, const Lane& lane, int64_t token, bool holds) {
    turns = holds && !lane.slot.passes;
    if (!turns) return;
    const int64_t at = row_offset(remainder(token, tables.rows), tables.pairs) + lane.own * kElements;
    load_vector<C, kElements>(tables.cos + at, c);
    load_vector<C, kElements>(tables.sin + at, s);
#pragma unroll
    for (float& sine : s) sine *= tables.sign;
  }

  template <bool kInterleaved>
  __device__ __forceinline__ void turn(Pair& pair) const {
    if (turns) rotate_slot<kInterleaved>(c, s, 1.0f, pair.a, pair.b);
  }
};

// Factors of this thread's columns, weight and rotation combined, the same for all heads: y is a column times `own`
// plus its partner column times `other`.
template <bool kInterleaved>
class Factors {
 public:
  __device__ __forceinline__ Factors(const Pair& weight, const Angles& angles) : own_(weight), turns_(angles.turns) {
    if (!turns_) return;
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      constexpr int kHalf = kElements / 2;
      const int pair = kInterleaved ? i / 2 : i, pair_of_b = kInterleaved ? kHalf + i / 2 : i;
      const float sign = i % 2 == 0 ? -1.0f : 1.0f;
      own_.a[i] *= angles.c[pair];
      own_.b[i] *= angles.c[pair_of_b];
      other_.a[i] = kInterleaved ? sign * weight.a[i ^ 1] * angles.s[pair] : -weight.b[i] * angles.s[pair];
      other_.b[i] = kInterleaved ? sign * weight.b[i ^ 1] * angles.s[pair_of_b] : weight.a[i] * angles.s[pair];
    }
  }

  // Computes y from h.
  __device__ __forceinline__ Pair apply(const Pair& h, float rstd) const {
    Pair y;
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      y.a[i] = h.a[i] * own_.a[i];
      y.b[i] = h.b[i] * own_.b[i];
      if (turns_) {
        y.a[i] = fmaf(kInterleaved ? h.a[i ^ 1] : h.b[i], other_.a[i], y.a[i]);
        y.b[i] = fmaf(kInterleaved ? h.b[i ^ 1] : h.a[i], other_.b[i], y.b[i]);
      }
      y.a[i] *= rstd;
      y.b[i] *= rstd;
    }
    return y;
  }

 private:
  Pair own_;
  Pair other_;
  bool turns_;
};

template <typename T, typename W, typename C, bool kInterleaved, int kHeads>
__global__ void __launch_bounds__(kForwardThreads)
    norm_rope_vectorized(const ForwardPointers<T, W, C> p, const int lanes) {
  const Lane lane = lane_of<kInterleaved>(lanes, p.columns, p.tables.pairs);
  const int64_t index = blockIdx.x * static_cast<int64_t>(kForwardThreads / lanes) + lane.group;
  const int64_t groups = p.tokens * (groups_of(p.q.heads, kHeads) + groups_of(p.k.heads, kHeads));
  const HeadGroup<T, W> group = group_of<kHeads>(p, index < groups ? index : 0);
  const int heads = lane.holds && index < groups ? group.heads : 0;
  PackedPair<T> packed[kHeads] = {};
  Pair weight;
  Angles angles;
#pragma unroll
  for (int n = 0; n < kHeads; ++n) {
    if (n < heads) packed[n].load(group.x + n * group.stride, lane.slot);
  }
  if (heads > 0) weight.load(group.weight, lane.slot);
  angles.load(p.tables, lane, group.token, heads > 0);
  float squares[kHeads] = {};
#pragma unroll
  for (int n = 0; n < kHeads; ++n) {
    const Pair h = packed[n].unpacked();
#pragma unroll
    for (int i = 0; i < kElements; ++i) squares[n] = fmaf(h.b[i], h.b[i], fmaf(h.a[i], h.a[i], squares[n]));
    forget_unpacked(packed[n].vectors);
  }
  reduce_lanes(squares, lanes);
#pragma unroll
  for (int i = 0; i < kElements; ++i) {
    weight.a[i] += p.offset;
    weight.b[i] += p.offset;
  }
  const Factors<kInterleaved> factors(weight, angles);
#pragma unroll
  for (int n = 0; n < kHeads; ++n) {
    if (n >= heads) continue;
    const float rstd = rstd_of<kRounded<T>>(squares[n], p.columns, p.eps);
    if (lane.own == 0) group.rstd[n] = rstd;
    factors.apply(packed[n].unpacked(), rstd).store(group.y + row_offset(n, p.columns), lane.slot);
  }
}

// Gradient of one element; adds to the partial sum, and replaces x by x_hat.
__device__ __forceinline__ float scale_gradient(float& g, float& x, float rstd, float scale, float& share) {
  x *= rstd;
  share += g * x;
  g *= scale;
  return g * x;
}

// Adds the partial sums of the groups of a block, and stores the result as that of the block.
__device__ __forceinline__ void store_share(const Pair& share, const Lane& lane, int columns, float* sums,
                                            float* target) {
  const int width = lane.lanes * kSlot, groups = kBackwardThreads / lane.lanes;
  __syncthreads();  // all threads have read the sums of the other side
  float* const own = sums + lane.group * width;
#pragma unroll
  for (int i = 0; i < kElements; i += 4) {
    *reinterpret_cast<float4*>(own + lane.slot.first + i) = {share.a[i], share.a[i + 1], share.a[i + 2], share.a[i + 3]};
    *reinterpret_cast<float4*>(own + lane.slot.second + i) = {share.b[i], share.b[i + 1], share.b[i + 2], share.b[i + 3]};
  }
  __syncthreads();
  for (int column = threadIdx.x; column < columns; column += kBackwardThreads) {
    float total = 0.0f;
    for (int group = 0; group < groups; ++group) total += sums[group * width + column];
    target[column] = total;
  }
}

// Gradients of q or k for the heads of one part; accumulates the partial sum of dweight in registers.
template <bool kInterleaved, int kHeads, typename T, typename W, typename C>
__device__ __forceinline__ void backward_heads(const BackwardPointers<T, W, C>& p, const BackwardHeads<T, W>& side,
                                               const Lane& lane, float* sums) {
  if (side.dx == nullptr && side.shares == nullptr) return;  // an empty dy is null too
  const unsigned of_block = kBackwardThreads / lane.lanes, of_token = groups_of(side.heads, kHeads);
  const auto groups = static_cast<unsigned>(p.tokens) * of_token;  // below 2^31, as the launcher checks
  const float share_of_column = 1.0f / static_cast<float>(p.columns);
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
      angles.turn<kInterleaved>(g);
      float sum[1] = {};
#pragma unroll
      for (int i = 0; i < kElements; ++i) {
        sum[0] += scale_gradient(g.a[i], x.a[i], rstd[n], scale.a[i], share.a[i]);
        sum[0] += scale_gradient(g.b[i], x.b[i], rstd[n], scale.b[i], share.b[i]);
      }
      if (side.dx == nullptr) continue;
      reduce_lanes(sum, lane.lanes);
      const float along = -rstd[n] * (sum[0] * share_of_column);
#pragma unroll
      for (int i = 0; i < kElements; ++i) {
        g.a[i] = fmaf(g.a[i], rstd[n], x.a[i] * along);
        g.b[i] = fmaf(g.b[i], rstd[n], x.b[i] * along);
      }
      if (n < heads) g.store(side.dx + row_offset(row + n, p.columns), lane.slot);
    }
  }
  if (side.shares != nullptr) {
    store_share(share, lane, p.columns, sums, side.shares + row_offset(blockIdx.x, p.columns));
  }
}

template <typename T, typename W, typename C, bool kInterleaved, int kHeads>
__global__ void __launch_bounds__(kBackwardThreads, kResident)
    norm_rope_backward_vectorized(const BackwardPointers<T, W, C> p, const int lanes) {
  __shared__ __align__(16) float sums[kBackwardThreads * kSlot];
  const Lane lane = lane_of<kInterleaved>(lanes, p.columns, p.tables.pairs);
  backward_heads<kInterleaved, kHeads>(p, p.q, lane, sums);
  backward_heads<kInterleaved, kHeads>(p, p.k, lane, sums);
}

}  // namespace qk_norm_rope
}  // namespace kernel_pytorch
