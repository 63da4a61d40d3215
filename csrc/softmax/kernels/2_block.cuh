// Kernel 2: one block per row, or one warp per short row, with 16-byte vectors between unaligned ends. It reads each
// row twice, and supports rows of any length and alignment. A multiprocessor runs one or two blocks of 1024 threads at
// a time, so that the second read of long rows still hits the L2 cache.
#pragma once

#include "kernel_pytorch/cuda/exact_sum.cuh"
#include "kernel_pytorch/cuda/online_softmax.cuh"
#include "kernel_pytorch/cuda/pieces.cuh"
#include "parameters.cuh"

namespace kernel_pytorch {
namespace softmax {

constexpr int kBlockThreads = 1024;
constexpr int kVectorsAtOnce = 4;  // per thread

// Each of several rows of a block has a whole warp.
__device__ __forceinline__ int64_t row_of_block() { return blockIdx.x * static_cast<int64_t>(blockDim.y) + threadIdx.y; }

template <typename T, typename M, typename Y>
__global__ void __launch_bounds__(kBlockThreads) forward_block(const ForwardPointers<T, M, Y> p) {
  constexpr int N = kVectorLength<T>;
  __shared__ float scratch[2 * kMaxWarps];
  const int64_t row = row_of_block();
  if (row >= p.rows) return;
  const T* const x = p.x + row_offset(row, p.columns);
  Y* const y = p.y + row_offset(row, p.columns);
  const M* const mask = mask_of(p, row);
  const int step = p.broadcast.column_step;
  const Pieces<N> pieces = pieces_of<N>(p.columns, x, y);
  const auto to_scores_of = [&](int column, float(&z)[N]) {
    scale_all(p.scale, z);
    if (mask == nullptr) return;
#pragma unroll
    for (int i = 0; i < N; ++i) z[i] = masked(z[i], mask[(column + i) * step]);
  };
  OnlineSum s;
  pieces.for_each_single([&](int column) { s.add(score(x, mask, column, step, p.scale)); });
  pieces.template for_each_vector<kVectorsAtOnce>(x, [&](int column, float(&z)[N]) {
    to_scores_of(column, z);
    s.add_all<kRounded<Y>>(z);
  });
  s = reduce_online(s, scratch);
  const float base = base_of(s.most, mask != nullptr);
  const float share = share_of_sum(s.sum);
  pieces.for_each_single([&](int column) {
    y[column] = narrow<Y>(expf(score(x, mask, column, step, p.scale) - base) * share);
  });
  pieces.template for_each_vector<kVectorsAtOnce>(x, [&](int column, float(&z)[N]) {
    to_scores_of(column, z);
#pragma unroll
    for (int i = 0; i < N; ++i) z[i] = exponential<kRounded<Y>>(z[i] - base) * share;
    store_vector<Y, N>(y + column, z);
  });
}

// The error of dot (softmax.h) is dot times the error of sum(y), so one pass computes both sums; for results in full
// precision, the sums are compensated.
template <typename T>
__global__ void __launch_bounds__(kBlockThreads) backward_block(const BackwardPointers<T> p) {
  constexpr int N = kVectorLength<T>;
  __shared__ float2 scratch[2][kMaxWarps];
  const int64_t row = row_of_block(), offset = row_offset(row, p.columns);
  if (row >= p.rows) return;
  const T* const dy = p.dy + offset;
  const T* const y = p.y + offset;
  const Pieces<N> pieces = pieces_of<N>(p.columns, dy, y, p.dx != nullptr ? p.dx + offset : dy);
  Sum<!kRounded<T>> dots, sums;
  const auto add = [&](float a, float b) {
    dots.add_product(a, b);
    sums.add(b);
  };
  pieces.for_each_single([&](int column) { add(widen(dy[column]), widen(y[column])); });
  pieces.template for_each_vector<kVectorsAtOnce / 2>(dy, y, [&](int, float(&a)[N], float(&b)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) add(a[i], b[i]);
  });
  dots = reduce_block(dots, scratch[0]);
  sums = reduce_block(sums, scratch[1]);
  const float dot = dots.total, rest = fmaf(dot, (1.0f - sums.total) - sums.lost, dots.lost);
  if (p.dots != nullptr && threadIdx.x == 0) p.dots[row] = dot + rest;
  if (p.dx == nullptr) return;
  T* const dx = p.dx + offset;
  pieces.for_each_single([&](int column) {
    dx[column] = narrow<T>(p.scale * score_gradient(widen(dy[column]), widen(y[column]), dot, rest));
  });
  pieces.template for_each_vector<kVectorsAtOnce / 2>(dy, y, [&](int column, float(&a)[N], float(&b)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) a[i] = score_gradient(a[i], b[i], dot, rest) * p.scale;
    store_vector<T, N>(dx + column, a);
  });
}

}  // namespace softmax
}  // namespace kernel_pytorch
