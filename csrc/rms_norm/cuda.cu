// RMSNorm on CUDA: selection and launch of kernels.
//
//     kernels/1_naive.cuh       one thread per row
//     kernels/2_block.cuh       one block per row with coalesced accesses; any length and alignment
//     kernels/3_vectorized.cuh  16-byte accesses, the row stays in registers
//     kernels/4_ring.cuh        rows longer than one block holds: a cluster that prefetches the next rows (9.0 on)

#include <type_traits>

#include "kernel_pytorch/cuda/launch.cuh"
#include "kernel_pytorch/cuda/rows.cuh"
#include "kernel_pytorch/cuda/sum_shares.cuh"
#include "kernels/1_naive.cuh"
#include "kernels/2_block.cuh"
#include "kernels/3_vectorized.cuh"
#include "kernels/4_ring.cuh"
#include "rms_norm.h"

namespace kernel_pytorch {
namespace rms_norm {

namespace {

constexpr int kForwardResident = 1024;  // threads of clusters per multiprocessor
constexpr int kLongRow = 8192;          // columns above which blocks of kernel 2 have more threads

template <typename T, typename W, typename Y>
cudaError_t run_forward(const Forward& f, int64_t rung, cudaStream_t stream) {
  ForwardPointers<T, W, Y> p = {};
  p.x = static_cast<const T*>(f.x.data);
  p.residual = static_cast<const T*>(f.residual.data);
  p.weight = static_cast<const W*>(f.weight.data);
  p.y = static_cast<Y*>(f.y.data);
  p.h = static_cast<T*>(f.h.data);
  p.rstd = static_cast<float*>(f.rstd.data);
  p.rows = f.rows;
  p.columns = static_cast<int>(f.columns);
  p.weight_rows = static_cast<int>(f.weight_rows);
  p.eps = static_cast<float>(f.eps);
  p.offset = static_cast<float>(f.offset);
  const auto* const y = static_cast<const void*>(f.y.data);
  const bool whole = made_of_vectors(f.columns, sizeof(T), {f.x.data, f.residual.data, f.weight.data, y});
  const RowLayout layout = layout_of(f.columns / kVectorLength<T>, f.residual ? kAddLengths : kForwardLengths, most_blocks());
  const int best = !whole || layout.cluster == 0 ? 2 : layout.cluster > 1 ? 4 : 3;
  if (rung > best || rung < 0 || (rung == 3 && best == 4)) return cudaErrorNotSupported;
  if (rung == 0) rung = best;
  if (rung == 1) {
    const auto blocks = static_cast<unsigned>(ceil_divide(f.rows, kNaiveThreads));
    forward_naive<T, W, Y><<<blocks, kNaiveThreads, 0, stream>>>(p);
    return launched();
  }
  const auto in_blocks = [&] {
    forward_block<T, W, Y><<<static_cast<unsigned>(f.rows), kBlockThreads, 0, stream>>>(p);
    return launched();
  };
  if (rung == 2) return in_blocks();
  if (rung == 3) {
    const auto blocks = static_cast<unsigned>(ceil_divide(f.rows, layout.rows));
    return with_vectors<8>(layout.each, [&](auto count) {
      forward_vectorized<T, W, Y, count><<<blocks, block_of(layout), 0, stream>>>(p);
      return launched();
    });
  }
  const auto run = [&](auto count, auto residual) {
    constexpr int kWords = residual ? 2 : 1;
    const auto kernel = forward_ring<T, W, Y, count, residual>;
    const int bytes = ring_bytes(kForwardSlots<count, kWords>, kWords, layout.threads);
    if (!has_shared(kernel, bytes)) return in_blocks();
    const int64_t teams = smaller(f.rows, teams_of(layout, kForwardResident));
    return launch_clusters(kernel, teams, layout.cluster, layout.threads, bytes, stream, p);
  };
  return with_cluster_vectors<8>(layout.each, [&](auto count) {
    return f.residual ? run(count, std::true_type{}) : run(count, std::false_type{});
  });
}

template <typename T, typename W, typename Y>
cudaError_t run_backward(const Backward& b, cudaStream_t stream) {
  BackwardPointers<T, W, Y> p = {};
  p.dy = static_cast<const Y*>(b.dy.data);
  p.dh = static_cast<const T*>(b.dh.data);
  p.h = static_cast<const T*>(b.h.data);
  p.weight = static_cast<const W*>(b.weight.data);
  p.rstd = static_cast<const float*>(b.rstd.data);
  p.dx = static_cast<T*>(b.dx.data);
  p.shares = static_cast<float*>(b.shares.data);
  p.rows = b.rows;
  p.parts = b.parts;
  p.columns = static_cast<int>(b.columns);
  p.weight_rows = static_cast<int>(b.weight_rows);
  p.offset = static_cast<float>(b.offset);
  const auto* const dx = static_cast<const void*>(b.dx.data);
  const bool whole = made_of_vectors(b.columns, sizeof(T), {b.dy.data, b.dh.data, b.h.data, b.weight.data, dx});
  constexpr Lengths kLengths = backward_lengths(sizeof(T));
  const RowLayout layout = layout_of(b.columns / kVectorLength<T>, kLengths, most_blocks());
  const auto in_blocks = [&] {
    if (p.rows > 0 && p.dx != nullptr) {
      const int threads = p.columns > kLongRow ? kMostBlockThreads : kBlockThreads;
      backward_block<T, W, Y><<<static_cast<unsigned>(p.rows), threads, 0, stream>>>(p);
    }
    if (p.shares != nullptr) {
      const auto blocks = static_cast<unsigned>(ceil_divide(p.columns, kBlockThreads) * p.parts);
      backward_columns<T, W, Y><<<blocks, kBlockThreads, 0, stream>>>(p);
    }
    return launched();
  };
  const auto in_clusters = [&](auto count, auto adds) {
    constexpr int kWords = kBackwardWords<T, Y, adds>;
    const auto kernel = backward_ring<T, W, Y, count, adds>;
    const int bytes = ring_bytes(kBackwardSlots<kWords>, kWords, layout.threads);
    if (!has_shared(kernel, bytes)) return in_blocks();
    return launch_clusters(kernel, b.parts, layout.cluster, layout.threads, bytes, stream, p);
  };
  cudaError_t error;
  if (!whole || layout.cluster == 0) {
    error = in_blocks();
  } else if (layout.cluster > 1) {
    error = with_cluster_vectors<kLengths.most_cluster_each>(layout.each, [&](auto count) {
      return p.dh != nullptr && p.dx != nullptr ? in_clusters(count, std::true_type{}) : in_clusters(count, std::false_type{});
    });
  } else {
    error = with_vectors<2>(layout.each, [&](auto count) {
      backward_vectorized<T, W, Y, count><<<static_cast<unsigned>(b.parts), block_of(layout), 0, stream>>>(p);
      return launched();
    });
  }
  if (error != cudaSuccess || !b.dweight) return error;
  return launch_sums({p.shares, b.dweight}, {}, b.parts, b.columns, p.weight_rows, stream);
}

// Calls `run(Type<T>, Type<W>, Type<Y>)`: the weight has the dtype of x or float32, and y has either of these.
template <typename Run>
cudaError_t with_types(DType x, DType weight, DType y, const Run& run) {
  return with_type(x, [&](auto t) {
    using T = typename decltype(t)::type;
    if (weight == x && y == x) return run(Type<T>{}, Type<T>{}, Type<T>{});
    if (weight != DType::kFloat32) return cudaErrorInvalidValue;
    if (y == x) return run(Type<T>{}, Type<float>{}, Type<T>{});
    return run(Type<T>{}, Type<float>{}, Type<float>{});
  });
}

}  // namespace

int launch_forward(const Forward& f, int64_t rung, void* stream) {
  if (f.rows == 0) return cudaSuccess;
  if (!fits_grid(f.rows) || f.columns >= (int64_t{1} << 31)) return cudaErrorInvalidValue;
  const DType x = f.residual ? f.h.dtype : f.x.dtype;
  return with_types(x, f.weight ? f.weight.dtype : x, f.y.dtype, [&](auto t, auto w, auto y) {
    return run_forward<typename decltype(t)::type, typename decltype(w)::type, typename decltype(y)::type>(
        f, rung, static_cast<cudaStream_t>(stream));
  });
}

int launch_backward(const Backward& b, void* stream) {
  if (!fits_grid(b.rows) || b.columns >= (int64_t{1} << 31)) return cudaErrorInvalidValue;
  return with_types(b.h.dtype, b.weight ? b.weight.dtype : b.h.dtype, b.dy.dtype, [&](auto t, auto w, auto y) {
    return run_backward<typename decltype(t)::type, typename decltype(w)::type, typename decltype(y)::type>(
        b, static_cast<cudaStream_t>(stream));
  });
}

}  // namespace rms_norm
}  // namespace kernel_pytorch
