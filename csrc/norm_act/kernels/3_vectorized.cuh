// Version 3: accesses of 16 bytes, and the row stays in registers, packed: it is read once. `kVectors` vectors a thread;
// rows end on a vector, so a thread holds a vector whole or not at all. Short rows have a warp each, and need no barrier.
// `kPlain`: neither activation nor dropout.
#pragma once

#include "2_block.cuh"

namespace kernel_pytorch {
namespace norm_act {

constexpr int kMaxThreads = 1024;

// More than this many threads have as many vectors as there may be (forward_layout in cuda.cu).
template <int kVectors>
constexpr int kForwardThreads = kVectors >= 4 ? kMaxThreads : 256;

__device__ __forceinline__ int column_of(int vector, int length) {
  return (vector * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x)) * length;
}

// From x, packed, to h, which is written. All of the residual is on its way before any of it is waited for.
template <bool kPlain, int kVectors, typename T>
__device__ __forceinline__ void add_residual(const ForwardPointers<T>& p, const DropoutRow& dropout, int64_t offset,
                                             uint4 (&h)[kVectors]) {
  constexpr int N = kVectorLength<T>;
  uint4 residual[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int column = column_of(v, N);
    if (column < p.columns) residual[v] = load_packed_promoted<T>(p.residual, offset + column);
  }
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int column = column_of(v, N);
    if (column < p.columns) {
      float sum[N], added[N];
      unpack_vector<T>(h[v], added);
      unpack_vector<T>(residual[v], sum);
      if constexpr (!kPlain) {
        if (dropout.drops) drop<N>(dropout, column, added);
      }
#pragma unroll
      for (int i = 0; i < N; ++i) sum[i] += added[i];
      h[v] = pack_vector<T>(sum);
      store_16_bytes(p.h + offset + column, h[v]);
    }
  }
}

template <typename T, int kVectors, bool kPlain>
__global__ void __launch_bounds__(kForwardThreads<kVectors>) forward_vectorized(const ForwardPointers<T> p) {
  constexpr int N = kVectorLength<T>;
  __shared__ float scratch[kMaxWarps];
  __shared__ float2 pairs[kMaxWarps];
  const int64_t row = blockIdx.x * static_cast<int64_t>(blockDim.y) + threadIdx.y;
  if (row >= p.rows) return;  // where a block has several rows, each is of one warp, which meets no other
  const int64_t offset = row_offset(row, p.columns);
  const DropoutRow dropout = dropout_row(kPlain ? DeviceDropout{} : p.dropout, row, p.columns);
  uint4 h[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int column = column_of(v, N);
    if (column < p.columns) h[v] = load_packed_promoted<T>(p.x, offset + column);
  }
  if (p.residual.data != nullptr) add_residual<kPlain>(p, dropout, offset, h);
  const auto for_each = [&](const auto& body) {
    float values[N];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (column_of(v, N) < p.columns) {
        unpack_vector<T>(h[v], values);
#pragma unroll
        for (int i = 0; i < N; ++i) body(values[i]);
      }
    }
  };
  float rounded = 0.0f;
  if (p.mean != nullptr) {
    float sum = 0.0f;
    for_each([&](float value) { sum += value; });
    rounded = reduce_block(sum, Add{}, scratch) / static_cast<float>(p.columns);
  }
  float2 moments = {0.0f, 0.0f};
  for_each([&](float value) { add_moments(value - rounded, moments); });
  moments = reduce_pair(moments, pairs);
  const auto [mean, rstd] = statistics_of(moments, rounded, p.mean != nullptr, p.columns, p.eps);
  if (threadIdx.x == 0) {
    if (p.mean != nullptr) p.mean[row] = mean;
    p.rstd[row] = rstd;
  }
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int column = column_of(v, N);
    if (column < p.columns) {
      float z[N];
      unpack_vector<T>(h[v], z);
#pragma unroll
      for (int i = 0; i < N; ++i) z[i] = (z[i] - mean) * rstd;
      finish<kPlain, T, N>(p, dropout, column, z);
      store_vector<T, N>(p.y + offset + column, z);
    }
  }
}

// The backward holds the shares of both parameters too.
template <int kVectors>
constexpr int kBackwardThreads = kVectors >= 2 ? 512 : 256;
template <int kVectors>
constexpr int kBackwardBlocks = kVectors >= 2 ? 1 : 3;  // of a multiprocessor at least

// dy, h and statistics of one row, on their way while the row before is computed.
template <int kVectors>
struct Loaded {
  uint4 dy[kVectors];
  uint4 h[kVectors];
  float mean;
  float rstd;
};

template <int kVectors, typename T>
__device__ __forceinline__ void load_row(const BackwardPointers<T>& p, int64_t row, Loaded<kVectors>& loaded) {
  constexpr int N = kVectorLength<T>;
  if (row >= p.rows) return;
  const int64_t offset = row_offset(row, p.columns);
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int column = column_of(v, N);
    if (column < p.columns) {
      loaded.dy[v] = load_packed<T>(p.dy + offset + column);
      loaded.h[v] = load_packed<T>(p.h + offset + column);
    }
  }
  loaded.mean = p.mean != nullptr ? p.mean[row] : 0.0f;
  loaded.rstd = p.rstd[row];
}

// g of a row, and its sums: of g, and of g * x_hat.
template <bool kPlain, typename T, int kVectors, int N>
__device__ __forceinline__ float2 make_g(const BackwardPointers<T>& p, const DropoutRow& dropout,
                                         const Loaded<kVectors>& loaded, float (&g)[kVectors][N],
                                         float (&share_of_weight)[kVectors][N], float (&share_of_bias)[kVectors][N]) {
  float2 sums = {0.0f, 0.0f};
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int column = column_of(v, N);
    if (column < p.columns) {
      float x_hat[N], weight[N];
      unpack_vector<T>(loaded.h[v], x_hat);
      unpack_vector<T>(loaded.dy[v], g[v]);
#pragma unroll
      for (int i = 0; i < N; ++i) x_hat[i] = (x_hat[i] - loaded.mean) * loaded.rstd;
      if constexpr (!kPlain) undo_activation<T, N>(p, dropout, column, x_hat, g[v]);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        share_of_weight[v][i] += g[v][i] * x_hat[i];
        share_of_bias[v][i] += g[v][i];
      }
      if (p.weight.data != nullptr) {
        load_as<N>(p.weight, column, weight);
#pragma unroll
        for (int i = 0; i < N; ++i) g[v][i] *= weight[i];
      }
#pragma unroll
      for (int i = 0; i < N; ++i) {
        sums.x += g[v][i];
        sums.y += g[v][i] * x_hat[i];
      }
    }
  }
  return sums;
}

// The rows of a block, each with the same columns, have their shares added here, then written.
template <int kVectors, int N>
__device__ __forceinline__ void store_shares(float* shares, int columns, float (&share)[kVectors][N], float* scratch) {
  if (shares == nullptr) return;
  if (kVectors == 1 && blockDim.y > 1) {
    // Neighbours write neighbours: element i of all threads, then the next.
    const int threads = blockDim.x * blockDim.y, place = threadIdx.y * blockDim.x + threadIdx.x;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < N; ++i) scratch[i * threads + place] = share[0][i];
    __syncthreads();
    if (threadIdx.y != 0) return;
    for (int y = 1; y < blockDim.y; ++y) {
#pragma unroll
      for (int i = 0; i < N; ++i) share[0][i] += scratch[i * threads + y * blockDim.x + threadIdx.x];
    }
  }
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int column = column_of(v, N);
    if (column < columns) store_vector<float, N>(shares + row_offset(blockIdx.x, columns) + column, share[v]);
  }
}

// dx of the rows of one share, and the shares of the parameters in registers until the last of them. A block takes
// blockDim.y rows at a time.
template <typename T, int kVectors, bool kPlain>
__global__ void __launch_bounds__(kBackwardThreads<kVectors>, kBackwardBlocks<kVectors>)
    backward_vectorized(const BackwardPointers<T> p) {
  constexpr int N = kVectorLength<T>;
  __shared__ float2 scratch[2][kMaxWarps];
  __shared__ float rows_of_block[kVectors == 1 ? kBackwardThreads<1> * N : 1];
  const bool needs_rows = p.dx.data != nullptr || p.dresidual.data != nullptr;
  const int64_t step = p.parts * blockDim.y;
  float share_of_weight[kVectors][N] = {}, share_of_bias[kVectors][N] = {};
  Loaded<kVectors> next = {};
  int64_t base = static_cast<int64_t>(blockIdx.x) * blockDim.y;
  load_row(p, base + threadIdx.y, next);
  int turn = 0;
  for (; base < p.rows; base += step, turn ^= 1) {  // all threads of a block meet at the barrier, those without a row too
    const int64_t row = base + threadIdx.y;
    const Loaded<kVectors> loaded = next;
    load_row(p, row + step, next);
    const DropoutRow dropout = dropout_row(kPlain ? DeviceDropout{} : p.dropout, row, p.columns);
    float g[kVectors][N];
    float2 sums = {0.0f, 0.0f};
    if (row < p.rows) sums = make_g<kPlain>(p, dropout, loaded, g, share_of_weight, share_of_bias);
    if (!needs_rows) continue;
    sums = reduce_pair(sums, scratch[turn]);
    if (row >= p.rows) continue;
    const float of_g = p.mean != nullptr ? sums.x / static_cast<float>(p.columns) : 0.0f;
    const float of_product = sums.y / static_cast<float>(p.columns);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int column = column_of(v, N);
      if (column < p.columns) {
        float x_hat[N];
        unpack_vector<T>(loaded.h[v], x_hat);
#pragma unroll
        for (int i = 0; i < N; ++i) {
          g[v][i] = loaded.rstd * (g[v][i] - of_g - (x_hat[i] - loaded.mean) * loaded.rstd * of_product);
        }
        store_gradients<kPlain, T, N>(p, dropout, row_offset(row, p.columns), column, g[v]);
      }
    }
  }
  store_shares(p.weight_shares, p.columns, share_of_weight, rows_of_block);
  store_shares(p.bias_shares, p.columns, share_of_bias, rows_of_block);
}

}  // namespace norm_act
}  // namespace kernel_pytorch
