// QK-norm and rotary position embedding on CUDA: selection and launch of kernels.
//
//     kernels/1_naive.cuh       one thread per head
//     kernels/2_warp.cuh        one warp per head, in the backward one block; any length and alignment
//     kernels/3_vectorized.cuh  16-byte accesses, a head stays in registers: up to 512 columns

#include <type_traits>

#include "kernel_pytorch/cuda/launch.cuh"
#include "kernel_pytorch/cuda/sum_shares.cuh"
#include "kernels/1_naive.cuh"
#include "kernels/2_warp.cuh"
#include "kernels/3_vectorized.cuh"
#include "qk_norm_rope.h"

namespace kernel_pytorch {
namespace qk_norm_rope {

namespace {

template <typename C>
Tables<C> tables_of(const Rotation& rotation) {
  return {static_cast<const C*>(rotation.cos.data), static_cast<const C*>(rotation.sin.data), rotation.rows,
          static_cast<int>(rotation.pairs), rotation.transposed ? -1.0f : 1.0f};
}

bool is_aligned(const void* address) { return reinterpret_cast<uint64_t>(address) % 16 == 0; }

bool is_aligned(HeadStrides strides) { return strides.token % kElements == 0 && strides.head % kElements == 0; }

// Whether a head consists of slots, fits in a warp, and its pairs consist of aligned vectors.
template <typename C>
bool is_vectorizable(const Tables<C>& tables, int columns) {
  return columns % kSlot == 0 && columns <= kSlot * kWarp && tables.pairs % kElements == 0 &&
         is_aligned(tables.cos) && is_aligned(tables.sin);
}

// Number of threads that share a head.
int lanes_for(int columns) {
  int lanes = 1;
  while (lanes * kSlot < columns) lanes *= 2;
  return lanes;
}

template <typename T, typename W>
ForwardHeads<T, W> heads_of(const ForwardSide& side) {
  return {static_cast<const T*>(side.x.data), static_cast<const W*>(side.weight.data), static_cast<T*>(side.y.data),
          static_cast<float*>(side.rstd.data), side.strides, static_cast<int>(side.heads)};
}

template <typename T, typename W>
bool is_aligned(const ForwardHeads<T, W>& side) {
  return is_aligned(side.x) && is_aligned(side.weight) && is_aligned(side.y) && is_aligned(side.strides);
}

template <typename T, typename W>
BackwardHeads<T, W> heads_of(const BackwardSide& side, float* shares) {
  return {static_cast<const T*>(side.dy.data), static_cast<const T*>(side.x.data),
          static_cast<const W*>(side.weight.data), static_cast<const float*>(side.rstd.data),
          static_cast<T*>(side.dx.data), side.dweight ? shares : nullptr, side.dy_strides, side.strides,
          static_cast<int>(side.heads)};
}

template <typename T, typename W>
bool is_aligned(const BackwardHeads<T, W>& side) {
  return is_aligned(side.dy) && is_aligned(side.x) && is_aligned(side.weight) && is_aligned(side.dx) &&
         is_aligned(side.dy_strides) && is_aligned(side.strides);
}

template <int kHeads, bool kInterleaved, typename T, typename W, typename C>
cudaError_t launch_vectorized(const ForwardPointers<T, W, C>& p, cudaStream_t stream) {
  const int lanes = lanes_for(p.columns);
  const int64_t groups = p.tokens * (groups_of(p.q.heads, kHeads) + groups_of(p.k.heads, kHeads));
  const int64_t blocks = ceil_divide(groups, kForwardThreads / lanes);
  if (!fits_grid(blocks)) return cudaErrorInvalidValue;
  const auto grid = static_cast<unsigned>(blocks);
  norm_rope_vectorized<T, W, C, kInterleaved, kHeads><<<grid, kForwardThreads, 0, stream>>>(p, lanes);
  return launched();
}

template <typename T, typename W, typename C, bool kInterleaved>
cudaError_t run_forward(const Forward& f, int64_t rung, cudaStream_t stream) {
  ForwardPointers<T, W, C> p = {};
  p.q = heads_of<T, W>(f.sides[0]);
  p.k = heads_of<T, W>(f.sides[1]);
  p.tables = tables_of<C>(f.rotation);
  p.tokens = f.tokens;
  p.columns = static_cast<int>(f.columns);
  p.eps = static_cast<float>(f.eps);
  p.offset = static_cast<float>(f.offset);
  const int64_t best = is_vectorizable(p.tables, p.columns) && is_aligned(p.q) && is_aligned(p.k) ? 3 : 2;
  if (rung > best || rung < 0) return cudaErrorNotSupported;
  if (rung == 0) rung = best;
  if (rung == 3) {
    constexpr int kHeads = 16 / sizeof(T) / 2;
    const int64_t rows = f.tokens * (f.sides[0].heads + f.sides[1].heads);
    const bool many = rows * p.columns >= int64_t{kManyThreads} * kSlot * kHeads;
    return many ? launch_vectorized<kHeads, kInterleaved>(p, stream) : launch_vectorized<1, kInterleaved>(p, stream);
  }
  const int heads_a_block = rung == 1 ? kNaiveThreads : kWarpThreads / kWarp;
  const int64_t blocks = ceil_divide(f.tokens * (f.sides[0].heads + f.sides[1].heads), heads_a_block);
  if (!fits_grid(blocks)) return cudaErrorInvalidValue;
  const auto grid = static_cast<unsigned>(blocks);
  if (rung == 1) {
    norm_rope_naive<T, W, C, kInterleaved><<<grid, kNaiveThreads, 0, stream>>>(p);
  } else {
    norm_rope_warp<T, W, C, kInterleaved><<<grid, kWarpThreads, 0, stream>>>(p);
  }
  return launched();
}

cudaError_t sum(const Backward& b, cudaStream_t stream) {
  const auto* const shares = static_cast<const float*>(b.shares.data);
  const auto* const of_k = shares == nullptr ? nullptr : shares + row_offset(b.parts, b.columns);
  return launch_sums({shares, b.sides[0].dweight}, {of_k, b.sides[1].dweight}, b.parts, b.columns, 1, stream);
}

template <typename T, typename W, typename C, bool kInterleaved>
cudaError_t run_backward(const Backward& b, cudaStream_t stream) {
  BackwardPointers<T, W, C> p = {};
  float* shares = static_cast<float*>(b.shares.data);
  p.q = heads_of<T, W>(b.sides[0], shares);
  p.k = heads_of<T, W>(b.sides[1], shares + (shares != nullptr ? row_offset(b.parts, b.columns) : 0));
  p.tables = tables_of<C>(b.rotation);
  p.tokens = b.tokens;
  p.columns = static_cast<int>(b.columns);
  p.offset = static_cast<float>(b.offset);
  const auto grid = static_cast<unsigned>(b.parts);
  const bool countable = b.tokens * (p.q.heads + p.k.heads) < int64_t{1} << 31;
  if (countable && is_vectorizable(p.tables, p.columns) && is_aligned(p.q) && is_aligned(p.k)) {
    constexpr int kHeads = sizeof(T) == 2 ? 2 : 1;
    norm_rope_backward_vectorized<T, W, C, kInterleaved, kHeads>
        <<<grid, kBackwardThreads, 0, stream>>>(p, lanes_for(p.columns));
  } else {
    norm_rope_backward_block<T, W, C, kInterleaved><<<grid, kWarpThreads, 0, stream>>>(p);
  }
  const cudaError_t error = launched();
  return error == cudaSuccess ? sum(b, stream) : error;
}

// Calls `run(Type<T>, Type<W>, Type<C>, interleaved)`: weights and tables have the dtype of q or float32.
template <typename Run>
cudaError_t with_types(DType q, DType weight, const Rotation& rotation, const Run& run) {
  const auto with_order = [&](auto t, auto w, auto c) {
    return rotation.interleaved ? run(t, w, c, std::true_type{}) : run(t, w, c, std::false_type{});
  };
  const DType table = rotation.cos.dtype;
  for (const DType dtype : {weight, table}) {
    if (dtype != q && dtype != DType::kFloat32) return cudaErrorInvalidValue;
  }
  return with_type(q, [&](auto t) {
    using T = decltype(t);
    if (weight == q) return table == q ? with_order(t, T{}, T{}) : with_order(t, T{}, Type<float>{});
    return table == q ? with_order(t, Type<float>{}, T{}) : with_order(t, Type<float>{}, Type<float>{});
  });
}

template <typename Each>
using Of = typename Each::type;

}  // namespace

int launch_forward(const Forward& f, int64_t rung, void* stream) {
  if (f.tokens == 0) return cudaSuccess;
  if (f.columns >= (int64_t{1} << 30)) return cudaErrorInvalidValue;
  return with_types(f.sides[0].x.dtype, f.sides[0].weight.dtype, f.rotation, [&](auto t, auto w, auto c, auto order) {
    return run_forward<Of<decltype(t)>, Of<decltype(w)>, Of<decltype(c)>, decltype(order)::value>(
        f, rung, static_cast<cudaStream_t>(stream));
  });
}

int launch_backward(const Backward& b, void* stream) {
  if (b.columns >= (int64_t{1} << 30)) return cudaErrorInvalidValue;
  const BackwardSide& side = b.sides[b.sides[0].dy ? 0 : 1];
  return with_types(b.sides[0].x.dtype, side.weight.dtype, b.rotation, [&](auto t, auto w, auto c, auto order) {
    return run_backward<Of<decltype(t)>, Of<decltype(w)>, Of<decltype(c)>, decltype(order)::value>(
        b, static_cast<cudaStream_t>(stream));
  });
}

}  // namespace qk_norm_rope
}  // namespace kernel_pytorch
