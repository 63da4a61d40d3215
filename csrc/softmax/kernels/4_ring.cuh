// Version 4: a row too long for one block's registers is shared by a cluster of blocks, and what they reduce meets in
// distributed shared memory (compute capability 9.0 on). Clusters stay for many rows, and vectors of the next rows are on
// their way to shared memory while one is at work; every row is read once.
#pragma once

#include "3_vectorized.cuh"
#include "kernel_pytorch/cuda/ring.cuh"

namespace kernel_pytorch {
namespace softmax {

// Slots such that two blocks with four vectors a thread share a multiprocessor.
template <int kVectors, int kWords>
constexpr int kSlots = (kVectors == 4 ? 12 : 24) / kWords;

template <int kVectors>
constexpr int kRingBlocks = kVectors == 4 ? 2 : 1;  // on a multiprocessor

// The share of each of a few scores, or, where `kExponentials`, of exponentials under their own maximum.
template <bool kExponentials, bool kHalf, int N>
__device__ __forceinline__ void to_shares(float (&z)[N], float own_most, float base, float sum, float share) {
  if constexpr (kExponentials) {
    const float under = own_most == base ? 1.0f : expf(own_most - base);
#pragma unroll
    for (int i = 0; i < N; ++i) z[i] *= under;
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) z[i] = exponential<kHalf>(z[i] - base);
  }
#pragma unroll
  for (int i = 0; i < N; ++i) z[i] = kHalf ? z[i] * share : divided(z[i], sum, share);
}

template <typename T, typename M, typename Y, int kVectors>
__global__ void __launch_bounds__(kMostClusterThreads, kRingBlocks<kVectors>)
    forward_ring(const ForwardPointers<T, M, Y> p) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  constexpr int N = kVectorLength<T>, kAhead = kRowsAhead<kSlots<kVectors, 1>, kVectors>;
  extern __shared__ uint4 slots[];
  constexpr bool kInPlace = sizeof(T) == sizeof(float);  // an exponential goes where its score was
  __shared__ TeamScratch<true> scratch;
  Team<true> team(scratch);
  const int first = team.first(), stride = team.stride();
  const auto column_of = [&](int v) { return (v * stride + first) * N; };
  const auto copy = [&](RingSlot slot, int64_t offset, int v) {
    const int column = column_of(v);
    if (column < p.columns) slot.ask<T, N>(0, p.x + offset + column);
  };
  RowRing<kVectors, kSlots<kVectors, 1>, 1> ring(slots, team.index(), team.teams(), p.rows, p.columns, copy);
  const auto scores = [&](RingSlot slot, const M* mask, int column, float(&z)[N]) {
    slot.read<T, N>(0, z);
    to_scores<M, N>(mask, column, p.broadcast.column_step, p.scale, z);
  };
  float latest[kVectors];  // the maximum of each vector that was looked at last, whose exponentials are in its place
  const auto look = [&](auto ahead, int64_t row, int turn) {
    const M* const mask = mask_of(p, row);
    OnlineSum own;
    ring.template receive<decltype(ahead)::value>([&](RingSlot slot, int v) {
      const int column = column_of(v);
      if (column >= p.columns) return;
      float z[N];
      scores(slot, mask, column, z);
      if constexpr (kInPlace) {
        const OnlineSum of_vector = exponentials_of<kRounded<Y>>(z);
        latest[v] = of_vector.most;
        own = combined(own, of_vector);
        Packed<float, N> kept;
        pack(z, kept);
        slot.write(0, kept);
      } else {
        own.add_all<kRounded<Y>>(z);
      }
    });
    team.announce(own, turn);
  };
  look(Index<0>{}, team.index(), 0);
  int turn = 0;
  for (int64_t row = team.index(), next; row < p.rows; row = next, turn ^= 1) {
    next = row + team.teams();
    const OnlineSum all = team.gather(turn);
    float most[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) most[v] = latest[v];
    if (kAhead > 0 && next < p.rows) look(Index<kAhead>{}, next, turn ^ 1);
    const M* const mask = mask_of(p, row);
    const float base = base_of(all.most, mask != nullptr), share = share_of_sum(all.sum);
    const auto finish = [&](RingSlot slot, int v) {
      const int column = column_of(v);
      if (column >= p.columns) return;
      float z[N];
      if constexpr (kInPlace) {
        slot.read<float, N>(0, z);
      } else {
        scores(slot, mask, column, z);
      }
      to_shares<kInPlace, kRounded<Y>>(z, most[v], base, all.sum, share);
      store_vector<Y, N>(p.y + row_offset(row, p.columns) + column, z);
    };
    ring.leave(finish, copy);
    if (kAhead == 0 && next < p.rows) look(Index<0>{}, next, turn ^ 1);
  }
#endif
}

template <typename T, int kVectors>
__global__ void __launch_bounds__(kMostClusterThreads, kRingBlocks<kVectors>)
    backward_ring(const BackwardPointers<T> p) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  constexpr int N = kVectorLength<T>;
  extern __shared__ uint4 slots[];
  __shared__ TeamScratch<true> scratch;
  Team<true> team(scratch);
  const int first = team.first(), stride = team.stride();
  const auto copy = [&](RingSlot slot, int64_t offset, int v) {
    const int column = (v * stride + first) * N;
    if (column >= p.columns) return;
    slot.ask<T, N>(0, p.dy + offset + column);
    slot.ask<T, N>(1, p.y + offset + column);
  };
  RowRing<kVectors, kSlots<kVectors, 2>, 2> ring(slots, team.index(), team.teams(), p.rows, p.columns, copy);
  for (int64_t row = team.index(); row < p.rows; row += team.teams()) {
    float found = 0.0f;
    // `use(dy, y, column)` of a vector that is there.
    const auto with = [&](const auto& use) {
      return [&](RingSlot slot, int v) {
        const int column = (v * stride + first) * N;
        if (column >= p.columns) return;
        float dy[N], y[N];
        slot.read<T, N>(0, dy);
        slot.read<T, N>(1, y);
        use(dy, y, column);
      };
    };
    ring.receive(with([&](const float (&dy)[N], const float (&y)[N], int) {
#pragma unroll
      for (int i = 0; i < N; ++i) found += dy[i] * y[i];
    }));
    const float dot = team.reduce(found, Add{}, 0);
    found = 0.0f;
    ring.walk(with([&](const float (&dy)[N], const float (&y)[N], int) {
#pragma unroll
      for (int i = 0; i < N; ++i) found += (dy[i] - dot) * y[i];
    }));
    const float rest = team.reduce(found, Add{}, 1);  // softmax.h
    if (p.dots != nullptr && team.leads()) p.dots[row] = dot + rest;
    ring.leave(with([&](float (&dy)[N], const float (&y)[N], int column) {
      if (p.dx == nullptr) return;
#pragma unroll
      for (int i = 0; i < N; ++i) dy[i] = score_gradient(dy[i], y[i], dot, rest) * p.scale;
      store_vector<T, N>(p.dx + row_offset(row, p.columns) + column, dy);
    }), copy);
  }
#endif
}

}  // namespace softmax
}  // namespace kernel_pytorch
