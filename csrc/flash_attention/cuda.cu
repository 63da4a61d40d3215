// Flash attention on CUDA: selection and launch of kernels.
//
//     kernels/1_shared_memory.cuh  tiles of keys in shared memory; any dtype, any depth up to 256
//     kernels/2_mma.cuh            both products on tensor cores; 16 bits, depth 64 or 128

#include <type_traits>

#include "flash_attention.h"
#include "kernel_pytorch/cuda/launch.cuh"
#include "kernels/1_shared_memory.cuh"
#include "kernels/2_mma.cuh"

namespace kernel_pytorch {
namespace flash_attention {

namespace {

// Launches a kernel with dynamic shared memory; above 48 KiB CUDA requires an opt-in.
template <typename Kernel, typename Parameters>
cudaError_t launch(Kernel kernel, dim3 grid, int threads, int shared_bytes, cudaStream_t stream, const Parameters& p) {
  if (shared_bytes > 48 * 1024) {
    const auto attribute = cudaFuncAttributeMaxDynamicSharedMemorySize;
    const cudaError_t error =
        cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), attribute, shared_bytes);
    if (error != cudaSuccess) return error;
  }
  kernel<<<grid, threads, shared_bytes, stream>>>(p);
  return launched();
}

template <typename T>
cudaError_t launch_shared_memory(const Pointers<T>& p, int64_t batch_heads, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(ceil_divide(p.queries, kBlockQueries)), static_cast<unsigned>(batch_heads));
  const int bytes = shared_floats(p.depth) * static_cast<int>(sizeof(float));
  const auto kernel = p.depth <= 64    ? forward_shared_memory<T, 2>
                      : p.depth <= 128 ? forward_shared_memory<T, 4>
                                       : forward_shared_memory<T, 8>;
  return launch(kernel, grid, kWarps * kWarp, bytes, stream, p);
}

template <typename T>
cudaError_t launch_mma(const Pointers<T>& p, int64_t batch_heads, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(ceil_divide(p.queries, kMmaQueries)), static_cast<unsigned>(batch_heads));
  if (p.depth == 64) return launch(forward_mma<T, 64>, grid, kMmaThreads, kMmaSharedBytes<T, 64>, stream, p);
  return launch(forward_mma<T, 128>, grid, kMmaThreads, kMmaSharedBytes<T, 128>, stream, p);
}

template <typename T>
cudaError_t run(const Forward& f, int64_t rung, cudaStream_t stream) {
  Pointers<T> p = {};
  p.q = static_cast<const T*>(f.q.data);
  p.k = static_cast<const T*>(f.k.data);
  p.v = static_cast<const T*>(f.v.data);
  p.o = static_cast<T*>(f.o.data);
  p.lse = static_cast<float*>(f.lse.data);
  p.heads = f.heads;
  p.kv_heads = f.kv_heads;
  p.queries = f.queries;
  p.keys = f.keys;
  p.depth = static_cast<int>(f.depth);
  p.scale = static_cast<float>(f.scale);
  p.causal = f.causal;
  bool aligned = true;
  for (const void* address : {f.q.data, f.k.data, f.v.data}) {
    aligned = aligned && reinterpret_cast<uint64_t>(address) % 16 == 0;
  }
  const bool mma = !std::is_same_v<T, float> && aligned && (f.depth == 64 || f.depth == 128);
  const int best = mma ? 2 : 1;
  if (rung > best || rung < 0) return cudaErrorNotSupported;
  if constexpr (!std::is_same_v<T, float>) {
    if (best == 2 && rung != 1) return launch_mma(p, f.batch * f.heads, stream);
  }
  return launch_shared_memory(p, f.batch * f.heads, stream);
}

// Selects `count` batches from batch `first` on.
Forward batches_of(const Forward& f, int64_t first, int64_t count) {
  const int64_t rows = first * f.heads * f.queries, keys = first * f.kv_heads * f.keys;
  const int64_t row_bytes = f.depth * size_of(f.q.dtype);
  Forward part = f;
  part.batch = count;
  part.q.data = static_cast<const char*>(f.q.data) + rows * row_bytes;
  part.k.data = static_cast<const char*>(f.k.data) + keys * row_bytes;
  part.v.data = static_cast<const char*>(f.v.data) + keys * row_bytes;
  part.o.data = static_cast<char*>(f.o.data) + rows * row_bytes;
  part.lse.data = static_cast<char*>(f.lse.data) + rows * size_of(f.lse.dtype);
  return part;
}

}  // namespace

int launch_forward(const Forward& f, int64_t rung, void* stream) {
  const int64_t batch_heads = f.batch * f.heads;
  if (batch_heads == 0 || f.queries == 0) return cudaSuccess;
  if (f.heads > kMostHeads || f.depth > kMostDepth) return cudaErrorInvalidValue;
  const int64_t together = kMostHeads / f.heads;  // batches per launch
  cudaError_t error = cudaSuccess;
  for (int64_t batch = 0; batch < f.batch && error == cudaSuccess; batch += together) {
    const Forward part = batches_of(f, batch, smaller(together, f.batch - batch));
    error = with_type(f.q.dtype, [&](auto type) {
      return run<typename decltype(type)::type>(part, rung, static_cast<cudaStream_t>(stream));
    });
  }
  return error;
}

}  // namespace flash_attention
}  // namespace kernel_pytorch
