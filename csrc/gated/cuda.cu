// Gated linear units on CUDA: selection and launch of kernels.
//
//     kernels/1_naive.cuh       one thread per element
//     kernels/2_vectorized.cuh  16-byte accesses; backward too

#include "gated.h"
#include "kernel_pytorch/cuda/launch.cuh"
#include "kernels/1_naive.cuh"
#include "kernels/2_vectorized.cuh"

namespace kernel_pytorch {
namespace gated {

namespace {

Sizes sizes_of(const Shape& shape, const Function& function) {
  return {shape.rows,
          shape.columns,
          shape.stride,
          static_cast<float>(function.alpha),
          static_cast<float>(function.limit),
          static_cast<float>(function.offset)};
}

// Whether every vector of `length` elements is aligned.
bool aligned(const Shape& shape, int64_t length, std::initializer_list<const void*> addresses) {
  for (const void* address : addresses) {
    if (reinterpret_cast<uint64_t>(address) % 16 != 0) return false;
  }
  return shape.rows == 1 || (shape.columns % length == 0 && shape.stride % length == 0);
}

// Number of blocks of kernel 2.
int64_t blocks_for(const Shape& shape, int length) {
  return ceil_divide(shape.rows * ceil_divide(shape.columns, length), kThreads);
}

// Calls `launch(activation, type, N)` with compile-time arguments.
template <typename Launch>
cudaError_t with_choices(DType dtype, Activation activation, bool vectors, const Launch& launch) {
  return with_type(dtype, [&](auto type) {
    return with_gate(activation, [&](auto a) {
      constexpr int N = kVectorLength<typename decltype(type)::type>;
      if (vectors) return launch(a, type, std::integral_constant<int, N>{});
      return launch(a, type, std::integral_constant<int, 1>{});
    });
  });
}

}  // namespace

int launch_forward(const Forward& f, int64_t rung, void* stream) {
  if (f.shape.rows == 0 || f.shape.columns == 0) return cudaSuccess;
  if (rung < 0 || rung > 2) return cudaErrorNotSupported;
  const bool vectors = aligned(f.shape, 16 / size_of(f.gate.dtype), {f.gate.data, f.up.data, f.y.data});
  return with_choices(f.gate.dtype, f.function.activation, vectors, [&](auto a, auto type, auto n) {
    using T = typename decltype(type)::type;
    constexpr Activation A = decltype(a)::value;
    constexpr int N = decltype(n)::value;
    const ForwardPointers<T> p = {static_cast<const T*>(f.gate.data), static_cast<const T*>(f.up.data),
                                  static_cast<T*>(f.y.data), sizes_of(f.shape, f.function)};
    const auto on = static_cast<cudaStream_t>(stream);
    if (rung == 1) {
      const int64_t blocks = ceil_divide(f.shape.rows * f.shape.columns, kNaiveThreads);
      if (!fits_grid(blocks)) return cudaErrorInvalidValue;
      forward_naive<A, T><<<static_cast<unsigned>(blocks), kNaiveThreads, 0, on>>>(p);
      return launched();
    }
    const int64_t blocks = blocks_for(f.shape, N);
    if (!fits_grid(blocks)) return cudaErrorInvalidValue;
    forward_vectorized<A, T, N><<<static_cast<unsigned>(blocks), kThreads, 0, on>>>(p);
    return launched();
  });
}

int launch_backward(const Backward& b, void* stream) {
  if (b.shape.rows == 0 || b.shape.columns == 0 || (!b.dgate && !b.dup)) return cudaSuccess;
  const bool vectors = aligned(b.shape, 16 / size_of(b.gate.dtype),
                               {b.dy.data, b.gate.data, b.up.data, b.dgate.data, b.dup.data});
  return with_choices(b.gate.dtype, b.function.activation, vectors, [&](auto a, auto type, auto n) {
    using T = typename decltype(type)::type;
    constexpr int N = decltype(n)::value;
    const BackwardPointers<T> p = {static_cast<const T*>(b.dy.data),  static_cast<const T*>(b.gate.data),
                                   static_cast<const T*>(b.up.data),  static_cast<T*>(b.dgate.data),
                                   static_cast<T*>(b.dup.data),       sizes_of(b.shape, b.function)};
    const int64_t blocks = blocks_for(b.shape, N);
    if (!fits_grid(blocks)) return cudaErrorInvalidValue;
    backward_vectorized<decltype(a)::value, T, N>
        <<<static_cast<unsigned>(blocks), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(p);
    return launched();
  });
}

}  // namespace gated
}  // namespace kernel_pytorch
