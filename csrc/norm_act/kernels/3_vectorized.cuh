// Kernel 3: 16-byte accesses; the row is read once and stays in registers, packed. Each thread starts all its loads
// before it uses the first result. Rows consist of whole vectors; a block holds several short rows. The backward of
// activations, dropout and parameters of other types is in activated_rows.cuh.
#pragma once

#include "kernel_pytorch/cuda/sum_shares.cuh"
#include "activated_rows.cuh"
#include "row_parts.cuh"
#include "statistics.cuh"

namespace kernel_pytorch {
namespace norm_act {

constexpr int kMostThreads = 512;

// Minimum number of blocks of a forward per multiprocessor.
template <int kVectors, Kind kKind>
constexpr int kForwardBlocks = kVectors == 1 && kKind == Kind::kPlain ? 3 : 2;

// The backward also holds partial sums of both parameters, and g of two vectors if there is an activation.
template <int kVectors, Kind kKind>
constexpr int kMostBackwardThreads = kVectors == 1 ? kFewThreads : kKind == Kind::kPlain ? 512 : 256;
template <int kVectors, Kind kKind>
constexpr int kBackwardBlocks = kVectors == 1 ? (kKind == Kind::kPlain ? 6 : kKind == Kind::kTyped ? 5 : 4)
                                              : (kKind == Kind::kTyped ? 2 : 1);

// Bytes of dynamic shared memory per warp.
template <typename T, int kVectors, Kind kKind>
constexpr int kBackwardBytes = ActivatedRows<T, kVectors, kKind>::kBytes;
template <typename T, int kVectors>
constexpr int kBackwardBytes<T, kVectors, Kind::kPlain> = 0;

// Loads this thread's vectors of a tensor, whose dtype may be narrower than T if T is float32 and `kKind` is kAny.
template <Kind kKind, typename T, int kVectors, int N>
__device__ __forceinline__ void load_vectors(const Input& source, int64_t offset, int first, int stride, int columns,
                                             Packed<T, N> (&packed)[kVectors]) {
  const auto for_each = [&](const auto& load) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int column = (v * stride + first) * N;
      if (column < columns) load(offset + column, packed[v]);
    }
  };
  const auto as_it_is = [&](int64_t at, Packed<T, N>& vector) { load_packed(static_cast<const T*>(source.data) + at, vector); };
  if constexpr (kKind != Kind::kAny || sizeof(T) == 2) {
    for_each(as_it_is);
  } else if (source.dtype == DType::kFloat32) {
    for_each(as_it_is);
  } else {
    for_each([&](int64_t at, Packed<T, N>& vector) {
      float values[N];
      load_as<N>(source, at, values);
      pack(values, vector);
    });
  }
}

// A team beyond the last row loads nothing, but its threads take part in the reductions.
template <typename T, int kVectors, Kind kKind>
__global__ void __launch_bounds__(kMostThreads, kForwardBlocks<kVectors, kKind>)
    forward_vectorized(const ForwardPointers<T> p) {
  constexpr int N = kVectorLength<T>;
  constexpr bool kPlain = kKind == Kind::kPlain;
  __shared__ TeamScratch<false> scratch;
  Team<false> team(scratch);
  const int64_t row = team.index() * blockDim.y + threadIdx.y;
  const int columns = row < p.rows ? p.columns : 0;
  const int64_t offset = row_offset(row, p.columns);
  const int first = team.first(), stride = team.stride();
  const DropoutRow dropout = dropout_row(kPlain ? DeviceDropout{} : p.dropout, row, p.columns);
  const auto column_of = [&](int v) { return (v * stride + first) * N; };
  Packed<T, N> h[kVectors];
  load_vectors<kKind>(p.x, offset, first, stride, columns, h);
  if (p.residual.data != nullptr) {
    Packed<T, N> residual[kVectors];
    load_vectors<kKind>(p.residual, offset, first, stride, columns, residual);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (column_of(v) < columns) add_residual<kPlain>(p, dropout, offset, column_of(v), residual[v], h[v]);
    }
  }
  constexpr Held kHeld = kPlain && kVectors <= 2 ? Held::kAll : Held::kNone;
  const Parameters<T, kVectors, kKind, kHeld> parameters(p.weight, p.bias, first, stride, columns);
  const auto for_each = [&](const auto& body) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (column_of(v) >= columns) continue;
      float values[N];
      unpack(h[v], values);
#pragma unroll
      for (int i = 0; i < N; ++i) body(values[i]);
    }
  };
  const bool centred = p.mean != nullptr;
  const float2 own = announce_moments<!kRounded<T>, kVectors, N>(team, centred, columns, for_each, for_each);
  const Statistics found = gather_moments<!kRounded<T>, kVectors, N>(team, own, centred, p.columns, p.eps);
  if constexpr (kVectors >= 4) forget_unpacked(h);
  if (team.leads() && columns > 0) store_statistics(p, row, found);
  const auto finish_vector = [&](int v, const Packed<T, N>& of_row) {
    if (column_of(v) >= columns) return;
    float z[N];
    unpack(of_row, z);
    store_y<kKind>(p, parameters, dropout, offset, column_of(v), v, found, z);
  };
  if constexpr (kPlain) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) finish_vector(v, h[v]);
  } else {
    // A loop that is not unrolled: the instruction cache would not hold the activations of all vectors.
#pragma unroll 1
    for (int v = 0; v < kVectors; ++v) {
      finish_vector(v, h[0]);
#pragma unroll
      for (int i = 1; i < kVectors; ++i) h[i - 1] = h[i];
    }
  }
}

// This thread's part of one row, while it is loaded or processed.
template <typename T, int kVectors>
struct IncomingRow {
  static constexpr int N = kVectorLength<T>;
  Packed<T, N> dy[kVectors];
  Packed<T, N> h[kVectors];
  float mean;
  float rstd;

  __device__ __forceinline__ void load(const BackwardPointers<T>& p, int64_t row, int first, int stride) {
    if (row >= p.rows) return;
    const int64_t offset = row_offset(row, p.columns);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int column = (v * stride + first) * N;
      if (column >= p.columns) continue;
      load_packed(p.dy + offset + column, dy[v]);
      load_packed(p.h + offset + column, h[v]);
    }
    mean = p.mean != nullptr ? p.mean[row] : 0.0f;
    rstd = p.rstd[row];
  }
};

// Gradients of the rows of one part, without activation or dropout; prefetches the next row.
template <typename T, int kVectors>
__device__ __forceinline__ void backward_rows(const BackwardPointers<T>& p, Team<false>& team,
                                              ParameterShares<kVectors, kVectorLength<T>>& shares) {
  constexpr int N = kVectorLength<T>;
  const int first = team.first(), stride = team.stride();
  const bool needs_rows = p.dx.data != nullptr || p.dresidual.data != nullptr, centred = p.mean != nullptr;
  const T* const dh = needs_rows ? p.dh : nullptr;
  const int64_t part = team.index(), step = p.parts * blockDim.y;
  const auto turns = static_cast<int>(quotient(p.rows - part + step - 1, step));  // iterations of the block
  int64_t row = part + threadIdx.y * p.parts;
  IncomingRow<T, kVectors> next = {};
  next.load(p, row, first, stride);
  Parameters<T, kVectors, Kind::kPlain, Held::kAll, false> parameters(p.weight, p.bias, first, stride, p.columns);
  for (int turn = 0; turn < turns; ++turn, row += step) {
    IncomingRow<T, kVectors> now = next;
    const int columns = row < p.rows ? p.columns : 0;
    const int64_t offset = row_offset(row, p.columns);
    Packed<T, N> added[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int column = (v * stride + first) * N;
      if (dh != nullptr && column < columns) load_packed(dh + offset + column, added[v]);
    }
    if (turn + 1 < turns) next.load(p, row + step, first, stride);
    constexpr DropoutRow kNoDropout = {};
    parameters.forget();
    float g[kVectors][N];
    float2 sums = {0.0f, 0.0f};
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int column = (v * stride + first) * N;
      if (column >= columns) continue;
      float x_hat[N];
      unpack(now.h[v], x_hat);
      unpack(now.dy[v], g[v]);
      normalize<T>(now.mean, now.rstd, x_hat);
      make_g<Kind::kPlain>(p, parameters, kNoDropout, column, v, x_hat, g[v], shares, sums);
    }
    if (!needs_rows) continue;
    sums = team.reduce(sums);
    forget_unpacked(now.h);
    const InputGradient<T> gradient(sums, now.mean, now.rstd, centred, p.columns);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int column = (v * stride + first) * N;
      if (column >= columns) continue;
      float h[N];
      unpack(now.h[v], h);
      gradient.apply(h, g[v]);
      if (dh != nullptr) {
        unpack(added[v], h);
#pragma unroll
        for (int i = 0; i < N; ++i) g[v][i] += h[i];
      }
      store_row<Kind::kPlain>(p, kNoDropout, offset, column, g[v]);
    }
  }
}

template <typename T, int kVectors, Kind kKind>
__global__ void __launch_bounds__(kMostBackwardThreads<kVectors, kKind>, kBackwardBlocks<kVectors, kKind>)
    backward_vectorized(const BackwardPointers<T> p) {
  constexpr int N = kVectorLength<T>;
  __shared__ TeamScratch<false> scratch;
  __shared__ float sums[kVectors == 1 ? kFewThreads * N : 1];
  Team<false> team(scratch);
  ParameterShares<kVectors, N> shares;
  if constexpr (kKind == Kind::kPlain) {
    backward_rows<T, kVectors>(p, team, shares);
  } else {
    using Rows = ActivatedRows<T, kVectors, kKind>;
    extern __shared__ __align__(kRingAlignment) uint4 aside[];
    __shared__ typename Rows::Scratch of_rows;
    Rows(p, team, aside, of_rows).run(shares);
  }
  const auto store = [&](float* target, float(&share)[kVectors][N]) {
    if (target == nullptr) return;
    if constexpr (kVectors == 1) {
      if (blockDim.y > 1) {
        __syncthreads();  // all threads have read the sums of the other parameter
        add_teams(share, sums);
      }
    }
    if (threadIdx.y == 0) store_share(target, blockIdx.x, p.columns, team.first(), team.stride(), share);
  };
  store(p.weight_shares, shares.weight);
  store(p.bias_shares, shares.bias);
}

}  // namespace norm_act
}  // namespace kernel_pytorch
