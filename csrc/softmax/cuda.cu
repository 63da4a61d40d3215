// Softmax on CUDA: which kernel is launched.
//
//     kernels/1_naive.cuh        one thread a row
//     kernels/2_block.cuh        one block a row, maximum and sum in one pass; any length and alignment
//     kernels/3_vectorized.cuh   16 bytes an access, the row stays in registers; short rows one warp each
//     kernels/4_cluster.cuh      rows longer than one block holds, by a cluster (9.0 on)
//     kernels/mask_gradient.cuh  the gradient of a mask that is added

#include "kernel_pytorch/cuda/cluster.cuh"
#include "kernel_pytorch/cuda/launch.cuh"
#include "kernel_pytorch/cuda/rows.cuh"
#include "kernels/1_naive.cuh"
#include "kernels/2_block.cuh"
#include "kernels/3_vectorized.cuh"
#include "kernels/4_cluster.cuh"
#include "kernels/mask_gradient.cuh"
#include "softmax.h"

namespace kernel_pytorch {
namespace softmax {

namespace {

constexpr int kWarpsOfRows = 4;
constexpr int64_t kMostColumns = (int64_t{1} << 31) - kMaxThreads;  // a thread's column steps beyond the end once

// Threads and vectors of each for a row in registers: a warp, and several rows a block, as long as that holds it.
struct Layout {
  int each;
  dim3 block;
  unsigned blocks;
};

Layout layout_of(int64_t vectors, int64_t rows) {
  if (vectors <= int64_t{kWarp} * kMaxVectors) {
    const int each = vectors <= kWarp ? 1 : vectors <= 2 * kWarp ? 2 : 4;
    return {each, dim3(kWarp, kWarpsOfRows), static_cast<unsigned>(ceil_divide(rows, kWarpsOfRows))};
  }
  const int each = vectors_each(vectors);
  return {each, dim3(static_cast<unsigned>(threads_for(vectors, each))), static_cast<unsigned>(rows)};
}

// Whether rows are made of whole vectors of 16 bytes.
bool aligned(int64_t columns, int64_t size, std::initializer_list<const void*> addresses) {
  bool found = columns * size % 16 == 0;
  for (const void* address : addresses) found = found && reinterpret_cast<uint64_t>(address) % 16 == 0;
  return found;
}

// Blocks of a cluster for a row; 0 for none.
int cluster_of(int64_t rows, int64_t vectors) {
  const int blocks = cluster_blocks(vectors, int64_t{kMaxVectors} * kClusterThreads);
  return fits_grid(rows * blocks) ? blocks : 0;
}

// The best version for this shape on this card.
int choose(int64_t rows, int64_t vectors, bool whole) {
  if (!whole) return 2;
  if (vectors <= int64_t{kMaxVectors} * kMaxThreads) return 3;
  return cluster_of(rows, vectors) > 0 ? 4 : 2;
}

template <typename T, typename M, typename Y>
cudaError_t run_forward(const Forward& f, int64_t version, cudaStream_t stream) {
  ForwardPointers<T, M, Y> p = {};
  p.x = static_cast<const T*>(f.x.data);
  p.mask = static_cast<const M*>(f.mask.data);
  p.y = static_cast<Y*>(f.y.data);
  p.rows = f.rows;
  p.columns = static_cast<int>(f.columns);
  p.scale = static_cast<float>(f.scale);
  p.broadcast = f.broadcast;
  const int64_t vectors = f.columns / kVectorLength<T>;
  const int best = choose(f.rows, vectors, aligned(f.columns, sizeof(T), {f.x.data, f.mask.data, f.y.data}));
  if (version > best || version < 0) return cudaErrorNotSupported;
  if (version == 0) version = best;
  if (version == 4) {
    const auto kernel = forward_cluster<T, M, Y, kMaxVectors>;
    return launch_clusters(kernel, f.rows, cluster_of(f.rows, vectors), kClusterThreads, stream, p);
  }
  if (version == 3) {
    const Layout layout = layout_of(vectors, f.rows);
    return with_vectors(layout.each, [&](auto count) {
      forward_vectorized<T, M, Y, count><<<layout.blocks, layout.block, 0, stream>>>(p);
      return launched();
    });
  }
  if (version == 2) {
    forward_block<T, M, Y><<<static_cast<unsigned>(f.rows), kBlockThreads, 0, stream>>>(p);
  } else {
    const auto blocks = static_cast<unsigned>(ceil_divide(f.rows, kNaiveThreads));
    forward_naive<T, M, Y><<<blocks, kNaiveThreads, 0, stream>>>(p);
  }
  return launched();
}

template <typename T>
cudaError_t run_backward(const Backward& b, cudaStream_t stream) {
  BackwardPointers<T> p = {};
  p.dy = static_cast<const T*>(b.dy.data);
  p.y = static_cast<const T*>(b.y.data);
  p.dx = static_cast<T*>(b.dx.data);
  p.dots = static_cast<float*>(b.dots.data);
  p.rows = b.rows;
  p.columns = static_cast<int>(b.columns);
  p.scale = static_cast<float>(b.scale);
  const int64_t vectors = b.columns / kVectorLength<T>;
  if (aligned(b.columns, sizeof(T), {b.dy.data, b.y.data, b.dx.data}) &&
      vectors <= int64_t{kMaxVectors} * kBackwardThreads<kMaxVectors>) {
    const Layout layout = layout_of(vectors, b.rows);
    return with_vectors(layout.each, [&](auto count) {
      backward_vectorized<T, count><<<layout.blocks, layout.block, 0, stream>>>(p);
      return launched();
    });
  }
  backward_block<T><<<static_cast<unsigned>(b.rows), kBlockThreads, 0, stream>>>(p);
  return launched();
}

template <typename T>
cudaError_t run_mask_gradient(const Backward& b, cudaStream_t stream) {
  const MaskPointers<T> p = {static_cast<const T*>(b.dy.data),
                             static_cast<const T*>(b.y.data),
                             static_cast<const float*>(b.dots.data),
                             static_cast<float*>(b.dmask.data),
                             static_cast<int>(b.columns),
                             b.broadcast};
  const int64_t tiles = ceil_divide(b.columns, kSumColumns);
  const int64_t blocks = broadcast_rows(b.broadcast) * tiles;
  if (!fits_grid(blocks)) return cudaErrorInvalidValue;
  mask_gradient<T><<<static_cast<unsigned>(blocks), dim3(kSumColumns, kSumRows), 0, stream>>>(
      p, static_cast<unsigned>(tiles));
  return launched();
}

}  // namespace

int launch_forward(const Forward& f, int64_t version, void* stream) {
  if (f.rows == 0) return cudaSuccess;
  if (!fits_grid(f.rows) || f.columns >= kMostColumns) return cudaErrorInvalidValue;
  const auto on = static_cast<cudaStream_t>(stream);
  return with_type(f.x.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    if (f.mask && f.mask.dtype == DType::kBool) return run_forward<T, Bool, T>(f, version, on);
    if (!f.mask || f.mask.dtype == f.x.dtype) return run_forward<T, T, T>(f, version, on);
    if (f.mask.dtype != DType::kFloat32) return cudaErrorInvalidValue;
    return run_forward<T, float, float>(f, version, on);
  });
}

int launch_backward(const Backward& b, void* stream) {
  if (b.rows == 0) return cudaSuccess;
  if (!fits_grid(b.rows) || b.columns >= kMostColumns) return cudaErrorInvalidValue;
  const auto on = static_cast<cudaStream_t>(stream);
  return with_type(b.y.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const cudaError_t error = run_backward<T>(b, on);
    return error == cudaSuccess && b.dmask ? run_mask_gradient<T>(b, on) : error;
  });
}

}  // namespace softmax
}  // namespace kernel_pytorch
