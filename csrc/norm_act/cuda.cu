// Norm, residual, dropout and activation on CUDA: which kernel is launched.
//
//     kernels/1_naive.cuh       one thread a row
//     kernels/2_block.cuh       one block a row: neighbours read neighbours; any length and alignment; backward too
//     kernels/3_vectorized.cuh  16 bytes an access, the row stays in registers; backward too

#include <type_traits>

#include "kernel_pytorch/cuda/launch.cuh"
#include "kernel_pytorch/cuda/sum_shares.cuh"
#include "kernels/1_naive.cuh"
#include "kernels/2_block.cuh"
#include "kernels/3_vectorized.cuh"
#include "norm_act.h"

namespace kernel_pytorch {
namespace norm_act {

namespace {

// How rows of vectors are laid over a block: `each` vectors a thread, `threads` a row, so many rows; 0 vectors for a row
// that it cannot hold. It goes by the columns alone, so that no row's result depends on how many rows there are.
struct Layout {
  int each;
  int threads;
  int rows;
};

int whole_warps(int64_t vectors, int each) {
  return static_cast<int>(ceil_divide(vectors, int64_t{each} * kWarp) * kWarp);
}

Layout forward_layout(int64_t vectors) {
  for (const int each : {1, 2, 4}) {
    if (vectors <= each * kWarp) return {each, kWarp, 4};
  }
  for (const int each : {1, 2}) {
    if (vectors <= int64_t{each} * kForwardThreads<2>) return {each, whole_warps(vectors, each), 1};
  }
  return vectors <= int64_t{4} * kForwardThreads<4> ? Layout{4, whole_warps(vectors, 4), 1} : Layout{};
}

Layout backward_layout(int64_t vectors) {
  if (vectors <= kBackwardThreads<1>) {
    const int threads = whole_warps(vectors, 1);
    return {1, threads, kBackwardThreads<1> / threads};
  }
  return vectors <= int64_t{2} * kBackwardThreads<2> ? Layout{2, whole_warps(vectors, 2), 1} : Layout{};
}

// Whether every vector of 16 bytes of a row is aligned; a narrower tensor beside it is aligned to what is read of it.
bool aligned(int64_t columns, DType type, std::initializer_list<Input> tensors) {
  if (columns % (16 / size_of(type)) != 0) return false;
  for (const Input& tensor : tensors) {
    if (reinterpret_cast<uint64_t>(tensor.data) % 16 != 0) return false;
  }
  return true;
}

bool is_plain(const Norm& norm) { return norm.activation == Activation::kIdentity && !norm.dropout; }

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

template <typename T, int kVectors>
cudaError_t launch_vectorized(const ForwardPointers<T>& p, const Layout& layout, bool plain, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(ceil_divide(p.rows, layout.rows));
  const dim3 threads(static_cast<unsigned>(layout.threads), static_cast<unsigned>(layout.rows));
  if (plain) {
    forward_vectorized<T, kVectors, true><<<blocks, threads, 0, stream>>>(p);
  } else {
    forward_vectorized<T, kVectors, false><<<blocks, threads, 0, stream>>>(p);
  }
  return launched();
}

template <typename T>
cudaError_t run_forward(const Forward& f, int64_t version, cudaStream_t stream) {
  const ForwardPointers<T> p = pointers_of<T>(f);
  const bool whole = aligned(f.norm.columns, f.y.dtype, {f.x, f.residual, f.weight, f.bias, f.y, f.h});
  const Layout layout = whole ? forward_layout(f.norm.columns / kVectorLength<T>) : Layout{};
  const int64_t best = layout.each > 0 ? 3 : 2;
  if (version < 0 || version > best) return cudaErrorNotSupported;
  if (version == 0) version = best;
  if (version == 1) {
    const auto blocks = static_cast<unsigned>(ceil_divide(p.rows, kNaiveThreads));
    forward_naive<T><<<blocks, kNaiveThreads, 0, stream>>>(p);
    return launched();
  }
  if (version == 2) {
    forward_block<T><<<static_cast<unsigned>(p.rows), kBlockThreads, 0, stream>>>(p);
    return launched();
  }
  const bool plain = is_plain(f.norm);
  if (layout.each == 1) return launch_vectorized<T, 1>(p, layout, plain, stream);
  if (layout.each == 2) return launch_vectorized<T, 2>(p, layout, plain, stream);
  return launch_vectorized<T, 4>(p, layout, plain, stream);
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

template <typename T, int kVectors>
cudaError_t launch_vectorized(const BackwardPointers<T>& p, const Layout& layout, bool plain, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(p.parts);
  const dim3 threads(static_cast<unsigned>(layout.threads), static_cast<unsigned>(layout.rows));
  if (plain) {
    backward_vectorized<T, kVectors, true><<<blocks, threads, 0, stream>>>(p);
  } else {
    backward_vectorized<T, kVectors, false><<<blocks, threads, 0, stream>>>(p);
  }
  return launched();
}

template <typename T>
cudaError_t run_backward(const Backward& b, int64_t version, cudaStream_t stream) {
  BackwardPointers<T> p = pointers_of<T>(b);
  const bool whole = aligned(b.norm.columns, b.h.dtype, {b.dy, b.dh, b.h, b.weight, b.bias, b.dx, b.dresidual,
                                                         b.weight_shares, b.bias_shares});
  const Layout layout = whole ? backward_layout(b.norm.columns / kVectorLength<T>) : Layout{};
  const int64_t best = layout.each > 0 ? 3 : 2;
  if (version < 0 || version == 1 || version > best) return cudaErrorNotSupported;
  if (version == 0) version = best;
  cudaError_t error;
  if (version == 2) {
    backward_block<T><<<static_cast<unsigned>(p.parts), kBlockThreads, 0, stream>>>(p);
    error = launched();
  } else {
    p.parts = larger(1, smaller(p.parts, ceil_divide(p.rows, layout.rows)));
    const bool plain = is_plain(b.norm);
    error = layout.each == 1 ? launch_vectorized<T, 1>(p, layout, plain, stream)
                             : launch_vectorized<T, 2>(p, layout, plain, stream);
  }
  if (error != cudaSuccess) return error;
  return launch_sums({p.weight_shares, b.dweight}, {p.bias_shares, b.dbias}, p.parts, p.columns, 1, stream);
}

}  // namespace

int launch_forward(const Forward& f, int64_t version, void* stream) {
  if (f.norm.rows == 0) return cudaSuccess;
  if (!fits_grid(f.norm.rows) || f.norm.columns >= (int64_t{1} << 31)) return cudaErrorInvalidValue;
  return with_type(f.y.dtype, [&](auto type) {
    return run_forward<typename decltype(type)::type>(f, version, static_cast<cudaStream_t>(stream));
  });
}

int launch_backward(const Backward& b, int64_t version, void* stream) {
  if (!b.dx && !b.dresidual && !b.dweight && !b.dbias) return cudaSuccess;
  if (!fits_grid(b.parts) || b.norm.columns >= (int64_t{1} << 31)) return cudaErrorInvalidValue;
  return with_type(b.h.dtype, [&](auto type) {
    return run_backward<typename decltype(type)::type>(b, version, static_cast<cudaStream_t>(stream));
  });
}

}  // namespace norm_act
}  // namespace kernel_pytorch
