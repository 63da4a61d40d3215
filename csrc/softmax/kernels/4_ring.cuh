// Kernel 4: a cluster of blocks shares a row that is too long for one block's registers, and reduces through
// distributed shared memory (compute capability 9.0 on). Clusters are persistent: they prefetch vectors of the next
// rows to shared memory while they process one. Every row is read once.
#pragma once

#include "3_vectorized.cuh"
#include "kernel_pytorch/cuda/ring.cuh"

namespace kernel_pytorch {
namespace softmax {

// Number of slots with which two blocks with four vectors per thread fit on a multiprocessor.
template <int kVectors, int kWords>
constexpr int kSlots = (kVectors == 4 ? 12 : 24) / kWords;

template <int kVectors>
constexpr int kRingBlocks = kVectors == 4 ? 2 : 1;  // per multiprocessor

// Converts exponentials relative to their own maximum to those relative to the row's maximum.
template <int N>
__device__ __forceinline__ void rebase(float (&z)[N], float own_most, float base) {
  if (own_most == base) return;
  const float under = expf(own_most - base);
#pragma unroll
  for (int i = 0; i < N; ++i) z[i] *= under;
}

template <typename T, typename M, typename Y, int kVectors>
__global__ void __launch_bounds__(kMostClusterThreads, kRingBlocks<kVectors>)
    forward_ring(const ForwardPointers<T, M, Y> p) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  using Ring = RowRing<kVectors, kSlots<kVectors, 1>, 1, kMostClusterThreads>;
  constexpr int N = kVectorLength<T>, kAhead = kRowsAhead<kSlots<kVectors, 1>, kVectors>;
  extern __shared__ __align__(kRingAlignment) uint4 slots[];
  constexpr bool kInPlace = sizeof(T) == sizeof(float);  // exponentials replace their scores
  __shared__ TeamScratch<true> scratch;
  Team<true> team(scratch);
  const int first = team.first(), stride = team.stride(), step = static_cast<int>(team.teams());
  const int rows = static_cast<int>(p.rows);
  const auto column_of = [&](int v) { return (v * stride + first) * N; };
  const auto copy = [&](auto slot, int row, int v) {
    const int column = column_of(v);
    if (column < p.columns) slot.template ask<T, N>(0, p.x + (row_offset(row, p.columns) + column));
  };
  Ring ring(slots, static_cast<int>(team.index()), step, rows, copy);
  const auto scores_of = [&](int row) { return Scores<T, M, Y>(mask_of(p, row), p.broadcast.column_step, p.scale); };
  const auto exponential = [&](float apart) { return Scores<T, M, Y>(p.mask, 0, p.scale).exponential(apart); };
  float latest[kVectors];  // maximum of each vector of the latest row read, whose exponentials are in the slots
  const auto look = [&](auto ahead, int row) {
    const Scores<T, M, Y> scores = scores_of(row);
    OnlineSum own;
    ring.template receive<decltype(ahead)::value>([&](auto slot, int v) {
      const int column = column_of(v);
      if (column >= p.columns) return;
      Packed<T, N> x;
      slot.template read<T, N>(0, x);
      float z[N];
      scores.read(x, column, z);
      if constexpr (kInPlace) {
        const OnlineSum of_vector = exponentials_of<false>(z);
        latest[v] = of_vector.most;
        own = combined(own, of_vector);
        pack(z, x);
        slot.write(0, x);
      } else {
        scores.add(z, own);
      }
    });
    team.announce(own, exponential);
  };
  look(Index<0>{}, static_cast<int>(team.index()));
  for (int row = static_cast<int>(team.index()), next; row < rows; row = next) {
    next = row + step;
    const OnlineSum all = team.gather(exponential);
    float most[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) most[v] = latest[v];
    if (kAhead > 0 && next < rows) look(Index<kAhead>{}, next);
    const Scores<T, M, Y> scores = scores_of(row);
    const float base = base_of(all.most, scores.masked()), share = share_of_sum(all.sum);
    const float logarithm = all.sum == 0.0f ? 0.0f : log2f(all.sum);
    Y* const y = p.y + row_offset(row, p.columns);
    const auto finish = [&](auto slot, int v) {
      const int column = column_of(v);
      if (column >= p.columns) return;
      Packed<T, N> x;
      slot.template read<T, N>(0, x);
      float z[N];
      if constexpr (kInPlace) {
        unpack(x, z);
        rebase(z, most[v], base);
      } else {
        scores.read(x, column, z);
#pragma unroll
        for (int i = 0; i < N; ++i) {
          z[i] = kRounded<Y> ? scores.exponential(z[i] - base, logarithm) : scores.exponential(z[i] - base);
        }
      }
      if constexpr (!kRounded<Y>) {
#pragma unroll
        for (int i = 0; i < N; ++i) z[i] = divided(z[i], all.sum, share);
      }
      store_vector<Y, N>(y + column, z);
    };
    ring.leave(finish, copy);
    if (kAhead == 0 && next < rows) look(Index<0>{}, next);
  }
#endif
}

// The two sums of a row for its gradients (softmax.h). The correction of dot takes a second pass over the row; for
// results with 16 bits, it is computed from the error of sum(y).
template <typename T, int kVectors>
__global__ void __launch_bounds__(kMostClusterThreads, kRingBlocks<kVectors>)
    backward_ring(const BackwardPointers<T> p) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  using Ring = RowRing<kVectors, kSlots<kVectors, 2>, 2, kMostClusterThreads>;
  constexpr int N = kVectorLength<T>;
  extern __shared__ __align__(kRingAlignment) uint4 slots[];
  __shared__ TeamScratch<true> scratch;
  Team<true> team(scratch);
  const int first = team.first(), stride = team.stride(), step = static_cast<int>(team.teams());
  const int rows = static_cast<int>(p.rows);
  const auto copy = [&](auto slot, int row, int v) {
    const int column = (v * stride + first) * N;
    if (column >= p.columns) return;
    const int64_t at = row_offset(row, p.columns) + column;
    slot.template ask<T, N>(0, p.dy + at);
    slot.template ask<T, N>(1, p.y + at);
  };
  // Calls `use(dy, y, column)` if the vector exists.
  const auto with = [&](const auto& use) {
    return [&](auto slot, int v) {
      const int column = (v * stride + first) * N;
      if (column >= p.columns) return;
      float dy[N], y[N];
      slot.template read<T, N>(0, dy);
      slot.template read<T, N>(1, y);
      use(dy, y, column);
    };
  };
  Ring ring(slots, static_cast<int>(team.index()), step, rows, copy);
  for (int row = static_cast<int>(team.index()); row < rows; row += step) {
    float2 found = {0.0f, 0.0f};
    ring.receive(with([&](const float (&dy)[N], const float (&y)[N], int) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        found.x += dy[i] * y[i];
        found.y += y[i];
      }
    }));
    float dot, rest;
    if constexpr (kRounded<T>) {
      found = team.reduce(found);
      dot = found.x;
      rest = dot - dot * found.y;
    } else {
      dot = team.reduce(found.x, Add{});
      found.x = 0.0f;
      ring.walk(with([&](const float (&dy)[N], const float (&y)[N], int) {
#pragma unroll
        for (int i = 0; i < N; ++i) found.x += (dy[i] - dot) * y[i];
      }));
      rest = team.reduce(found.x, Add{});
    }
    if (p.dots != nullptr && team.leads()) p.dots[row] = dot + rest;
    T* const dx = p.dx + row_offset(row, p.columns);
    ring.leave(with([&](float (&dy)[N], const float (&y)[N], int column) {
      if (p.dx == nullptr) return;
#pragma unroll
      for (int i = 0; i < N; ++i) dy[i] = score_gradient(dy[i], y[i], dot, rest) * p.scale;
      store_vector<T, N>(dx + column, dy);
    }), copy);
  }
#endif
}

}  // namespace softmax
}  // namespace kernel_pytorch
