// Kernel 2: one warp per head in the forward, one block per head in the backward. Neighbouring threads read
// neighbouring columns, and read each partner column again; any length and alignment.
#pragma once

#include "kernel_pytorch/cuda/reduce.cuh"
#include "parameters.cuh"

namespace kernel_pytorch {
namespace qk_norm_rope {

constexpr int kWarpThreads = 128;

template <typename T, typename W, typename C, bool kInterleaved>
__global__ void __launch_bounds__(kWarpThreads) norm_rope_warp(const ForwardPointers<T, W, C> p) {
  constexpr int kWarps = kWarpThreads / kWarp;
  const int lane = threadIdx.x % kWarp;
  const int64_t index = blockIdx.x * static_cast<int64_t>(kWarps) + threadIdx.x / kWarp;
  if (index >= p.tokens * (p.q.heads + p.k.heads)) return;  // returns for a whole warp
  const Row<T, W> row = row_of(p, index);
  float sum = 0.0f;
  for (int column = lane; column < p.columns; column += kWarp) {
    const float value = widen(row.x[column]);
    sum += value * value;
  }
  sum = reduce_warp(sum, Add{});
  const float rstd = 1.0f / sqrtf(sum / static_cast<float>(p.columns) + p.eps);
  if (lane == 0) *row.rstd = rstd;
  const auto normalized = [&](int64_t column) {
    return widen(row.x[column]) * rstd * (p.offset + widen(row.weight[column]));
  };
  for (int column = lane; column < p.columns; column += kWarp) {
    row.y[column] = narrow<T>(rotated<kInterleaved>(p.tables, row.token, column, normalized));
  }
}

// Gradients of q or k for the heads of one part. The partial sum of dweight is in global memory, where every column
// belongs to one thread.
template <bool kInterleaved, typename T, typename W, typename C>
__device__ __forceinline__ void backward_heads(const BackwardPointers<T, W, C>& p, const BackwardHeads<T, W>& side,
                                               float (&scratch)[2][kMaxWarps]) {
  if (side.dx == nullptr && side.shares == nullptr) return;  // an empty dy is null too
  float* share = side.shares != nullptr ? side.shares + row_offset(blockIdx.x, p.columns) : nullptr;
  if (share != nullptr) {
    for (int column = threadIdx.x; column < p.columns; column += kWarpThreads) share[column] = 0.0f;
  }
  const int64_t rows = p.tokens * side.heads;
  int turn = 0;
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x, turn ^= 1) {
    const int64_t token = row / side.heads, head = row - token * side.heads;
    const T* dy = side.dy + head_offset(side.dy_strides, token, head);
    const T* x = side.x + head_offset(side.strides, token, head);
    const float rstd = side.rstd[row];
    const auto incoming = [&](int64_t column) { return widen(dy[column]); };
    float sum = 0.0f;
#pragma unroll 1
    for (int column = threadIdx.x; column < p.columns; column += kWarpThreads) {
      const float g = rotated<kInterleaved>(p.tables, token, column, incoming);
      const float x_hat = widen(x[column]) * rstd;
      if (share != nullptr) share[column] += g * x_hat;
      sum += g * (p.offset + widen(side.weight[column])) * x_hat;
    }
    if (side.dx == nullptr) continue;
    const float mean = reduce_block(sum, Add{}, scratch[turn]) / static_cast<float>(p.columns);
    T* dx = side.dx + row_offset(row, p.columns);
#pragma unroll 1
    for (int column = threadIdx.x; column < p.columns; column += kWarpThreads) {
      const float g = rotated<kInterleaved>(p.tables, token, column, incoming);
      const float scaled = g * (p.offset + widen(side.weight[column]));
      dx[column] = narrow<T>(rstd * (scaled - widen(x[column]) * rstd * mean));
    }
  }
}

template <typename T, typename W, typename C, bool kInterleaved>
__global__ void __launch_bounds__(kWarpThreads) norm_rope_backward_block(const BackwardPointers<T, W, C> p) {
  __shared__ float scratch[2][2][kMaxWarps];
  backward_heads<kInterleaved>(p, p.q, scratch[0]);
  backward_heads<kInterleaved>(p, p.k, scratch[1]);
}

}  // namespace qk_norm_rope
}  // namespace kernel_pytorch
