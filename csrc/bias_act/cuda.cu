// Bias and activation on CUDA: selection and launch of kernels.
//
//     kernels/1_naive.cuh       one thread per element
//     kernels/2_vectorized.cuh  16-byte accesses, several loads in flight; backward too

#include "bias_act.h"
#include "kernel_pytorch/cuda/launch.cuh"
#include "kernel_pytorch/cuda/sum_shares.cuh"
#include "kernels/1_naive.cuh"
#include "kernels/2_vectorized.cuh"

namespace kernel_pytorch {
namespace bias_act {

namespace {

// Whether every vector of `length` elements is aligned.
bool aligned(int64_t rows, int64_t columns, int64_t length, std::initializer_list<const void*> addresses) {
  for (const void* address : addresses) {
    if (reinterpret_cast<uint64_t>(address) % 16 != 0) return false;
  }
  return rows == 1 || columns % length == 0;
}

Bias bias_of(const Input& bias) { return {bias.data, bias.dtype == DType::kFloat32}; }

// Calls `launch(activation, type, N)` with compile-time arguments.
template <typename Launch>
cudaError_t with_choices(DType dtype, Activation activation, bool vectors, const Launch& launch) {
  return with_type(dtype, [&](auto type) {
    return with_activation(activation, [&](auto a) {
      constexpr int N = kVectorLength<typename decltype(type)::type>;
      if (vectors) return launch(a, type, std::integral_constant<int, N>{});
      return launch(a, type, std::integral_constant<int, 1>{});
    });
  });
}

template <Activation A, typename T, int N>
cudaError_t run_forward(const Forward& f, int64_t rung, cudaStream_t stream) {
  const ForwardPointers<T> p = {static_cast<const T*>(f.x.data), bias_of(f.bias), static_cast<T*>(f.y.data), f.rows,
                                f.columns};
  if (rung == 1) {
    const int64_t blocks = ceil_divide(f.rows * f.columns, kNaiveThreads);
    if (!fits_grid(blocks)) return cudaErrorInvalidValue;
    forward_naive<A, T><<<static_cast<unsigned>(blocks), kNaiveThreads, 0, stream>>>(p);
    return launched();
  }
  const int64_t blocks = ceil_divide(f.rows * f.columns, int64_t{kThreads} * N * kVectorsEach);
  if (!fits_grid(blocks)) return cudaErrorInvalidValue;
  forward_vectorized<A, T, N><<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(p);
  return launched();
}

template <Activation A, typename T, int N>
cudaError_t run_backward(const Backward& b, cudaStream_t stream) {
  const BackwardPointers<T> p = {static_cast<const T*>(b.dy.data),
                                 static_cast<const T*>(b.x.data),
                                 bias_of(b.bias),
                                 static_cast<T*>(b.dx.data),
                                 static_cast<float*>(b.shares.data),
                                 b.rows,
                                 b.columns,
                                 b.parts};
  const int64_t tiles = ceil_divide(b.columns, int64_t{kShareThreads} * N);
  if (!fits_grid(tiles)) return cudaErrorInvalidValue;
  const dim3 grid(static_cast<unsigned>(tiles), static_cast<unsigned>(b.parts)), block(kShareThreads, kShareRows);
  if (kRounded<T> && (!b.dbias || b.dbias.dtype != DType::kFloat32)) {
    backward_shares<A, T, N, kRounded<T>><<<grid, block, 0, stream>>>(p);
  } else {
    backward_shares<A, T, N, false><<<grid, block, 0, stream>>>(p);
  }
  return launched();
}

}  // namespace

int launch_forward(const Forward& f, int64_t rung, void* stream) {
  if (f.rows == 0) return cudaSuccess;
  if (rung < 0 || rung > 2) return cudaErrorNotSupported;
  const bool vectors =
      aligned(f.bias ? f.rows : 1, f.columns, 16 / size_of(f.x.dtype), {f.x.data, f.bias.data, f.y.data});
  return with_choices(f.x.dtype, f.activation, vectors, [&](auto a, auto type, auto n) {
    return run_forward<decltype(a)::value, typename decltype(type)::type, decltype(n)::value>(
        f, rung, static_cast<cudaStream_t>(stream));
  });
}

int launch_backward(const Backward& b, void* stream) {
  if (!b.dx && !b.dbias) return cudaSuccess;
  if (b.columns >= (int64_t{1} << 31)) return cudaErrorInvalidValue;
  const int64_t length = 16 / size_of(b.dy.dtype);
  const bool vectors = b.columns % length == 0 &&  // for one row too: vectors are always loaded whole
                       aligned(b.rows, b.columns, length,
                               {b.dy.data, b.x.data, b.bias.data, static_cast<const void*>(b.dx.data), b.shares.data});
  const auto on = static_cast<cudaStream_t>(stream);
  const cudaError_t error = with_choices(b.dy.dtype, b.activation, vectors, [&](auto a, auto type, auto n) {
    return run_backward<decltype(a)::value, typename decltype(type)::type, decltype(n)::value>(b, on);
  });
  if (error != cudaSuccess || !b.dbias) return error;
  return launch_sums({static_cast<const float*>(b.shares.data), b.dbias}, {}, b.parts, b.columns, 1, on);
}

}  // namespace bias_act
}  // namespace kernel_pytorch
