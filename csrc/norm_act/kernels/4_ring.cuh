// Kernel 4: a cluster of blocks shares a row that is too long for one block's registers, and reduces sums through
// distributed shared memory (compute capability 9.0 on). Clusters are persistent: they prefetch vectors of the next
// rows to shared memory, and reduce the next row while they store one. Every row is read once.
#pragma once

#include "3_vectorized.cuh"
#include "kernel_pytorch/cuda/ring.cuh"

namespace kernel_pytorch {
namespace norm_act {

// Number of slots with which two blocks of a forward with four vectors per thread fit on a multiprocessor.
template <int kVectors, int kWords>
constexpr int kForwardSlots = (kVectors == 4 ? 12 : 24) / kWords;

template <int kVectors>
constexpr int kRingBlocks = kVectors == 4 ? 2 : 1;  // blocks of 512 threads per multiprocessor

// Reads h for one vector: x, or the sum with the residual, which is stored and kept in the slot.
template <bool kResidual, bool kPlain, typename T, typename Slot, int N>
__device__ __forceinline__ void read_h(const ForwardPointers<T>& p, const DropoutRow& dropout, Slot slot, int64_t offset,
                                       int column, Packed<T, N>& h) {
  slot.template read<T, N>(0, h);
  if constexpr (kResidual) {
    Packed<T, N> residual;
    slot.template read<T, N>(1, residual);
    add_residual<kPlain>(p, dropout, offset, column, residual, h);
    slot.write(0, h);
  }
}

// x, residual, h and y must all have type T: mixed dtypes are not supported.
template <typename T, int kVectors, bool kResidual, Kind kKind>
__global__ void __launch_bounds__(kMostClusterThreads, kRingBlocks<kVectors>) forward_ring(const ForwardPointers<T> p) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  constexpr int N = kVectorLength<T>, kWords = kResidual ? 2 : 1, kSlots = kForwardSlots<kVectors, kWords>;
  constexpr int kAhead = kRowsAhead<kSlots, kVectors>;
  constexpr bool kPlain = kKind == Kind::kPlain;
  using Ring = RowRing<kVectors, kSlots, kWords, kMostClusterThreads>;
  extern __shared__ __align__(kRingAlignment) uint4 slots[];
  __shared__ TeamScratch<true> scratch;
  Team<true> team(scratch);
  const int first = team.first(), stride = team.stride(), step = static_cast<int>(team.teams());
  const int first_row = static_cast<int>(team.index()), rows = static_cast<int>(p.rows);
  const bool centred = p.mean != nullptr;
  const auto column_of = [&](int v) { return (v * stride + first) * N; };
  const auto copy = [&](auto slot, int row, int v) {
    const int column = column_of(v);
    if (column >= p.columns) return;
    const int64_t at = row_offset(row, p.columns) + column;
    slot.template ask<T, N>(0, static_cast<const T*>(p.x.data) + at);
    if constexpr (kResidual) slot.template ask<T, N>(1, static_cast<const T*>(p.residual.data) + at);
  };
  Ring ring(slots, first_row, step, rows, copy);
  Parameters<T, kVectors, kKind, Held::kNext> parameters(p.weight, p.bias, first, stride, p.columns);
  const auto look = [&](auto ahead, int row) {
    constexpr int kRow = decltype(ahead)::value;
    const int64_t offset = row_offset(row, p.columns);
    const DropoutRow dropout = dropout_row(kPlain ? DeviceDropout{} : p.dropout, row, p.columns);
    const auto elements = [&](Packed<T, N>& h, const auto& body) {
      float values[N];
      unpack(h, values);
#pragma unroll
      for (int i = 0; i < N; ++i) body(values[i]);
    };
    const auto incoming = [&](const auto& body) {
      ring.template receive<kRow>([&](auto slot, int v) {
        if (column_of(v) >= p.columns) return;
        Packed<T, N> h;
        read_h<kResidual, kPlain>(p, dropout, slot, offset, column_of(v), h);
        elements(h, body);
      });
    };
    const auto again = [&](const auto& body) {
      ring.template walk<kRow>([&](auto slot, int v) {
        if (column_of(v) >= p.columns) return;
        Packed<T, N> h;
        slot.template read<T, N>(0, h);
        elements(h, body);
      });
    };
    return announce_moments<!kRounded<T>, kVectors, N>(team, centred, p.columns, incoming, again);
  };
  float2 own = look(Index<0>{}, first_row);
  for (int row = first_row, next; row < rows; row = next) {
    next = row + step;
    const Statistics found = gather_moments<!kRounded<T>, kVectors, N>(team, own, centred, p.columns, p.eps);
    if (kAhead > 0 && next < rows) own = look(Index<kAhead>{}, next);
    if (team.leads()) store_statistics(p, row, found);
    const int64_t offset = row_offset(row, p.columns);
    const DropoutRow dropout = dropout_row(kPlain ? DeviceDropout{} : p.dropout, row, p.columns);
    parameters.expect(column_of(0), p.columns);
    const auto write = [&](auto slot, int v) {
      if (column_of(v) >= p.columns) return;
      float z[N];
      slot.template read<T, N>(0, z);
      store_y<kKind>(p, parameters, dropout, offset, column_of(v), v, found, z);
      if (v + 1 < kVectors) parameters.expect(column_of(v + 1), p.columns);
    };
    ring.leave(write, copy);
    if (kAhead == 0 && next < rows) own = look(Index<0>{}, next);
  }
#endif
}

constexpr int kDy = 1, kDh = 2;  // 16-byte words of a vector: h, dy, dh
template <bool kAdds>
constexpr int kBackwardWords = kAdds ? 3 : 2;
template <bool kAdds>
constexpr int kBackwardSlots = 27 / kBackwardWords<kAdds>;  // two blocks of 256 threads fit on a multiprocessor

// Computes g for one vector of the row that is read, and adds to the partial sums and to the sums of the row.
template <Kind kKind, typename T, typename Parameters, typename Slot, int kVectors, int N>
__device__ __forceinline__ void read_g(const BackwardPointers<T>& p, const Parameters& parameters, const DropoutRow& dropout,
                                       Slot slot, int column, int v, float mean, float rstd, float (&g)[N],
                                       ParameterShares<kVectors, N>& shares, float2& sums) {
  float x_hat[N];
  slot.template read<T, N>(0, x_hat);
  slot.template read<T, N>(kDy, g);
  normalize<T>(mean, rstd, x_hat);
  make_g<kKind>(p, parameters, dropout, column, v, x_hat, g, shares, sums);
}

// Computes and stores the gradients of one vector, from g.
template <Kind kKind, bool kAdds, typename T, typename Slot, int N>
__device__ __forceinline__ void write_gradients(const BackwardPointers<T>& p, const DropoutRow& dropout, Slot slot,
                                                int64_t offset, int column, const InputGradient<T>& gradient,
                                                float (&g)[N]) {
  float h[N];
  slot.template read<T, N>(0, h);
  gradient.apply(h, g);
  if constexpr (kAdds) {
    slot.template read<T, N>(kDh, h);
#pragma unroll
    for (int i = 0; i < N; ++i) g[i] += h[i];
  }
  store_row<kKind>(p, dropout, offset, column, g);
}

// With an activation or dropout, registers keep g of one row, and the next row is not processed meanwhile.
template <typename T, int kVectors, Kind kKind, bool kAdds>
__global__ void __launch_bounds__(kMostClusterThreads) backward_ring(const BackwardPointers<T> p) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  constexpr int N = kVectorLength<T>;
  constexpr bool kPlain = kKind == Kind::kPlain;
  constexpr int kAhead = kPlain ? kRowsAhead<kBackwardSlots<kAdds>, kVectors> : 0;
  using Ring = RowRing<kVectors, kBackwardSlots<kAdds>, kBackwardWords<kAdds>>;
  extern __shared__ __align__(kRingAlignment) uint4 slots[];
  __shared__ TeamScratch<true> scratch;
  Team<true> team(scratch);
  const int first = team.first(), stride = team.stride();
  const bool needs_rows = p.dx.data != nullptr || p.dresidual.data != nullptr, centred = p.mean != nullptr;
  const int part = static_cast<int>(team.index()), parts = static_cast<int>(p.parts), rows = static_cast<int>(p.rows);
  const auto column_of = [&](int v) { return (v * stride + first) * N; };
  const auto copy = [&](auto slot, int row, int v) {
    const int column = column_of(v);
    if (column >= p.columns) return;
    const int64_t at = row_offset(row, p.columns) + column;
    slot.template ask<T, N>(0, p.h + at);
    slot.template ask<T, N>(kDy, p.dy + at);
    if constexpr (kAdds) slot.template ask<T, N>(kDh, p.dh + at);
  };
  Ring ring(slots, part, parts, rows, copy);
  Parameters<T, kVectors, kKind, Held::kAll, !kPlain> parameters(p.weight, p.bias, first, stride, p.columns);
  ParameterShares<kVectors, N> shares;
  float rstd = 0.0f, mean = 0.0f;  // of the latest row read
  float kept[kPlain ? 1 : kVectors][N];
  const auto look = [&](auto ahead, int row) {
    rstd = p.rstd[row];
    if (centred) mean = p.mean[row];
    const DropoutRow dropout = dropout_row(kPlain ? DeviceDropout{} : p.dropout, row, p.columns);
    parameters.forget();
    float2 sums = {0.0f, 0.0f};
    ring.template receive<decltype(ahead)::value>([&](auto slot, int v) {
      if (column_of(v) >= p.columns) return;
      float(&g)[N] = kept[kPlain ? 0 : v];
      read_g<kKind>(p, parameters, dropout, slot, column_of(v), v, mean, rstd, g, shares, sums);
    });
    return needs_rows ? team.announce(sums) : sums;
  };
  float2 own = part < rows ? look(Index<0>{}, part) : float2{0.0f, 0.0f};
  for (int row = part, next; row < rows; row = next) {
    next = row + parts;
    const float2 sums = needs_rows ? team.gather(own) : own;
    const InputGradient<T> gradient(sums, mean, rstd, centred, p.columns);
    if (kAhead > 0 && next < rows) own = look(Index<kAhead>{}, next);
    const int64_t offset = row_offset(row, p.columns);
    const DropoutRow dropout = dropout_row(kPlain ? DeviceDropout{} : p.dropout, row, p.columns);
    parameters.forget();
    const auto write = [&](auto slot, int v) {
      if (column_of(v) >= p.columns || !needs_rows) return;
      float(&g)[N] = kept[kPlain ? 0 : v];
      if constexpr (kPlain) {
        slot.template read<T, N>(kDy, g);
        parameters.scale(v, column_of(v), g);
      }
      write_gradients<kKind, kAdds>(p, dropout, slot, offset, column_of(v), gradient, g);
    };
    ring.leave(write, copy);
    if (kAhead == 0 && next < rows) own = look(Index<0>{}, next);
  }
  if (p.weight_shares != nullptr) store_share(p.weight_shares, part, p.columns, first, stride, shares.weight);
  if (p.bias_shares != nullptr) store_share(p.bias_shares, part, p.columns, first, stride, shares.bias);
#endif
}

}  // namespace norm_act
}  // namespace kernel_pytorch
