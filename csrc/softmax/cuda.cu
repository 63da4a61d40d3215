// Softmax on CUDA: selection and launch of kernels.
//
//     kernels/1_naive.cuh        one thread per row
//     kernels/2_block.cuh        one block per row, maximum and sum in one pass; any length and alignment; backward too
//     kernels/3_vectorized.cuh   16-byte accesses, the row stays in registers; one warp per short row
//     kernels/4_ring.cuh         rows longer than one block holds: a cluster that prefetches the next rows (9.0 on)
//     kernels/mask_gradient.cuh  gradient of an additive mask

#include "kernel_pytorch/cuda/launch.cuh"
#include "kernel_pytorch/cuda/rows.cuh"
#include "kernels/1_naive.cuh"
#include "kernels/2_block.cuh"
#include "kernels/3_vectorized.cuh"
#include "kernels/4_ring.cuh"
#include "kernels/mask_gradient.cuh"
#include "softmax.h"

namespace kernel_pytorch {
namespace softmax {

namespace {

constexpr int64_t kMostColumns = (int64_t{1} << 31) - 4096;  // a thread's column exceeds the end at most once

// From measurements on an H200. Scores are floats in registers for every dtype: at most 32 of them per thread.
template <typename T>
constexpr Lengths kForwardLengths =
    sizeof(T) == 2 ? Lengths{{32, 512, 2048, 2048}, 4, 512} : Lengths{{32, 512, 2048, 4096}, 4, 512};
constexpr Lengths kBackwardLengths = {{32, 512, 2048, 2048}, 4, 512};
template <typename T>
constexpr int kMostEach = sizeof(T) == 2 ? 4 : 8;
constexpr int kResident = 1024;  // threads of clusters per multiprocessor

// Threads of a part of a warp take two vectors each if there are four, so that fewer threads have to reduce.
template <typename T>
RowLayout forward_layout(int64_t columns) {
  constexpr Lengths kLengths = kForwardLengths<T>;
  const RowLayout layout = layout_of(columns / kVectorLength<T>, kLengths, most_blocks());
  if (layout.each > 1 || layout.threads < 4 || layout.threads > kWarp) return layout;
  return {2, layout.threads / 2, 2 * layout.rows, 1};
}

// Launch configuration of kernel 2.
struct BlockLayout {
  unsigned blocks;
  dim3 threads;
};

BlockLayout block_layout(int64_t rows, int64_t columns, int64_t length) {
  constexpr int kRowsOfShort = 8;
  const int64_t warps = ceil_divide(columns, length * kVectorsAtOnce * kWarp);
  const auto threads = static_cast<unsigned>(smaller(kBlockThreads, larger(1, warps) * kWarp));
  const unsigned of_block = threads == kWarp ? kRowsOfShort : 1;
  return {static_cast<unsigned>(ceil_divide(rows, of_block)), dim3(threads, of_block)};
}

template <typename T, typename M, typename Y>
cudaError_t run_forward(const Forward& f, int64_t rung, cudaStream_t stream) {
  ForwardPointers<T, M, Y> p = {};
  p.x = static_cast<const T*>(f.x.data);
  p.mask = static_cast<const M*>(f.mask.data);
  p.y = static_cast<Y*>(f.y.data);
  p.rows = f.rows;
  p.columns = static_cast<int>(f.columns);
  p.scale = static_cast<float>(f.scale);
  p.broadcast = f.broadcast;
  const bool whole = made_of_vectors(f.columns, sizeof(T), {f.x.data, f.mask.data, f.y.data});
  const RowLayout layout = forward_layout<T>(f.columns);
  const int best = !whole || layout.cluster == 0 ? 2 : layout.cluster > 1 ? 4 : 3;
  if (rung > best || rung < 0 || (rung == 3 && best == 4)) return cudaErrorNotSupported;
  if (rung == 0) rung = best;
  if (rung == 1) {
    const auto blocks = static_cast<unsigned>(ceil_divide(f.rows, kNaiveThreads));
    forward_naive<T, M, Y><<<blocks, kNaiveThreads, 0, stream>>>(p);
    return launched();
  }
  const auto in_blocks = [&] {
    const BlockLayout of_blocks = block_layout(f.rows, f.columns, kVectorLength<T>);
    forward_block<T, M, Y><<<of_blocks.blocks, of_blocks.threads, 0, stream>>>(p);
    return launched();
  };
  if (rung == 2) return in_blocks();
  if (rung == 3) {
    const auto blocks = static_cast<unsigned>(ceil_divide(f.rows, layout.rows));
    return with_vectors<kMostEach<T>>(layout.each, [&](auto count) {
      forward_vectorized<T, M, Y, count><<<blocks, block_of(layout), 0, stream>>>(p);
      return launched();
    });
  }
  return with_cluster_vectors<8>(layout.each, [&](auto count) {
    const auto kernel = forward_ring<T, M, Y, count>;
    const int bytes = ring_bytes(kSlots<count, 1>, 1, layout.threads);
    if (!has_shared(kernel, bytes)) return in_blocks();
    const int64_t teams = smaller(f.rows, teams_of(layout, kResident));
    return launch_clusters(kernel, teams, layout.cluster, layout.threads, bytes, stream, p);
  });
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
  const bool whole = made_of_vectors(b.columns, sizeof(T), {b.dy.data, b.y.data, b.dx.data});
  const RowLayout layout = layout_of(b.columns / kVectorLength<T>, kBackwardLengths, most_blocks());
  const auto in_blocks = [&] {
    const BlockLayout of_blocks = block_layout(b.rows, b.columns, kVectorLength<T>);
    backward_block<T><<<of_blocks.blocks, of_blocks.threads, 0, stream>>>(p);
    return launched();
  };
  if (!whole || layout.cluster == 0) return in_blocks();
  if (layout.cluster == 1) {
    const auto blocks = static_cast<unsigned>(ceil_divide(b.rows, layout.rows));
    return with_vectors<4>(layout.each, [&](auto count) {
      backward_vectorized<T, count><<<blocks, block_of(layout), 0, stream>>>(p);
      return launched();
    });
  }
  return with_cluster_vectors<8>(layout.each, [&](auto count) {
    const auto kernel = backward_ring<T, count>;
    const int bytes = ring_bytes(kSlots<count, 2>, 2, layout.threads);
    if (!has_shared(kernel, bytes)) return in_blocks();
    const int64_t teams = smaller(b.rows, teams_of(layout, kResident));
    return launch_clusters(kernel, teams, layout.cluster, layout.threads, bytes, stream, p);
  });
}

template <typename T, typename M>
cudaError_t run_mask_gradient(const Backward& b, cudaStream_t stream) {
  const MaskPointers<T, M> p = {static_cast<const T*>(b.dy.data),
                                static_cast<const T*>(b.y.data),
                                static_cast<const float*>(b.dots.data),
                                static_cast<M*>(b.dmask.data),
                                static_cast<int>(b.columns),
                                b.broadcast};
  const auto launch = [&](auto n) {
    const int64_t vectors = ceil_divide(b.columns, n), uses = broadcast_uses(b.broadcast);
    unsigned rows = 1, threads = 32;
    while (rows < kMostSumRows && rows < uses) rows *= 2;
    while (threads * rows < kSumThreads && threads < vectors) threads *= 2;
    const int64_t tiles = ceil_divide(vectors, threads), blocks = broadcast_rows(b.broadcast) * tiles;
    if (!fits_grid(blocks)) return cudaErrorInvalidValue;
    mask_gradient<T, M, n>
        <<<static_cast<unsigned>(blocks), dim3(threads, rows), 0, stream>>>(p, static_cast<unsigned>(tiles));
    return launched();
  };
  if (made_of_vectors(b.columns, sizeof(T), {b.dy.data, b.y.data, b.dmask.data})) {
    return launch(std::integral_constant<int, kVectorLength<T>>{});
  }
  return launch(std::integral_constant<int, 1>{});
}

}  // namespace

int launch_forward(const Forward& f, int64_t rung, void* stream) {
  if (f.rows == 0) return cudaSuccess;
  if (!fits_grid(f.rows) || f.columns >= kMostColumns) return cudaErrorInvalidValue;
  const auto on = static_cast<cudaStream_t>(stream);
  return with_type(f.x.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    if (f.mask && f.mask.dtype == DType::kBool) return run_forward<T, Bool, T>(f, rung, on);
    if (!f.mask || f.mask.dtype == f.x.dtype) return run_forward<T, T, T>(f, rung, on);
    if (f.mask.dtype != DType::kFloat32) return cudaErrorInvalidValue;
    return run_forward<T, float, float>(f, rung, on);
  });
}

int launch_backward(const Backward& b, void* stream) {
  if (b.rows == 0) return cudaSuccess;
  if (!fits_grid(b.rows) || b.columns >= kMostColumns) return cudaErrorInvalidValue;
  const auto on = static_cast<cudaStream_t>(stream);
  return with_type(b.y.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const cudaError_t error = run_backward<T>(b, on);
    if (error != cudaSuccess || !b.dmask) return error;
    return b.dmask.dtype == DType::kFloat32 ? run_mask_gradient<T, float>(b, on) : run_mask_gradient<T, T>(b, on);
  });
}

}  // namespace softmax
}  // namespace kernel_pytorch
