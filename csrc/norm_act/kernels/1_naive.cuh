// Kernel 1: one thread per row. Neighbouring threads read addresses a whole row apart, so only one element of every 32
// bytes loaded from memory is used.
#pragma once

#include "parameters.cuh"

namespace kernel_pytorch {
namespace norm_act {

constexpr int kNaiveThreads = 128;

// Computes one element of h: x, or the sum with the residual, rounded and stored.
template <typename T>
__device__ __forceinline__ float make_h(const ForwardPointers<T>& p, const DropoutRow& dropout, int64_t offset, int column) {
  float x[1], residual[1];
  load_promoted<T, 1>(p.x, offset + column, x);
  if (p.residual.data == nullptr) return x[0];
  if (dropout.drops) drop<1>(dropout, column, x);
  load_promoted<T, 1>(p.residual, offset + column, residual);
  const T rounded = narrow<T>(residual[0] + x[0]);
  p.h[offset + column] = rounded;
  return widen(rounded);
}

// Reads the same element again.
template <typename T>
__device__ __forceinline__ float read_h(const ForwardPointers<T>& p, int64_t offset, int column) {
  if (p.residual.data != nullptr) return widen(p.h[offset + column]);
  float x[1];
  load_promoted<T, 1>(p.x, offset + column, x);
  return x[0];
}

template <typename T>
__global__ void __launch_bounds__(kNaiveThreads) forward_naive(const ForwardPointers<T> p) {
  const int64_t row = blockIdx.x * static_cast<int64_t>(kNaiveThreads) + threadIdx.x;
  if (row >= p.rows) return;
  const int64_t offset = row_offset(row, p.columns);
  const DropoutRow dropout = dropout_row(p.dropout, row, p.columns);
  float sum = 0.0f, squares = 0.0f;
  for (int column = 0; column < p.columns; ++column) sum += make_h(p, dropout, offset, column);
  const float mean = p.mean != nullptr ? sum / static_cast<float>(p.columns) : 0.0f;
  for (int column = 0; column < p.columns; ++column) {
    const float apart = read_h(p, offset, column) - mean;
    squares += apart * apart;
  }
  const float rstd = 1.0f / sqrtf(squares / static_cast<float>(p.columns) + p.eps);
  if (p.mean != nullptr) p.mean[row] = mean;
  p.rstd[row] = rstd;
  for (int column = 0; column < p.columns; ++column) {
    float z[1] = {(read_h(p, offset, column) - mean) * rstd};
    scale_and_shift<1>(p.weight, p.bias, column, z);
    finish<false, T, 1>(p, dropout, column, z);
    p.y[offset + column] = narrow<T>(z[0]);
  }
}

}  // namespace norm_act
}  // namespace kernel_pytorch
