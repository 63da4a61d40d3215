// Cross entropy on CUDA: selection and launch of kernels.
//
//     kernels/1_naive.cuh       one thread per row, three passes
//     kernels/2_block.cuh       one block per row, one pass; any length and alignment
//     kernels/3_vectorized.cuh  16-byte accesses

#include <type_traits>

#include "cross_entropy.h"
#include "kernel_pytorch/cuda/launch.cuh"
#include "kernels/1_naive.cuh"
#include "kernels/2_block.cuh"
#include "kernels/3_vectorized.cuh"

namespace kernel_pytorch {
namespace cross_entropy {

namespace {

template <typename T>
bool is_aligned(const void* data, int64_t columns) {
  return rows_are_aligned(reinterpret_cast<uint64_t>(data), columns, sizeof(T));
}

template <typename T, bool kCapped>
cudaError_t run_forward(const Forward& f, int64_t rung, cudaStream_t stream) {
  ForwardPointers<T> p = {};
  p.logits = static_cast<const T*>(f.logits.data);
  p.target = f.target;
  p.loss = static_cast<float*>(f.loss.data);
  p.normalizer = static_cast<float*>(f.normalizer.data);
  p.rows = f.rows;
  p.columns = f.columns;
  p.ignore_index = f.options.ignore_index;
  p.label_smoothing = static_cast<float>(f.options.label_smoothing);
  p.z_loss = static_cast<float>(f.options.z_loss);
  p.softcap = static_cast<float>(f.options.softcap);
  const int best = is_aligned<T>(f.logits.data, f.columns) ? 3 : 2;
  if (rung > best || rung < 0) return cudaErrorNotSupported;
  if (rung == 0) rung = best;
  const auto blocks = static_cast<unsigned>(f.rows);
  if (rung == 1) {
    const auto naive_blocks = static_cast<unsigned>(ceil_divide(f.rows, kNaiveThreads));
    forward_naive<T, kCapped><<<naive_blocks, kNaiveThreads, 0, stream>>>(p);
  } else if (rung == 2) {
    forward_block<T, kCapped><<<blocks, kBlockThreads, 0, stream>>>(p);
  } else {
    forward_vectorized<T, kCapped><<<blocks, kVectorThreads, 0, stream>>>(p);
  }
  return launched();
}

template <typename T, bool kCapped>
cudaError_t run_backward(const Backward& b, cudaStream_t stream) {
  BackwardPointers<T> p = {};
  p.dloss = static_cast<const float*>(b.dloss.data);
  p.normalizer = static_cast<const float*>(b.normalizer.data);
  p.logits = static_cast<const T*>(b.logits.data);
  p.target = b.target;
  p.dlogits = static_cast<T*>(b.dlogits.data);
  p.rows = b.rows;
  p.columns = b.columns;
  p.ignore_index = b.options.ignore_index;
  p.label_smoothing = static_cast<float>(b.options.label_smoothing);
  p.z_loss = static_cast<float>(b.options.z_loss);
  p.softcap = static_cast<float>(b.options.softcap);
  const auto rows = static_cast<unsigned>(b.rows);
  if (is_aligned<T>(b.logits.data, b.columns) && is_aligned<T>(b.dlogits.data, b.columns)) {
    // Four vectors per thread, so that a few rows with large vocabularies also fill the GPU.
    const int64_t vectors = b.columns / kVectorLength<T>;
    const auto shares = static_cast<unsigned>(smaller(larger(1, vectors / (4 * kVectorThreads)), 64));
    backward_vectorized<T, kCapped><<<dim3(rows, shares), kVectorThreads, 0, stream>>>(p);
  } else {
    backward_block<T, kCapped><<<rows, kBlockThreads, 0, stream>>>(p);
  }
  return launched();
}

// Calls `run(Type<T>, std::bool_constant<capped>)`.
template <typename Run>
cudaError_t with_types(DType logits, double softcap, const Run& run) {
  return with_type(logits, [&](auto type) {
    return softcap > 0.0 ? run(type, std::true_type{}) : run(type, std::false_type{});
  });
}

}  // namespace

int launch_forward(const Forward& f, int64_t rung, void* stream) {
  if (f.rows == 0) return cudaSuccess;
  if (!fits_grid(f.rows)) return cudaErrorInvalidValue;
  return with_types(f.logits.dtype, f.options.softcap, [&](auto type, auto capped) {
    return run_forward<typename decltype(type)::type, capped>(f, rung, static_cast<cudaStream_t>(stream));
  });
}

int launch_backward(const Backward& b, void* stream) {
  if (b.rows == 0) return cudaSuccess;
  if (!fits_grid(b.rows)) return cudaErrorInvalidValue;
  return with_types(b.logits.dtype, b.options.softcap, [&](auto type, auto capped) {
    return run_backward<typename decltype(type)::type, capped>(b, static_cast<cudaStream_t>(stream));
  });
}

}  // namespace cross_entropy
}  // namespace kernel_pytorch
