// Bias, dropout and residual on CUDA: selection and launch of kernels.
//
//     kernels/1_naive.cuh       one thread per element
//     kernels/2_vectorized.cuh  16-byte accesses; backward too

#include <type_traits>

#include "bias_dropout_add.h"
#include "kernel_pytorch/cuda/launch.cuh"
#include "kernel_pytorch/cuda/sum_shares.cuh"
#include "kernels/1_naive.cuh"
#include "kernels/2_vectorized.cuh"

namespace kernel_pytorch {
namespace bias_dropout_add {

namespace {

// Whether every 16-byte vector of elements of `type` is aligned.
bool aligned(int64_t columns, DType type, std::initializer_list<Input> tensors) {
  if (columns % (16 / size_of(type)) != 0) return false;
  for (const Input& tensor : tensors) {
    if (reinterpret_cast<uint64_t>(tensor.data) % 16 != 0) return false;
  }
  return true;
}

// Calls `launch(type, N)` with compile-time arguments.
template <typename Launch>
cudaError_t with_choices(DType dtype, bool vectors, const Launch& launch) {
  return with_type(dtype, [&](auto type) {
    constexpr int N = kVectorLength<typename decltype(type)::type>;
    if (vectors) return launch(type, std::integral_constant<int, N>{});
    return launch(type, std::integral_constant<int, 1>{});
  });
}

template <typename T, int N>
cudaError_t run_forward(const Forward& f, int64_t rung, cudaStream_t stream) {
  const ForwardPointers<T> p = {f.x, f.bias, f.residual, static_cast<T*>(f.y.data), on_device(f.dropout), f.rows, f.columns};
  if (rung == 1) {
    const int64_t blocks = ceil_divide(f.rows * f.columns, kNaiveThreads);
    if (!fits_grid(blocks)) return cudaErrorInvalidValue;
    forward_naive<T><<<static_cast<unsigned>(blocks), kNaiveThreads, 0, stream>>>(p);
    return launched();
  }
  const int64_t blocks = ceil_divide(f.rows * f.columns, int64_t{kThreads} * N);
  if (!fits_grid(blocks)) return cudaErrorInvalidValue;
  forward_vectorized<T, N><<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(p);
  return launched();
}

template <typename T, int N>
cudaError_t run_backward(const Backward& b, cudaStream_t stream) {
  const BackwardPointers<T> p = {static_cast<const T*>(b.dy.data),
                                 b.dx,
                                 static_cast<float*>(b.shares.data),
                                 on_device(b.dropout),
                                 b.rows,
                                 b.columns,
                                 b.parts};
  const int64_t tiles = ceil_divide(b.columns, int64_t{kShareThreads} * N);
  if (!fits_grid(tiles)) return cudaErrorInvalidValue;
  const dim3 grid(static_cast<unsigned>(tiles), static_cast<unsigned>(b.parts));
  backward_shares<T, N><<<grid, dim3(kShareThreads, kShareRows), 0, stream>>>(p);
  return launched();
}

}  // namespace

int launch_forward(const Forward& f, int64_t rung, void* stream) {
  if (f.rows == 0) return cudaSuccess;
  if (rung < 0 || rung > 2) return cudaErrorNotSupported;
  const bool vectors = aligned(f.columns, f.y.dtype, {f.x, f.bias, f.residual, f.y});
  return with_choices(f.y.dtype, vectors, [&](auto type, auto n) {
    return run_forward<typename decltype(type)::type, decltype(n)::value>(f, rung, static_cast<cudaStream_t>(stream));
  });
}

int launch_backward(const Backward& b, void* stream) {
  if (!b.dx && !b.dbias) return cudaSuccess;
  if (b.columns >= (int64_t{1} << 31)) return cudaErrorInvalidValue;
  const bool vectors = aligned(b.columns, b.dy.dtype, {b.dy, b.dx, b.shares});
  const auto on = static_cast<cudaStream_t>(stream);
  const cudaError_t error = with_choices(b.dy.dtype, vectors, [&](auto type, auto n) {
    return run_backward<typename decltype(type)::type, decltype(n)::value>(b, on);
  });
  if (error != cudaSuccess) return error;
  return launch_sums({static_cast<const float*>(b.shares.data), b.dbias}, {}, b.parts, b.columns, 1, on);
}

}  // namespace bias_dropout_add
}  // namespace kernel_pytorch
