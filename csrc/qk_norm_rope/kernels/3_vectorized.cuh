// Version 3: accesses of 16 bytes, and a head stays in the registers of a few neighbouring threads: it is read once. A
// thread holds eight elements; the other half of its pairs comes from the thread that holds it.
#pragma once

#include "kernel_pytorch/cuda/reduce.cuh"
#include "parameters.cuh"

namespace kernel_pytorch {
namespace qk_norm_rope {

constexpr int kElements = 8;
constexpr int kVectorThreads = 256;
constexpr int kResident = 3;  // blocks of a backward on a multiprocessor: all shares side by side

// Where a thread stands: `lanes` threads, a power of two up to a warp, have a head between them. Those beyond its end
// hold zeros.
struct Lane {
  int lanes;
  int own;
  int group;  // of the block
  int column;
  bool holds;
};

__device__ __forceinline__ Lane lane_of(int lanes, int columns) {
  const int own = threadIdx.x % lanes;
  return {lanes, own, static_cast<int>(threadIdx.x) / lanes, own * kElements, own * kElements < columns};
}

// Of a head, for all its threads.
__device__ __forceinline__ float reduce_lanes(float value, int lanes) {
  for (int mask = lanes / 2; mask > 0; mask /= 2) value += __shfl_xor_sync(0xffffffffu, value, mask);
  return value;
}

// cos or sin of the four pairs in eight interleaved columns.
template <typename C>
__device__ __forceinline__ void load_four(const C* table, int own, float (&four)[4]) {
  if constexpr (sizeof(C) == 4) {
    load_vector<C, 4>(table + own * 4, four);
  } else {  // 16 bytes are those of two threads
    float eight[8];
    load_vector<C, 8>(table + own / 2 * 8, eight);
#pragma unroll
    for (int i = 0; i < 4; ++i) four[i] = own % 2 ? eight[4 + i] : eight[i];
  }
}

// Rotate a head. All threads of a warp take part, whatever they hold; `holds` says whether the token's angles are read.
template <bool kInterleaved, typename C>
__device__ __forceinline__ void rotate(const Tables<C>& tables, const Lane& lane, int64_t token, bool holds,
                                       float (&values)[kElements]) {
  const int64_t table = row_offset(token % tables.rows, tables.pairs);
  const bool turns = holds && lane.column < 2 * tables.pairs;
  if constexpr (kInterleaved) {
    if (!turns) return;
    float c[4], s[4];
    load_four(tables.cos + table, lane.own, c);
    load_four(tables.sin + table, lane.own, s);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float first = values[2 * i], second = values[2 * i + 1], sine = s[i] * tables.sign;
      values[2 * i] = first * c[i] - second * sine;
      values[2 * i + 1] = second * c[i] + first * sine;
    }
  } else {
    const VectorPartner partner = vector_partner(lane.own, tables.pairs / kElements);
    const int source = static_cast<int>(threadIdx.x) % kWarp - lane.own + partner.vector;
    float other[kElements];
#pragma unroll
    for (int i = 0; i < kElements; ++i) other[i] = __shfl_sync(0xffffffffu, values[i], source);
    if (!turns) return;
    float c[kElements], s[kElements];
    load_vector<C, kElements>(tables.cos + table + partner.table * kElements, c);
    load_vector<C, kElements>(tables.sin + table + partner.table * kElements, s);
    const float sign = partner.second ? tables.sign : -tables.sign;
#pragma unroll
    for (int i = 0; i < kElements; ++i) values[i] = values[i] * c[i] + other[i] * (s[i] * sign);
  }
}

template <typename T, typename W, typename C, bool kInterleaved>
__global__ void __launch_bounds__(kVectorThreads)
    norm_rope_vectorized(const ForwardPointers<T, W, C> p, const int lanes) {
  const Lane lane = lane_of(lanes, p.columns);
  const int64_t rows = p.tokens * (p.q.heads + p.k.heads);
  const int64_t index = blockIdx.x * static_cast<int64_t>(kVectorThreads / lanes) + lane.group;
  const bool holds = lane.holds && index < rows;
  const Row<T, W> row = row_of(p, index < rows ? index : 0);
  float h[kElements] = {};
  if (holds) load_vector<T, kElements>(row.x + lane.column, h);
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kElements; ++i) sum += h[i] * h[i];
  sum = reduce_lanes(sum, lanes);
  const float rstd = 1.0f / sqrtf(sum / static_cast<float>(p.columns) + p.eps);
  if (holds) {
    if (lane.own == 0) *row.rstd = rstd;
    float weight[kElements];
    load_vector<W, kElements>(row.weight + lane.column, weight);
#pragma unroll
    for (int i = 0; i < kElements; ++i) h[i] *= rstd * (p.offset + weight[i]);
  }
  rotate<kInterleaved>(p.tables, lane, row.token, holds, h);
  if (holds) store_vector<T, kElements>(row.y + lane.column, h);
}

// The gradients of q, or of k: the heads of one part, and its share of dweight, in registers until the last of them.
template <bool kInterleaved, typename T, typename W, typename C>
__device__ __forceinline__ void backward_heads(const BackwardPointers<T, W, C>& p, const BackwardHeads<T, W>& side,
                                               const Lane& lane, float* sums) {
  if (side.dy == nullptr) return;
  const int groups = kVectorThreads / lane.lanes;
  const int64_t rows = p.tokens * side.heads;
  float scale[kElements] = {}, share[kElements] = {};
  if (lane.holds) load_vector<W, kElements>(side.weight + lane.column, scale);
#pragma unroll
  for (int i = 0; i < kElements; ++i) scale[i] += p.offset;
  for (int64_t first = blockIdx.x * static_cast<int64_t>(groups); first < rows;
       first += gridDim.x * static_cast<int64_t>(groups)) {
    const bool holds = lane.holds && first + lane.group < rows;
    const int64_t row = holds ? first + lane.group : 0;
    const int64_t token = row / side.heads, head = row - token * side.heads;
    float g[kElements] = {}, x_hat[kElements] = {};
    if (holds) {
      load_vector<T, kElements>(side.dy + head_offset(side.dy_strides, token, head) + lane.column, g);
      load_vector<T, kElements>(side.x + head_offset(side.strides, token, head) + lane.column, x_hat);
    }
    const float rstd = side.rstd[row];
    rotate<kInterleaved>(p.tables, lane, token, holds, g);
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      x_hat[i] *= rstd;
      share[i] += g[i] * x_hat[i];
      g[i] *= scale[i];
      sum += g[i] * x_hat[i];
    }
    if (side.dx == nullptr) continue;
    const float mean = reduce_lanes(sum, lane.lanes) / static_cast<float>(p.columns);
#pragma unroll
    for (int i = 0; i < kElements; ++i) g[i] = rstd * (g[i] - x_hat[i] * mean);
    if (holds) store_vector<T, kElements>(side.dx + row_offset(row, p.columns) + lane.column, g);
  }
  if (side.shares == nullptr) return;
  __syncthreads();  // the sums of the other side have been read
  store_vector<float, kElements>(sums + threadIdx.x * kElements, share);
  __syncthreads();
  const int width = lane.lanes * kElements;
  const int column = threadIdx.x * 4;
  if (column >= p.columns) return;
  float total[4] = {};
  for (int group = 0; group < groups; ++group) {
#pragma unroll
    for (int i = 0; i < 4; ++i) total[i] += sums[group * width + column + i];
  }
  store_vector<float, 4>(side.shares + row_offset(blockIdx.x, p.columns) + column, total);
}

template <typename T, typename W, typename C, bool kInterleaved>
__global__ void __launch_bounds__(kVectorThreads, kResident)
    norm_rope_backward_vectorized(const BackwardPointers<T, W, C> p, const int lanes) {
  __shared__ __align__(16) float sums[kVectorThreads * kElements];
  const Lane lane = lane_of(lanes, p.columns);
  backward_heads<kInterleaved>(p, p.q, lane, sums);
  backward_heads<kInterleaved>(p, p.k, lane, sums);
}

}  // namespace qk_norm_rope
}  // namespace kernel_pytorch
