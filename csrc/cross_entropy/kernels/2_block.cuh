// Kernel 2: one block per row and one pass: each thread keeps a running maximum and sum, and the block reduces them at
// the end. Supports rows of any length and alignment.
#pragma once

#include "kernel_pytorch/cuda/online_softmax.cuh"
#include "parameters.cuh"

namespace kernel_pytorch {
namespace cross_entropy {

constexpr int kBlockThreads = 256;

template <typename T, bool kCapped>
__global__ void __launch_bounds__(kBlockThreads) forward_block(const ForwardPointers<T> p) {
  __shared__ float scratch[2 * kMaxWarps];
  __shared__ float totals[kMaxWarps];
  const int64_t row = blockIdx.x;
  const T* const logits = p.logits + row_offset(row, p.columns);
  const float pivot = pivot_of<kCapped>(logits, p.softcap);
  OnlineSum softmax;
  float total = 0.0f;
  for (int64_t column = threadIdx.x; column < p.columns; column += kBlockThreads) {
    const float z = cap<kCapped>(widen(logits[column]), p.softcap);
    softmax.add(z);
    total += z - pivot;
  }
  softmax = reduce_online(softmax, scratch);
  total = reduce_block(total, Add{}, totals);
  if (threadIdx.x == 0) write_loss<kCapped>(p, row, softmax, total);
}

template <typename T, bool kCapped>
__global__ void __launch_bounds__(kBlockThreads) backward_block(const BackwardPointers<T> p) {
  const int64_t row = blockIdx.x;
  const int64_t offset = row_offset(row, p.columns);
  const RowGradient g = row_gradient(p, row);
  for (int64_t column = threadIdx.x; column < p.columns; column += kBlockThreads) {
    const float logit = widen(p.logits[offset + column]);
    p.dlogits[offset + column] = narrow<T>(gradient_of<kCapped, kRounded<T>>(g, logit, p.softcap, column));
  }
}

}  // namespace cross_entropy
}  // namespace kernel_pytorch
