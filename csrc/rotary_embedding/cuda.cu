// Rotary position embedding on CUDA: selection and launch of kernels.
//
// Heads are numbered through those of q, then those of k, so one launch rotates both.
//
//     kernels/1_naive.cuh       one thread per head
//     kernels/2_pairs.cuh       one thread per pair: coalesced accesses; any length and alignment
//     kernels/3_vectorized.cuh  16-byte accesses, two per thread and head; cos and sin are read once for several heads

#include <type_traits>

#include "kernel_pytorch/cuda/launch.cuh"
#include "kernels/1_naive.cuh"
#include "kernels/2_pairs.cuh"
#include "kernels/3_vectorized.cuh"
#include "rotary_embedding.h"

namespace kernel_pytorch {
namespace rotary_embedding {

namespace {

// Whether heads consist of slots of two vectors of N elements (rotated and passed columns), with aligned addresses.
template <int N, typename T, typename C>
bool is_vectorizable(const Pointers<T, C>& p) {
  constexpr int kBytes = N * sizeof(T);
  const auto starts_at = [](const void* address, int bytes) { return reinterpret_cast<uint64_t>(address) % bytes == 0; };
  const auto is_aligned = [&](const HeadPointers<T>& side) {
    return side.heads == 0 || (side.strides.token % N == 0 && side.strides.head % N == 0 && starts_at(side.x, kBytes) &&
                               starts_at(side.y, kBytes));
  };
  const bool whole = p.pairs % N == 0 && p.columns % (2 * N) == 0 && p.columns / (2 * N) <= kVectorThreads;
  return whole && is_aligned(p.q) && is_aligned(p.k) && starts_at(p.cos, 16) && starts_at(p.sin, 16);
}

template <typename T, typename C, bool kInterleaved, int N, int kHeads>
cudaError_t launch_vectorized(const Pointers<T, C>& p, cudaStream_t stream) {
  const int slots = p.columns / (2 * N);
  const dim3 block(slots, kVectorThreads / slots);
  const int64_t blocks = ceil_divide(count_groups<kHeads>(p), block.y);
  if (!fits_grid(blocks)) return cudaErrorInvalidValue;
  rotate_vectorized<T, C, kInterleaved, N, kHeads><<<static_cast<unsigned>(blocks), block, 0, stream>>>(p);
  return launched();
}

// Each thread processes several heads if there are enough threads even then.
template <typename T, typename C, bool kInterleaved, int N>
cudaError_t run_vectorized(const Pointers<T, C>& p, cudaStream_t stream) {
  constexpr int kHeads = N * sizeof(T) == 16 ? 2 : 4;
  const bool grouped = p.q.heads >= kHeads || p.k.heads >= kHeads;
  const bool many = grouped && count_groups<1>(p) * p.columns >= int64_t{kManyThreads} * 2 * N * kHeads;
  if (many) return launch_vectorized<T, C, kInterleaved, N, kHeads>(p, stream);
  return launch_vectorized<T, C, kInterleaved, N, 1>(p, stream);
}

template <typename T, typename C, bool kInterleaved>
cudaError_t run(const Pointers<T, C>& p, int64_t rung, cudaStream_t stream) {
  constexpr int N = kVectorLength<T>;
  const bool whole = is_vectorizable<N>(p), half = is_vectorizable<N / 2>(p);
  const int64_t best = whole || half ? 3 : 2;
  if (rung > best || rung < 0) return cudaErrorNotSupported;
  if (rung == 0) rung = best;
  if (rung == 3 && whole) return run_vectorized<T, C, kInterleaved, N>(p, stream);
  if (rung == 3) return run_vectorized<T, C, kInterleaved, N / 2>(p, stream);
  const int threads = rung == 2 ? kPairThreads : kNaiveThreads;
  const int64_t heads = count_groups<1>(p);
  const int64_t blocks = ceil_divide(rung == 2 ? heads * (p.columns - p.pairs) : heads, threads);
  if (!fits_grid(blocks)) return cudaErrorInvalidValue;
  const auto grid = static_cast<unsigned>(blocks);
  if (rung == 1) {
    rotate_naive<T, C, kInterleaved><<<grid, threads, 0, stream>>>(p);
  } else {
    rotate_pairs<T, C, kInterleaved><<<grid, threads, 0, stream>>>(p);
  }
  return launched();
}

template <typename T>
HeadPointers<T> pointers_of(const Side& side) {
  return {static_cast<const T*>(side.x.data), static_cast<T*>(side.y.data), side.strides, static_cast<int>(side.heads)};
}

template <typename T, typename C>
cudaError_t run_types(const Arguments& a, int64_t rung, cudaStream_t stream) {
  Pointers<T, C> p = {};
  p.q = pointers_of<T>(a.sides[0]);
  p.k = pointers_of<T>(a.sides[1]);
  p.cos = static_cast<const C*>(a.rotation.cos.data);
  p.sin = static_cast<const C*>(a.rotation.sin.data);
  p.positions = a.positions;
  p.tokens = a.tokens;
  p.table_rows = a.rotation.rows;
  p.columns = static_cast<int>(a.columns);
  p.pairs = static_cast<int>(a.rotation.pairs);
  p.sign = a.rotation.transposed ? -1.0f : 1.0f;
  return a.rotation.interleaved ? run<T, C, true>(p, rung, stream) : run<T, C, false>(p, rung, stream);
}

}  // namespace

int launch(const Arguments& a, int64_t rung, void* stream) {
  if (a.tokens == 0) return cudaSuccess;
  if (a.columns >= (int64_t{1} << 30)) return cudaErrorInvalidValue;
  for (const Side& side : a.sides) {
    if (side.heads >= (int64_t{1} << 31)) return cudaErrorInvalidValue;
  }
  return with_type(a.sides[0].x.dtype, [&](auto t) {
    using T = typename decltype(t)::type;
    const auto cuda_stream = static_cast<cudaStream_t>(stream);
    if (a.rotation.cos.dtype == a.sides[0].x.dtype) return run_types<T, T>(a, rung, cuda_stream);
    if (a.rotation.cos.dtype != DType::kFloat32) return cudaErrorInvalidValue;
    return run_types<T, float>(a, rung, cuda_stream);
  });
}

}  // namespace rotary_embedding
}  // namespace kernel_pytorch
