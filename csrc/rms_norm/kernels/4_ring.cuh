// Version 4: a row too long for one block's registers is shared by a cluster of blocks, whose sums meet in distributed
// shared memory (compute capability 9.0 on). Clusters stay for many rows, and vectors of the next rows are on their way to
// shared memory while one is at work; every row is read once.
#pragma once

#include "3_vectorized.cuh"
#include "kernel_pytorch/cuda/ring.cuh"

namespace kernel_pytorch {
namespace rms_norm {

// Slots such that two blocks of a forward with four vectors a thread share a multiprocessor.
template <int kVectors, int kWords>
constexpr int kForwardSlots = (kVectors == 4 ? 12 : 16) / kWords;
// Backward blocks have half the threads.
template <int kWords>
constexpr int kBackwardSlots = kWords == 2 ? 12 : 8;

// Of 512 threads on a multiprocessor: what a thread has of the weight stays in registers.
template <typename T, typename W, int kVectors>
constexpr int kRingBlocks = kVectors == 4 && sizeof(T) == sizeof(W) ? 2 : 1;

template <typename T, typename W, typename Y, int kVectors, bool kResidual>
__global__ void __launch_bounds__(kMostClusterThreads, kRingBlocks<T, W, kVectors>)
    forward_ring(const ForwardPointers<T, W, Y> p) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  constexpr int N = kVectorLength<T>, kWords = kResidual ? 2 : 1;
  extern __shared__ uint4 slots[];
  __shared__ TeamScratch<true> scratch;
  Team<true> team(scratch);
  const int first = team.first(), stride = team.stride();
  const auto copy = [&](RingSlot slot, int64_t offset, int v) {
    const int column = (v * stride + first) * N;
    if (column >= p.columns) return;
    slot.ask<T, N>(0, p.x + offset + column);
    if constexpr (kResidual) slot.ask<T, N>(1, p.residual + offset + column);
  };
  RowRing<kVectors, kForwardSlots<kVectors, kWords>, kWords> ring(slots, team.index(), team.teams(), p.rows,
                                                                               p.columns, copy);
  Packed<W, N> weight[kVectors];
  load_weight(p.weight, 0, first, stride, p.columns, weight);
  int turn = 0;
  for (int64_t row = team.index(); row < p.rows; row += team.teams(), turn ^= 1) {
    const int64_t offset = row_offset(row, p.columns);
    float sum = 0.0f;
    ring.receive([&](RingSlot slot, int v) {
      const int column = (v * stride + first) * N;
      if (column >= p.columns) return;
      float h[N];
      slot.read<T, N>(0, h);
      if constexpr (kResidual) {
        float residual[N];
        slot.read<T, N>(1, residual);
#pragma unroll
        for (int i = 0; i < N; ++i) h[i] += residual[i];
        Packed<T, N> rounded;
        pack(h, rounded);
        unpack(rounded, h);
        store_packed(p.h + offset + column, rounded);
        slot.write(0, rounded);
      }
#pragma unroll
      for (int i = 0; i < N; ++i) sum += h[i] * h[i];
    });
    if (p.weight_rows > 1) {
      load_weight(p.weight, row_offset(remainder(row, p.weight_rows), p.columns), first, stride, p.columns, weight);
    }
    const float rstd = 1.0f / sqrtf(team.reduce(sum, Add{}, turn) / static_cast<float>(p.columns) + p.eps);
    if (team.leads()) p.rstd[row] = rstd;
    forget_unpacked(weight);
    const auto finish = [&](RingSlot slot, int v) {
      const int column = (v * stride + first) * N;
      if (column >= p.columns) return;
      float h[N], scale[N];
      slot.read<T, N>(0, h);
      scale_of(p.weight != nullptr, weight[v], p.offset, scale);
#pragma unroll
      for (int i = 0; i < N; ++i) scale[i] *= h[i] * rstd;
      store_vector<Y, N>(p.y + offset + column, scale);
    };
    ring.leave(finish, copy);
  }
#endif
}

template <typename T, typename W, typename Y, int kVectors>
__global__ void __launch_bounds__(kMostClusterThreads) backward_ring(const BackwardPointers<T, W, Y> p) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  constexpr int N = kVectorLength<T>, kWords = 1 + sizeof(Y) / sizeof(T);
  extern __shared__ uint4 slots[];
  __shared__ TeamScratch<true> scratch;
  Team<true> team(scratch);
  const int first = team.first(), stride = team.stride();
  const int64_t part = team.index();
  const auto copy = [&](RingSlot slot, int64_t offset, int v) {
    const int column = (v * stride + first) * N;
    if (column >= p.columns) return;
    slot.ask<T, N>(0, p.h + offset + column);
    slot.ask<Y, N>(1, p.dy + offset + column);
  };
  RowRing<kVectors, kBackwardSlots<kWords>, kWords> ring(slots, part, p.parts, p.rows, p.columns, copy);
  float scale[kVectors][N];
  load_scales(p, part, first, stride, scale);
  float share[kVectors][N] = {};
  float next_rstd = part < p.rows ? p.rstd[part] : 0.0f;
  int turn = 0;
  int64_t offset = row_offset(part, p.columns);
  const int64_t offset_step = row_offset(p.parts, p.columns);
  for (int64_t row = part; row < p.rows; row += p.parts, offset += offset_step, turn ^= 1) {
    const float rstd = next_rstd;
    if (row + p.parts < p.rows) next_rstd = p.rstd[row + p.parts];
    float sum = 0.0f;
    ring.receive([&](RingSlot slot, int v) {
      if ((v * stride + first) * N >= p.columns) return;
      float g[N], x[N];
      slot.read<Y, N>(1, g);
      slot.read<T, N>(0, x);
      sum += scale_gradient(g, x, rstd, scale[v], share[v]);
    });
    const float mean = p.dx == nullptr ? 0.0f : team.reduce(sum, Add{}, turn) / static_cast<float>(p.columns);
    const auto finish = [&](RingSlot slot, int v) {
      const int column = (v * stride + first) * N;
      if (column >= p.columns || p.dx == nullptr) return;
      float g[N], x[N];
      slot.read<Y, N>(1, g);
      slot.read<T, N>(0, x);
      input_gradient(g, x, rstd, scale[v], mean);
      if (p.dh != nullptr) add_vector(p.dh + offset + column, g);
      store_vector<T, N>(p.dx + offset + column, g);
    };
    ring.leave(finish, copy);
  }
  if (p.shares != nullptr) store_share<T>(p.shares, part, p.columns, first, stride, share);
#endif
}

}  // namespace rms_norm
}  // namespace kernel_pytorch
