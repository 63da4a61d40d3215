// Launch configuration from a row layout.
#pragma once

#include <cuda_runtime.h>

#include <type_traits>

#include "kernel_pytorch/cuda/cluster.cuh"
#include "kernel_pytorch/cuda/layout.h"

namespace kernel_pytorch {
namespace {

[[maybe_unused]] dim3 block_of(const RowLayout& layout) {
  return dim3(static_cast<unsigned>(layout.threads), static_cast<unsigned>(layout.rows));
}

// Calls `launch(std::integral_constant<int, each>)`, for `each` up to `kMost`.
template <int kMost, typename Launch>
cudaError_t with_vectors(int each, const Launch& launch) {
  if (each == 1) return launch(std::integral_constant<int, 1>{});
  if constexpr (kMost >= 8) {
    if (each == 8) return launch(std::integral_constant<int, 8>{});
  }
  if constexpr (kMost >= 4) {
    if (each == 4) return launch(std::integral_constant<int, 4>{});
  }
  return launch(std::integral_constant<int, 2>{});
}

// Same for rows that a cluster shares: four vectors per thread, or eight if `kMost` is 8.
template <int kMost, typename Launch>
cudaError_t with_cluster_vectors(int each, const Launch& launch) {
  if constexpr (kMost == 8) {
    if (each == 8) return launch(std::integral_constant<int, 8>{});
  }
  return launch(std::integral_constant<int, 4>{});
}

// Whether every row consists of aligned 16-byte vectors.
[[maybe_unused]] bool made_of_vectors(int64_t columns, int64_t size, std::initializer_list<const void*> addresses) {
  bool found = columns * size % 16 == 0;
  for (const void* address : addresses) found = found && reinterpret_cast<uint64_t>(address) % 16 == 0;
  return found;
}

}  // namespace
}  // namespace kernel_pytorch
