// Kernel 1: tiles of 32 keys and values in shared memory, shared by sixteen queries. Each warp has four queries: for
// scores its lanes are keys, for the output they are columns. Any depth up to 256, any dtype; all arithmetic is in
// float32.
#pragma once

#include "../flash_attention.h"
#include "kernel_pytorch/cuda/reduce.cuh"
#include "kernel_pytorch/cuda/vector.cuh"
#include "parameters.cuh"

namespace kernel_pytorch {
namespace flash_attention {

constexpr int kWarps = 4;
constexpr int kQueriesOfWarp = 4;
constexpr int kBlockQueries = kWarps * kQueriesOfWarp;
constexpr int kTileKeys = kWarp;

// Shared memory in floats: queries, keys (padded by a column, so that 32 keys are in 32 banks), values.
KP_HOST_DEVICE constexpr int shared_floats(int depth) {
  return kBlockQueries * depth + kTileKeys * (depth + 1) + kTileKeys * depth;
}

// kColumns: number of output columns per lane.
template <typename T, int kColumns>
__global__ void __launch_bounds__(kWarps* kWarp) forward_shared_memory(const Pointers<T> p) {
  extern __shared__ float shared[];
  float* const q = shared;
  float* const k = q + kBlockQueries * p.depth;
  float* const v = k + kTileKeys * (p.depth + 1);
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int64_t first = blockIdx.x * static_cast<int64_t>(kBlockQueries);
  const int64_t batch_head = blockIdx.y;
  const int64_t q_row = batch_head * p.queries + first;
  const int64_t kv_row = kv_head_of(batch_head, p.heads, p.kv_heads) * p.keys;
  const int queries = static_cast<int>(smaller(kBlockQueries, p.queries - first));
  for (int i = threadIdx.x; i < kBlockQueries * p.depth; i += blockDim.x) {
    q[i] = i < queries * p.depth ? widen(p.q[row_offset(q_row, p.depth) + i]) * p.scale : 0.0f;
  }
  float o[kQueriesOfWarp][kColumns] = {};
  float maximum[kQueriesOfWarp], sum[kQueriesOfWarp] = {};
#pragma unroll
  for (int i = 0; i < kQueriesOfWarp; ++i) maximum[i] = -INFINITY;
  const int64_t end = visible_keys(first + queries - 1, p.queries, p.keys, p.causal);
  for (int64_t tile = 0; tile < end; tile += kTileKeys) {
    __syncthreads();
    const int keys = static_cast<int>(smaller(kTileKeys, p.keys - tile));
    for (int i = threadIdx.x; i < kTileKeys * p.depth; i += blockDim.x) {
      const int key = i / p.depth, column = i % p.depth;
      const int64_t source = row_offset(kv_row + tile + key, p.depth) + column;
      k[key * (p.depth + 1) + column] = key < keys ? widen(p.k[source]) : 0.0f;
      v[i] = key < keys ? widen(p.v[source]) : 0.0f;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kQueriesOfWarp; ++i) {
      const int query = warp * kQueriesOfWarp + i;
      const int64_t visible = visible_keys(first + query, p.queries, p.keys, p.causal) - tile;
      float score = 0.0f;
      for (int column = 0; column < p.depth; ++column) {
        score += q[query * p.depth + column] * k[lane * (p.depth + 1) + column];
      }
      score = lane < visible && lane < keys ? score : -INFINITY;
      const float most = fmaxf(maximum[i], reduce_warp(score, Max{}));
      const float shift = most == -INFINITY ? 0.0f : most;
      const float rescale = expf(maximum[i] - shift);
      const float probability = expf(score - shift);
      sum[i] = sum[i] * rescale + reduce_warp(probability, Add{});
      maximum[i] = most;
#pragma unroll
      for (int c = 0; c < kColumns; ++c) o[i][c] *= rescale;
      for (int key = 0; key < keys; ++key) {
        const float weight = __shfl_sync(0xffffffffu, probability, key);
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          const int column = c * kWarp + lane;
          if (column < p.depth) o[i][c] += weight * v[key * p.depth + column];
        }
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kQueriesOfWarp; ++i) {
    const int query = warp * kQueriesOfWarp + i;
    if (query >= queries) break;
    const float reciprocal = sum[i] == 0.0f ? 0.0f : 1.0f / sum[i];
    if (lane == 0) p.lse[q_row + query] = sum[i] == 0.0f ? -INFINITY : maximum[i] + logf(sum[i]);
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const int column = c * kWarp + lane;
      if (column < p.depth) p.o[row_offset(q_row + query, p.depth) + column] = narrow<T>(o[i][c] * reciprocal);
    }
  }
}

}  // namespace flash_attention
}  // namespace kernel_pytorch
