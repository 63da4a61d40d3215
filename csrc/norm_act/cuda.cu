// Norm, residual, dropout and activation on CUDA: selection and launch of kernels.
//
//     kernels/1_naive.cuh       one thread per row
//     kernels/2_block.cuh       one block per row with coalesced accesses; any length and alignment; backward too
//     kernels/3_vectorized.cuh  16-byte accesses, the row stays in registers; backward too, in turns of two vectors if
//                               there is an activation (kernels/activated_rows.cuh)
//     kernels/4_ring.cuh        rows longer than one block holds: a cluster that prefetches the next rows (9.0 on);
//                               backward too

#include <type_traits>

#include "kernel_pytorch/cuda/launch.cuh"
#include "kernel_pytorch/cuda/rows.cuh"
#include "kernel_pytorch/cuda/sum_shares.cuh"
#include "kernels/1_naive.cuh"
#include "kernels/2_block.cuh"
#include "kernels/3_vectorized.cuh"
#include "kernels/4_ring.cuh"
#include "norm_act.h"

namespace kernel_pytorch {
namespace norm_act {

namespace {

constexpr int kForwardResident = 1024;  // threads of clusters per multiprocessor
constexpr int kLongRow = 8192;          // columns above which blocks of kernel 2 have more threads

template <Kind kKind>
using KindConstant = std::integral_constant<Kind, kKind>;

// Calls `run(KindConstant<...>)`. `typed`: all tensors have the type of the kernel.
template <typename Run>
cudaError_t with_kind(bool typed, const Norm& norm, const Run& run) {
  if (!typed) return run(KindConstant<Kind::kAny>{});
  return is_plain(norm) ? run(KindConstant<Kind::kPlain>{}) : run(KindConstant<Kind::kTyped>{});
}

// Same for kernels that have no variant for Kind::kTyped.
template <typename Run>
cudaError_t with_kind_of_ring(bool typed, const Norm& norm, const Run& run) {
  return typed && is_plain(norm) ? run(KindConstant<Kind::kPlain>{}) : run(KindConstant<Kind::kAny>{});
}

template <typename Tensor>
bool has_type(const Tensor& tensor, DType type) {
  return !tensor || tensor.dtype == type;
}

template <typename T>
ForwardPointers<T> pointers_of(const Forward& f) {
  ForwardPointers<T> p = {};
  p.x = f.x;
  p.residual = f.residual;
  p.weight = f.weight;
  p.bias = f.bias;
  p.y = static_cast<T*>(f.y.data);
  p.h = static_cast<T*>(f.h.data);
  p.mean = static_cast<float*>(f.mean.data);
  p.rstd = static_cast<float*>(f.rstd.data);
  p.dropout = on_device(f.norm.dropout);
  p.rows = f.norm.rows;
  p.columns = static_cast<int>(f.norm.columns);
  p.eps = static_cast<float>(f.norm.eps);
  p.activation = f.norm.activation;
  return p;
}

template <typename T>
cudaError_t run_forward(const Forward& f, int64_t rung, cudaStream_t stream) {
  const ForwardPointers<T> p = pointers_of<T>(f);
  const DType type = f.y.dtype;
  const bool whole = made_of_vectors(f.norm.columns, sizeof(T), {f.x.data, f.residual.data, f.weight.data, f.bias.data,
                                                                 f.y.data, f.h.data});
  const bool same = has_type(f.x, type) && has_type(f.residual, type);
  const bool typed = same && has_type(f.weight, type) && has_type(f.bias, type);
  const Lengths& lengths = f.residual ? kAddLengths : kForwardLengths;
  const RowLayout layout = layout_of(f.norm.columns / kVectorLength<T>, lengths, most_blocks());
  const int best = !whole || layout.cluster == 0 || (layout.cluster > 1 && !same) ? 2 : layout.cluster > 1 ? 4 : 3;
  if (rung < 0 || rung > best || (rung == 3 && best == 4)) return cudaErrorNotSupported;
  if (rung == 0) rung = best;
  if (rung == 1) {
    const auto blocks = static_cast<unsigned>(ceil_divide(p.rows, kNaiveThreads));
    forward_naive<T><<<blocks, kNaiveThreads, 0, stream>>>(p);
    return launched();
  }
  const auto in_blocks = [&] {
    forward_block<T><<<static_cast<unsigned>(p.rows), kBlockThreads, 0, stream>>>(p);
    return launched();
  };
  if (rung == 2) return in_blocks();
  if (rung == 3) {
    const auto blocks = static_cast<unsigned>(ceil_divide(p.rows, layout.rows));
    return with_kind(typed, f.norm, [&](auto kind) {
      return with_vectors<4>(layout.each, [&](auto count) {
        forward_vectorized<T, count, kind><<<blocks, block_of(layout), 0, stream>>>(p);
        return launched();
      });
    });
  }
  const auto run = [&](auto count, auto residual, auto kind) {
    constexpr int kWordsOfSlot = residual ? 2 : 1;
    const auto kernel = forward_ring<T, count, residual, kind>;
    const int bytes = ring_bytes(kForwardSlots<count, kWordsOfSlot>, kWordsOfSlot, layout.threads);
    if (!has_shared(kernel, bytes)) return in_blocks();
    const int64_t teams = smaller(p.rows, teams_of(layout, kForwardResident));
    return launch_clusters(kernel, teams, layout.cluster, layout.threads, bytes, stream, p);
  };
  return with_kind_of_ring(typed, f.norm, [&](auto kind) {
    constexpr std::integral_constant<int, 4> kFour;
    if (f.residual) return run(kFour, std::true_type{}, kind);
    return with_cluster_vectors<8>(layout.each, [&](auto count) { return run(count, std::false_type{}, kind); });
  });
}

template <typename T>
BackwardPointers<T> pointers_of(const Backward& b) {
  BackwardPointers<T> p = {};
  p.dy = static_cast<const T*>(b.dy.data);
  p.dh = static_cast<const T*>(b.dh.data);
  p.h = static_cast<const T*>(b.h.data);
  p.weight = b.weight;
  p.bias = b.bias;
  p.mean = static_cast<const float*>(b.mean.data);
  p.rstd = static_cast<const float*>(b.rstd.data);
  p.dx = b.dx;
  p.dresidual = b.dresidual;
  p.weight_shares = static_cast<float*>(b.weight_shares.data);
  p.bias_shares = static_cast<float*>(b.bias_shares.data);
  p.dropout = on_device(b.norm.dropout);
  p.rows = b.norm.rows;
  p.parts = b.parts;
  p.columns = static_cast<int>(b.norm.columns);
  p.adds = b.norm.adds;
  const auto rounded = [](const Output& sum) { return !sum || sum.dtype != DType::kFloat32; };
  p.rounded = rounded(b.dweight) && rounded(b.dbias);
  p.activation = b.norm.activation;
  return p;
}

template <typename T>
cudaError_t run_backward(const Backward& b, int64_t rung, cudaStream_t stream) {
  const BackwardPointers<T> p = pointers_of<T>(b);
  const DType type = b.h.dtype;
  const bool whole = made_of_vectors(b.norm.columns, sizeof(T), {b.dy.data, b.dh.data, b.h.data, b.weight.data, b.bias.data,
                                                                 b.dx.data, b.dresidual.data});
  const bool typed = has_type(b.weight, type) && has_type(b.bias, type) && has_type(b.dx, type) &&
                     has_type(b.dresidual, type) && has_type(b.dweight, type) && has_type(b.dbias, type);
  const Lengths& lengths = is_plain(b.norm) ? kBackwardLengths : kActivatedLengths;
  const RowLayout layout = layout_of(b.norm.columns / kVectorLength<T>, lengths, most_blocks());
  const int64_t best = !whole || layout.cluster == 0 ? 2 : layout.cluster > 1 ? 4 : 3;
  if (rung < 0 || rung == 1 || rung > best || (rung == 3 && best == 4)) return cudaErrorNotSupported;
  if (rung == 0) rung = best;
  const auto in_blocks = [&] {
    if (p.rows > 0 && (p.dx.data != nullptr || p.dresidual.data != nullptr)) {
      const int threads = p.columns > kLongRow ? kMostBlockThreads : kBlockThreads;
      backward_block<T><<<static_cast<unsigned>(p.rows), threads, 0, stream>>>(p);
    }
    if (p.weight_shares != nullptr || p.bias_shares != nullptr) {
      const auto blocks = static_cast<unsigned>(ceil_divide(p.columns, kBlockThreads) * p.parts);
      backward_columns<T><<<blocks, kBlockThreads, 0, stream>>>(p);
    }
    return launched();
  };
  const auto in_clusters = [&](auto count, auto kind) {
    const auto launch = [&](auto adds) {
      const auto kernel = backward_ring<T, count, kind, adds>;
      const int bytes = ring_bytes(kBackwardSlots<adds>, kBackwardWords<adds>, layout.threads);
      if (!has_shared(kernel, bytes)) return in_blocks();
      return launch_clusters(kernel, p.parts, layout.cluster, layout.threads, bytes, stream, p);
    };
    const bool adds = p.dh != nullptr && (p.dx.data != nullptr || p.dresidual.data != nullptr);
    return adds ? launch(std::true_type{}) : launch(std::false_type{});
  };
  cudaError_t error;
  if (rung == 2) {
    error = in_blocks();
  } else if (layout.cluster > 1) {
    error = with_kind_of_ring(typed, b.norm, [&](auto kind) {
      if (layout.each == 2) return in_clusters(std::integral_constant<int, 2>{}, kind);
      if constexpr (kind == Kind::kPlain) return in_clusters(std::integral_constant<int, 4>{}, kind);
      return in_blocks();  // parameters of other types leave too few registers for that much of a row
    });
  } else {
    error = with_kind(typed, b.norm, [&](auto kind) {
      return with_vectors<2>(layout.each, [&](auto count) {
        const auto kernel = backward_vectorized<T, count, kind>;
        constexpr int kBytes = kBackwardBytes<T, count, kind>, kMostWarps = kMostBackwardThreads<count, kind> / kWarp;
        const cudaError_t refused = allow_shared(kernel, kMostWarps * kBytes);
        if (refused != cudaSuccess) return refused;
        const int bytes = layout.threads * layout.rows / kWarp * kBytes;
        kernel<<<static_cast<unsigned>(p.parts), block_of(layout), bytes, stream>>>(p);
        return launched();
      });
    });
  }
  if (error != cudaSuccess) return error;
  return launch_sums({p.weight_shares, b.dweight}, {p.bias_shares, b.dbias}, p.parts, p.columns, 1, stream);
}

}  // namespace

int launch_forward(const Forward& f, int64_t rung, void* stream) {
  if (f.norm.rows == 0) return cudaSuccess;
  if (!fits_grid(f.norm.rows) || f.norm.columns >= (int64_t{1} << 31)) return cudaErrorInvalidValue;
  return with_type(f.y.dtype, [&](auto type) {
    return run_forward<typename decltype(type)::type>(f, rung, static_cast<cudaStream_t>(stream));
  });
}

int launch_backward(const Backward& b, int64_t rung, void* stream) {
  if (!b.dx && !b.dresidual && !b.dweight && !b.dbias) return cudaSuccess;
  if (!fits_grid(b.norm.rows) || b.norm.columns >= (int64_t{1} << 31)) return cudaErrorInvalidValue;
  return with_type(b.h.dtype, [&](auto type) {
    return run_backward<typename decltype(type)::type>(b, rung, static_cast<cudaStream_t>(stream));
  });
}

}  // namespace norm_act
}  // namespace kernel_pytorch
