// From a layout of rows to a launch.
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

// `launch(std::integral_constant<int, each>)`, up to `kMost`.
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

// The same for a row that clusters share: four vectors a thread, or eight where so many are allowed.
template <int kMost, typename Launch>
cudaError_t with_cluster_vectors(int each, const Launch& launch) {
  if constexpr (kMost == 8) {
    if (each == 8) return launch(std::integral_constant<int, 8>{});
  }
  return launch(std::integral_constant<int, 4>{});
}

// Whether vectors of 16 bytes make up every row.
[[maybe_unused]] bool made_of_vectors(int64_t columns, int64_t size, std::initializer_list<const void*> addresses) {
  bool found = columns * size % 16 == 0;
  for (const void* address : addresses) found = found && reinterpret_cast<uint64_t>(address) % 16 == 0;
  return found;
}

}  // namespace
}  // namespace kernel_pytorch
