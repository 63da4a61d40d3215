// Kernel 2: one block per row. Neighbouring threads read neighbouring elements; sums are reduced over warps and shared
// memory. It reads each row three times, and supports rows of any length and alignment.
#pragma once

#include "1_naive.cuh"
#include "kernel_pytorch/cuda/reduce.cuh"

namespace kernel_pytorch {
namespace norm_act {

constexpr int kBlockThreads = 256, kMostBlockThreads = 1024;

// Two sums over a block with one barrier. `scratch` is in shared memory and can be reused after the next barrier.
__device__ __forceinline__ float2 reduce_pair(float2 value, float2 (&scratch)[kMaxWarps]) {
  value = {reduce_warp(value.x, Add{}), reduce_warp(value.y, Add{})};
  const int warps = blockDim.x / kWarp, warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  if (lane == 0) scratch[warp] = value;
  __syncthreads();
  value = lane < warps ? scratch[lane] : float2{0.0f, 0.0f};
  return {reduce_warp(value.x, Add{}), reduce_warp(value.y, Add{})};
}

// Accumulates the error of a rounded mean (x), and the squares around that mean (y).
__device__ __forceinline__ void add_moments(float apart, float2& moments) {
  moments.x += apart;
  moments.y += apart * apart;
}

struct Statistics {
  float mean;
  float rstd;
};

// Whether x_hat is zero for any x: a single column minus its mean. rstd is then set to zero, so that every gradient is
// exactly zero; otherwise rounding errors would be multiplied by 1 / sqrt(eps).
__device__ __forceinline__ bool is_nothing(bool centred, int columns) { return centred && columns == 1; }

__device__ __forceinline__ Statistics statistics_of(float2 moments, float mean, bool centred, int columns, float eps) {
  const float off = centred ? moments.x / static_cast<float>(columns) : 0.0f;
  const float variance = moments.y / static_cast<float>(columns) - off * off;
  return {mean + off, is_nothing(centred, columns) ? 0.0f : 1.0f / sqrtf(variance + eps)};
}

template <typename T>
__global__ void __launch_bounds__(kBlockThreads) forward_block(const ForwardPointers<T> p) {
  __shared__ float scratch[kMaxWarps];
  __shared__ float2 pairs[kMaxWarps];
  const int64_t row = blockIdx.x;
  const int64_t offset = row_offset(row, p.columns);
  const DropoutRow dropout = dropout_row(p.dropout, row, p.columns);
  float sum = 0.0f;
  for (int column = threadIdx.x; column < p.columns; column += kBlockThreads) sum += make_h(p, dropout, offset, column);
  const float total = reduce_block(sum, Add{}, scratch);
  const float rounded = p.mean != nullptr ? total / static_cast<float>(p.columns) : 0.0f;
  float2 moments = {0.0f, 0.0f};
  for (int column = threadIdx.x; column < p.columns; column += kBlockThreads) {
    add_moments(read_h(p, offset, column) - rounded, moments);
  }
  const Statistics found = statistics_of(reduce_pair(moments, pairs), rounded, p.mean != nullptr, p.columns, p.eps);
  const float mean = found.mean, rstd = found.rstd;
  if (threadIdx.x == 0) {
    if (p.mean != nullptr) p.mean[row] = mean;
    p.rstd[row] = rstd;
  }
  for (int column = threadIdx.x; column < p.columns; column += kBlockThreads) {
    float z[1] = {(read_h(p, offset, column) - mean) * rstd};
    scale_and_shift<1>(p.weight, p.bias, column, z);
    finish<false, T, 1>(p, dropout, column, z);
    p.y[offset + column] = narrow<T>(z[0]);
  }
}

// Gradient and x_hat of one element, before multiplication with the weight.
struct Slopes {
  float g;  // holds dz
  float x_hat;
};

template <typename T>
__device__ __forceinline__ Slopes slopes_of(const BackwardPointers<T>& p, const DropoutRow& dropout, int64_t offset, int column,
                                            float mean, float rstd) {
  float g[1] = {widen(p.dy[offset + column])};
  const float x_hat = (widen(p.h[offset + column]) - mean) * rstd;
  float z[1] = {x_hat};
  scale_and_shift<1>(p.weight, p.bias, column, z);
  undo_activation<false>(p, dropout, column, z, g);
  return {g[0], x_hat};
}

template <typename T>
__device__ __forceinline__ float weighted(const BackwardPointers<T>& p, int column, float g) {
  if (p.weight.data == nullptr) return g;
  float weight[1];
  load_as<1>(p.weight, column, weight);
  return g * weight[0];
}

// Gradients of x and the residual: one row per block.
template <typename T>
__global__ void __launch_bounds__(kMostBlockThreads) backward_block(const BackwardPointers<T> p) {
  __shared__ float2 scratch[kMaxWarps];
  const int64_t row = blockIdx.x, offset = row_offset(row, p.columns);
  const int step = static_cast<int>(blockDim.x);
  const DropoutRow dropout = dropout_row(p.dropout, row, p.columns);
  const float rstd = p.rstd[row], mean = p.mean != nullptr ? p.mean[row] : 0.0f;
  float2 sums = {0.0f, 0.0f};
  for (int column = threadIdx.x; column < p.columns; column += step) {
    const Slopes found = slopes_of(p, dropout, offset, column, mean, rstd);
    const float g = weighted(p, column, found.g);
    sums = {sums.x + g, fmaf(g, found.x_hat, sums.y)};
  }
  sums = reduce_pair(sums, scratch);
  const float of_g = p.mean != nullptr ? sums.x / static_cast<float>(p.columns) : 0.0f;
  const float of_product = sums.y / static_cast<float>(p.columns);
  for (int column = threadIdx.x; column < p.columns; column += step) {
    const Slopes found = slopes_of(p, dropout, offset, column, mean, rstd);
    float gradient[1] = {rstd * (weighted(p, column, found.g) - of_g - found.x_hat * of_product)};
    if (p.dh != nullptr) gradient[0] += widen(p.dh[offset + column]);
    store_gradients<false, T, 1>(p, dropout, offset, column, gradient);
  }
}

// Partial sums of the parameters' gradients over the rows of one part: one thread per column.
template <typename T>
__global__ void __launch_bounds__(kBlockThreads) backward_columns(const BackwardPointers<T> p) {
  const unsigned tiles = (p.columns + kBlockThreads - 1) / kBlockThreads;
  const int64_t part = blockIdx.x / tiles;
  const int column = static_cast<int>(blockIdx.x % tiles) * kBlockThreads + threadIdx.x;
  if (column >= p.columns) return;
  float of_weight = 0.0f, of_bias = 0.0f;
#pragma unroll 4  // loads in flight
  for (int64_t row = part; row < p.rows; row += p.parts) {
    const DropoutRow dropout = dropout_row(p.dropout, row, p.columns);
    const float rstd = p.rstd[row], mean = p.mean != nullptr ? p.mean[row] : 0.0f;
    const Slopes found = slopes_of(p, dropout, row_offset(row, p.columns), column, mean, rstd);
    of_weight = fmaf(found.g, found.x_hat, of_weight);
    of_bias += found.g;
  }
  const int64_t share = row_offset(part, p.columns) + column;
  if (p.weight_shares != nullptr) p.weight_shares[share] = of_weight;
  if (p.bias_shares != nullptr) p.bias_shares[share] = of_bias;
}

}  // namespace norm_act
}  // namespace kernel_pytorch
