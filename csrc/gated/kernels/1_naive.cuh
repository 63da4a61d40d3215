// Kernel 1: one thread per element.
#pragma once

#include "kernel_pytorch/cuda/activations.cuh"
#include "kernel_pytorch/cuda/vector.cuh"
#include "kernel_pytorch/index.h"
#include "parameters.cuh"

namespace kernel_pytorch {
namespace gated {

constexpr int kNaiveThreads = 256;

template <Activation A, bool kHalf>
__device__ __forceinline__ float gate_one(float gate, float up, const Sizes& s) {
  const float u = at_least(at_most(up, s.limit), -s.limit);
  return activate<A, kHalf>(at_most(gate, s.limit), s.alpha).value * (u + s.offset);
}

template <Activation A, typename T>
__global__ void __launch_bounds__(kNaiveThreads) forward_naive(const ForwardPointers<T> p) {
  const int64_t index = blockIdx.x * static_cast<int64_t>(kNaiveThreads) + threadIdx.x;
  if (index >= p.sizes.rows * p.sizes.columns) return;
  const int64_t row = index / p.sizes.columns;
  const int64_t at = row_offset(row, p.sizes.stride) + index - row_offset(row, p.sizes.columns);
  p.y[index] = narrow<T>(gate_one<A, kRounded<T>>(widen(p.gate[at]), widen(p.up[at]), p.sizes));
}

}  // namespace gated
}  // namespace kernel_pytorch
