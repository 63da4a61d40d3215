// Version 2: one block a row. Neighbouring threads read neighbouring elements; it walks the row twice, and takes rows of any
// length and alignment.
#pragma once

#include "kernel_pytorch/cuda/online_softmax.cuh"
#include "parameters.cuh"

namespace kernel_pytorch {
namespace softmax {

constexpr int kBlockThreads = 512;

template <typename T, typename M, typename Y>
__global__ void __launch_bounds__(kBlockThreads) forward_block(const ForwardPointers<T, M, Y> p) {
  __shared__ float scratch[2 * kMaxWarps];
  const int64_t row = blockIdx.x;
  const int64_t offset = row_offset(row, p.columns);
  const T* x = p.x + offset;
  const M* mask = mask_of(p, row);
  const int step = p.broadcast.column_step;
  OnlineSum s;
  for (int column = threadIdx.x; column < p.columns; column += kBlockThreads) {
    s.add(score(x, mask, column, step, p.scale));
  }
  s = reduce_online(s, scratch);
  const float base = base_of(s.most, mask != nullptr);
  const float share = share_of_sum(s.sum);
  for (int column = threadIdx.x; column < p.columns; column += kBlockThreads) {
    p.y[offset + column] = narrow<Y>(expf(score(x, mask, column, step, p.scale) - base) * share);
  }
}

template <typename T>
__global__ void __launch_bounds__(kBlockThreads) backward_block(const BackwardPointers<T> p) {
  __shared__ float scratch[2][kMaxWarps];
  const int64_t row = blockIdx.x;
  const int64_t offset = row_offset(row, p.columns);
  float dot = 0.0f;
  for (int column = threadIdx.x; column < p.columns; column += kBlockThreads) {
    dot += widen(p.dy[offset + column]) * widen(p.y[offset + column]);
  }
  dot = reduce_block(dot, Add{}, scratch[0]);
  float rest = 0.0f;
  for (int column = threadIdx.x; column < p.columns; column += kBlockThreads) {
    rest += (widen(p.dy[offset + column]) - dot) * widen(p.y[offset + column]);
  }
  rest = reduce_block(rest, Add{}, scratch[1]);  // softmax.h
  if (p.dots != nullptr && threadIdx.x == 0) p.dots[row] = dot + rest;
  if (p.dx == nullptr) return;
  for (int column = threadIdx.x; column < p.columns; column += kBlockThreads) {
    const float dz = score_gradient(widen(p.dy[offset + column]), widen(p.y[offset + column]), dot, rest);
    p.dx[offset + column] = narrow<T>(p.scale * dz);
  }
}

}  // namespace softmax
}  // namespace kernel_pytorch
