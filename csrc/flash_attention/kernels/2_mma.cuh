// Kernel 2: both products on tensor cores (mma.sync), with 64 queries per block, 16 per warp, and 64 keys per tile.
// Scores stay in registers, where they are the left operand of the second product. Asynchronous copies load the values
// of a tile during the computation of its scores, and the keys of the next tile during that of its output.
//
// Tiles in shared memory are swizzled: with 128-byte rows, the eight rows that ldmatrix reads at once would be in the
// same banks, so vector c of row r is stored at index c ^ (r % 8) of its group of eight.
#pragma once

#include "../flash_attention.h"
#include "kernel_pytorch/cuda/mma.cuh"
#include "kernel_pytorch/cuda/reduce.cuh"
#include "parameters.cuh"

namespace kernel_pytorch {
namespace flash_attention {

constexpr int kMmaQueries = 64;
constexpr int kMmaKeys = 64;
constexpr int kMmaThreads = 128;
constexpr float kLog2E = 1.4426950408889634f;

// Offset in a tile of `kDepth` columns of vector `vector` (of eight elements) in row `row`.
template <int kDepth>
KP_HOST_DEVICE constexpr int swizzled(int row, int vector) {
  return row * kDepth + ((vector & ~7) | ((vector ^ row) & 7)) * 8;
}

template <typename T, int kDepth>
constexpr int kMmaSharedBytes = (kMmaQueries + 2 * kMmaKeys) * kDepth * static_cast<int>(sizeof(T));

// Copies 64 rows of global memory to a tile; rows from `rows` on are zeros.
template <typename T, int kDepth>
__device__ __forceinline__ void copy_tile(T* tile, const T* source, int64_t rows) {
  constexpr int kVectors = kDepth / 8;
#pragma unroll
  for (int i = threadIdx.x; i < 64 * kVectors; i += kMmaThreads) {
    const int row = i / kVectors, vector = i % kVectors;
    const bool there = row < rows;
    copy_16_bytes(tile + swizzled<kDepth>(row, vector), source + (there ? row * kDepth + vector * 8 : 0), there);
  }
  commit_copies();
}

// State of one warp: rows g and g + 8 of its 16 queries, of which this thread has two columns of every eight.
template <int kDepth>
struct Rows {
  float o[kDepth / 8][4] = {};
  float maximum[2] = {-INFINITY, -INFINITY};  // maximum of scores times log2(e)
  float sum[2] = {};                          // over this thread's columns
};

// Scores (16 x 64) of the warp's queries and a tile of keys, times scale * log2(e).
template <typename T, int kDepth>
__device__ __forceinline__ void compute_scores(const T* q, const T* k, int first_row, float scale,
                                               float (&scores)[kMmaKeys / 8][4]) {
  const int lane = threadIdx.x % kWarp;
#pragma unroll
  for (int n = 0; n < kMmaKeys / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) scores[n][i] = 0.0f;
  }
#pragma unroll
  for (int d = 0; d < kDepth / 16; ++d) {
    uint32_t a[4];
    // Matrices: rows 0-7 and 8-15 of columns 0-7, then the same rows of columns 8-15.
    load_matrices(a, q + swizzled<kDepth>(first_row + lane % 16, 2 * d + lane / 16));
#pragma unroll
    for (int n = 0; n < kMmaKeys / 16; ++n) {
      uint32_t b[4];
      // Keys 0-7 with columns 0-7 and 8-15, then keys 8-15.
      const int key = n * 16 + lane % 8 + lane / 16 * 8;
      load_matrices(b, k + swizzled<kDepth>(key, 2 * d + lane / 8 % 2));
      multiply_add<T>(scores[2 * n], a, b[0], b[1]);
      multiply_add<T>(scores[2 * n + 1], a, b[2], b[3]);
    }
  }
#pragma unroll
  for (int n = 0; n < kMmaKeys / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) scores[n][i] *= scale;
  }
}

// Replaces scores by probabilities relative to the running maximum; rescales the running sum and output.
template <int kDepth>
__device__ __forceinline__ void absorb_scores(Rows<kDepth>& rows, float (&scores)[kMmaKeys / 8][4],
                                              const int64_t (&visible)[2]) {
  const int column = threadIdx.x % 4 * 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float most = rows.maximum[half];
#pragma unroll
    for (int n = 0; n < kMmaKeys / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float& score = scores[n][2 * half + i];
        score = n * 8 + column + i < visible[half] ? score : -INFINITY;
        most = fmaxf(most, score);
      }
    }
    most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
    most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
    const float shift = most == -INFINITY ? 0.0f : most;
    const float rescale = exp2f(rows.maximum[half] - shift);
    rows.maximum[half] = most;
    rows.sum[half] *= rescale;
#pragma unroll
    for (int n = 0; n < kMmaKeys / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float& score = scores[n][2 * half + i];
        score = exp2f(score - shift);
        rows.sum[half] += score;
      }
    }
#pragma unroll
    for (int d = 0; d < kDepth / 8; ++d) {
      rows.o[d][2 * half] *= rescale;
      rows.o[d][2 * half + 1] *= rescale;
    }
  }
}

// o += probabilities (16 x 64) times a tile of values (64 x depth).
template <typename T, int kDepth>
__device__ __forceinline__ void add_values(Rows<kDepth>& rows, const float (&scores)[kMmaKeys / 8][4], const T* v) {
  const int lane = threadIdx.x % kWarp;
#pragma unroll
  for (int n = 0; n < kMmaKeys / 16; ++n) {
    const uint32_t a[4] = {
        pack<T>(scores[2 * n][0], scores[2 * n][1]),
        pack<T>(scores[2 * n][2], scores[2 * n][3]),
        pack<T>(scores[2 * n + 1][0], scores[2 * n + 1][1]),
        pack<T>(scores[2 * n + 1][2], scores[2 * n + 1][3]),
    };
#pragma unroll
    for (int d = 0; d < kDepth / 16; ++d) {
      uint32_t b[4];
      // Keys 0-7 and 8-15 of columns 0-7, then of columns 8-15; transposed by the load.
      load_matrices_transposed(b, v + swizzled<kDepth>(n * 16 + lane % 16, 2 * d + lane / 16));
      multiply_add<T>(rows.o[2 * d], a, b[0], b[1]);
      multiply_add<T>(rows.o[2 * d + 1], a, b[2], b[3]);
    }
  }
}

template <typename T, int kDepth>
__device__ __forceinline__ void write_rows(const Pointers<T>& p, Rows<kDepth>& rows, int64_t q_row, int first_row,
                                           int64_t queries) {
  const int lane = threadIdx.x % kWarp, column = lane % 4 * 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float sum = rows.sum[half];
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    const int row = first_row + lane / 4 + 8 * half;
    if (row >= queries) continue;
    const float reciprocal = sum == 0.0f ? 0.0f : 1.0f / sum;
    if (column == 0) p.lse[q_row + row] = sum == 0.0f ? -INFINITY : rows.maximum[half] / kLog2E + logf(sum);
    T* const o = p.o + row_offset(q_row + row, kDepth);
#pragma unroll
    for (int d = 0; d < kDepth / 8; ++d) {
      const uint32_t pair = pack<T>(rows.o[d][2 * half] * reciprocal, rows.o[d][2 * half + 1] * reciprocal);
      *reinterpret_cast<uint32_t*>(o + d * 8 + column) = pair;
    }
  }
}

template <typename T, int kDepth>
__global__ void __launch_bounds__(kMmaThreads) forward_mma(const Pointers<T> p) {
  extern __shared__ __align__(128) unsigned char bytes[];
  T* const q = reinterpret_cast<T*>(bytes);
  T* const k = q + kMmaQueries * kDepth;
  T* const v = k + kMmaKeys * kDepth;
  const int64_t first = blockIdx.x * static_cast<int64_t>(kMmaQueries);
  const int64_t batch_head = blockIdx.y;
  const int64_t q_row = batch_head * p.queries + first;
  const int64_t kv_offset = row_offset(kv_head_of(batch_head, p.heads, p.kv_heads) * p.keys, kDepth);
  const int64_t queries = smaller(kMmaQueries, p.queries - first);
  const int64_t end = visible_keys(first + queries - 1, p.queries, p.keys, p.causal);
  const int first_row = threadIdx.x / kWarp * 16;
  const int own_row = first_row + threadIdx.x % kWarp / 4;
  Rows<kDepth> rows;
  if (end > 0) {
    copy_tile<T, kDepth>(q, p.q + row_offset(q_row, kDepth), queries);
    copy_tile<T, kDepth>(k, p.k + kv_offset, p.keys);
  }
  for (int64_t tile = 0; tile < end; tile += kMmaKeys) {
    await_copies<0>();
    __syncthreads();  // the keys have arrived, and all warps have used the values of the previous tile
    copy_tile<T, kDepth>(v, p.v + kv_offset + row_offset(tile, kDepth), p.keys - tile);
    float scores[kMmaKeys / 8][4];
    compute_scores<T, kDepth>(q, k, first_row, p.scale * kLog2E, scores);
    await_copies<0>();
    __syncthreads();  // the values have arrived, and all warps have used the keys
    if (tile + kMmaKeys < end) {
      copy_tile<T, kDepth>(k, p.k + kv_offset + row_offset(tile + kMmaKeys, kDepth), p.keys - tile - kMmaKeys);
    }
    const int64_t visible[2] = {visible_keys(first + own_row, p.queries, p.keys, p.causal) - tile,
                                visible_keys(first + own_row + 8, p.queries, p.keys, p.causal) - tile};
    absorb_scores<kDepth>(rows, scores, visible);
    add_values<T, kDepth>(rows, scores, v);
  }
  write_rows<T, kDepth>(p, rows, q_row, first_row, queries);
}

}  // namespace flash_attention
}  // namespace kernel_pytorch
