// How rows that stay in registers are laid over threads.
#pragma once

#include <cuda_runtime.h>

#include <type_traits>

#include "kernel_pytorch/cuda/reduce.cuh"
#include "kernel_pytorch/index.h"

namespace kernel_pytorch {
namespace {

constexpr int kMaxVectors = 4;  // of a thread: more registers than that keep too few warps on a multiprocessor

// Threads for `vectors` of 16 bytes, `each` of them a thread: whole warps.
[[maybe_unused]] int threads_for(int64_t vectors, int each) {
  return static_cast<int>(ceil_divide(ceil_divide(vectors, each), kWarp) * kWarp);
}

// Vectors a thread: as few as fill at most 256 threads, so that several rows are on a multiprocessor.
[[maybe_unused]] int vectors_each(int64_t vectors) {
  for (const int each : {1, 2, 4}) {
    if (threads_for(vectors, each) <= 256) return each;
  }
  return kMaxVectors;
}

template <typename Launch>
cudaError_t with_vectors(int each, const Launch& launch) {
  switch (each) {
    case 1:
      return launch(std::integral_constant<int, 1>{});
    case 2:
      return launch(std::integral_constant<int, 2>{});
    default:
      return launch(std::integral_constant<int, kMaxVectors>{});
  }
}

}  // namespace
}  // namespace kernel_pytorch
