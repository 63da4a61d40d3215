// Kernel 4: a cluster of blocks shares a row that is too long for one block's registers, and reduces sums through
// distributed shared memory (compute capability 9.0 on). Clusters are persistent: they prefetch vectors of the next
// rows to shared memory while they process one. Every row is read once.
#pragma once

#include "3_vectorized.cuh"
#include "kernel_pytorch/cuda/ring.cuh"

namespace kernel_pytorch {
namespace rms_norm {

// Number of slots with which two blocks of a forward with four vectors per thread fit on a multiprocessor.
template <int kVectors, int kWords>
constexpr int kForwardSlots = (kVectors == 4 ? 12 : 24) / kWords;
// Number of 512-thread blocks per multiprocessor: a thread's part of the weight must stay in registers.
template <typename T, typename W, int kVectors>
constexpr int kRingBlocks = kVectors == 4 && sizeof(T) == sizeof(W) ? 2 : 1;

// Reads h for one vector: x, or x + residual, which is rounded, stored, and kept in the slot.
template <bool kResidual, typename Slot, typename T, int N>
__device__ __forceinline__ void read_h(Slot slot, T* target, float (&h)[N]) {
  slot.template read<T, N>(0, h);
  if constexpr (kResidual) {
    float residual[N];
    slot.template read<T, N>(1, residual);
#pragma unroll
    for (int i = 0; i < N; ++i) h[i] += residual[i];
    Packed<T, N> rounded;
    pack(h, rounded);
    unpack(rounded, h);
    store_packed(target, rounded);
    slot.write(0, rounded);
  }
}

template <typename T, typename W, typename Y, int kVectors, bool kResidual>
__global__ void __launch_bounds__(kMostClusterThreads, kRingBlocks<T, W, kVectors>)
    forward_ring(const ForwardPointers<T, W, Y> p) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  constexpr int N = kVectorLength<T>, kWords = kResidual ? 2 : 1, kSlots = kForwardSlots<kVectors, kWords>;
  constexpr int kAhead = kRowsAhead<kSlots, kVectors>;
  using Ring = RowRing<kVectors, kSlots, kWords, kMostClusterThreads>;
  extern __shared__ __align__(kRingAlignment) uint4 slots[];
  __shared__ TeamScratch<true> scratch;
  Team<true> team(scratch);
  const int first = team.first(), stride = team.stride(), step = static_cast<int>(team.teams());
  const int first_row = static_cast<int>(team.index()), rows = static_cast<int>(p.rows);
  const auto column_of = [&](int v) { return (v * stride + first) * N; };
  const auto copy = [&](auto slot, int row, int v) {
    const int column = column_of(v);
    if (column >= p.columns) return;
    const int64_t at = row_offset(row, p.columns) + column;
    slot.template ask<T, N>(0, p.x + at);
    if constexpr (kResidual) slot.template ask<T, N>(1, p.residual + at);
  };
  Ring ring(slots, first_row, step, rows, copy);
  Packed<W, N> weight[kVectors];
  load_weight(p.weight, 0, first, stride, p.columns, weight);
  const auto look = [&](auto ahead, int row) {
    T* const target = p.h + row_offset(row, p.columns);
    float sum = 0.0f;
    ring.template receive<decltype(ahead)::value>([&](auto slot, int v) {
      const int column = column_of(v);
      if (column >= p.columns) return;
      float h[N];
      read_h<kResidual>(slot, target + column, h);
#pragma unroll
      for (int i = 0; i < N; ++i) sum += h[i] * h[i];
    });
    return team.announce(sum, Add{});
  };
  float own = look(Index<0>{}, first_row);
  for (int row = first_row, next; row < rows; row = next) {
    next = row + step;
    const float rstd = rstd_of<kRounded<Y>>(team.gather(own, Add{}), p.columns, p.eps);
    if (kAhead > 0 && next < rows) own = look(Index<kAhead>{}, next);
    if (p.weight_rows > 1) {
      load_weight(p.weight, row_offset(remainder(row, p.weight_rows), p.columns), first, stride, p.columns, weight);
    }
    if (team.leads()) p.rstd[row] = rstd;
    forget_unpacked(weight);
    Y* const y = p.y + row_offset(row, p.columns);
    const auto finish = [&](auto slot, int v) {
      const int column = column_of(v);
      if (column >= p.columns) return;
      float h[N], scale[N];
      slot.template read<T, N>(0, h);
      scale_of(p.weight != nullptr, weight[v], p.offset, scale);
#pragma unroll
      for (int i = 0; i < N; ++i) scale[i] *= h[i] * rstd;
      store_vector<Y, N>(y + column, scale);
    };
    ring.leave(finish, copy);
    if (kAhead == 0 && next < rows) own = look(Index<0>{}, next);
  }
#endif
}

// Number of slots with which two blocks of 256 threads fit on a multiprocessor. A vector has words of h, dy and dh.
template <int kWords>
constexpr int kBackwardSlots = 27 / kWords;

template <typename T, typename Y, bool kAdds>
constexpr int kBackwardWords = 1 + sizeof(Y) / sizeof(T) + kAdds;

// Computes and stores dx for one vector.
template <typename Y, int kDh, bool kAdds, typename Slot, typename T, int N>
__device__ __forceinline__ void write_dx(Slot slot, T* target, float rstd, const float (&scale)[N], float mean) {
  float g[N], x[N];
  slot.template read<Y, N>(1, g);
  slot.template read<T, N>(0, x);
  input_gradient(g, x, rstd, scale, mean);
  if constexpr (kAdds) {
    slot.template read<T, N>(kDh, x);
#pragma unroll
    for (int i = 0; i < N; ++i) g[i] += x[i];
  }
  store_vector<T, N>(target, g);
}

template <typename T, typename W, typename Y, int kVectors, bool kAdds>
__global__ void __launch_bounds__(kMostClusterThreads) backward_ring(const BackwardPointers<T, W, Y> p) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  constexpr int N = kVectorLength<T>, kWords = kBackwardWords<T, Y, kAdds>, kSlots = kBackwardSlots<kWords>;
  constexpr int kDy = 1, kDh = kWords - 1, kAhead = kRowsAhead<kSlots, kVectors>;
  using Ring = RowRing<kVectors, kSlots, kWords>;
  extern __shared__ __align__(kRingAlignment) uint4 slots[];
  __shared__ TeamScratch<true> scratch;
  Team<true> team(scratch);
  const int first = team.first(), stride = team.stride();
  const int part = static_cast<int>(team.index()), parts = static_cast<int>(p.parts), rows = static_cast<int>(p.rows);
  const auto column_of = [&](int v) { return (v * stride + first) * N; };
  const auto copy = [&](auto slot, int row, int v) {
    const int column = column_of(v);
    if (column >= p.columns) return;
    const int64_t at = row_offset(row, p.columns) + column;
    slot.template ask<T, N>(0, p.h + at);
    slot.template ask<Y, N>(kDy, p.dy + at);
    if constexpr (kAdds) slot.template ask<T, N>(kDh, p.dh + at);
  };
  Ring ring(slots, part, parts, rows, copy);
  float scale[kVectors][N];
  load_scales(p, part, first, stride, scale);
  float share[kVectors][N] = {};
  float rstd = 0.0f;  // of the latest row read
  const auto look = [&](auto ahead, int row) {
    rstd = p.rstd[row];
    float sum = 0.0f;
    ring.template receive<decltype(ahead)::value>([&](auto slot, int v) {
      if (column_of(v) >= p.columns) return;
      float g[N], x[N];
      slot.template read<Y, N>(kDy, g);
      slot.template read<T, N>(0, x);
      sum += scale_gradient(g, x, rstd, scale[v], share[v]);
    });
    return p.dx == nullptr ? sum : team.announce(sum, Add{});
  };
  float own = part < rows ? look(Index<0>{}, part) : 0.0f;
  for (int row = part, next; row < rows; row = next) {
    next = row + parts;
    const float of_row = rstd;
    const float mean = p.dx == nullptr ? 0.0f : team.gather(own, Add{}) / static_cast<float>(p.columns);
    if (kAhead > 0 && next < rows) own = look(Index<kAhead>{}, next);
    T* const dx = p.dx + row_offset(row, p.columns);
    const auto finish = [&](auto slot, int v) {
      const int column = column_of(v);
      if (column >= p.columns || p.dx == nullptr) return;
      write_dx<Y, kDh, kAdds>(slot, dx + column, of_row, scale[v], mean);
    };
    ring.leave(finish, copy);
    if (kAhead == 0 && next < rows) own = look(Index<0>{}, next);
  }
  if (p.shares != nullptr) store_share(p.shares, part, p.columns, first, stride, share);
#endif
}

}  // namespace rms_norm
}  // namespace kernel_pytorch
