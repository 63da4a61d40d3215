// Parameters of the cross entropy kernels, and functions that they share.
#pragma once

#include <cstdint>

#include "../cross_entropy.h"
#include "kernel_pytorch/cuda/online_softmax.cuh"
#include "kernel_pytorch/cuda/math.cuh"
#include "kernel_pytorch/cuda/vector.cuh"

namespace kernel_pytorch {
namespace cross_entropy {

template <typename T>
struct ForwardPointers {
  const T* logits;
  const int64_t* target;
  float* loss;
  float* normalizer;
  int64_t rows;
  int64_t columns;
  int64_t ignore_index;
  float label_smoothing;
  float z_loss;
  float softcap;  // 0 without a cap
};

template <typename T>
struct BackwardPointers {
  const float* dloss;
  const float* normalizer;
  const T* logits;
  const int64_t* target;
  T* dlogits;
  int64_t rows;
  int64_t columns;
  int64_t ignore_index;
  float label_smoothing;
  float z_loss;
  float softcap;
};

template <bool kCapped>
__device__ __forceinline__ float cap(float logit, float softcap) {
  return kCapped ? softcap * tanhf(logit / softcap) : logit;
}

template <typename Pointers>
__device__ __forceinline__ bool has_loss(const Pointers& p, int64_t target) {
  return target != p.ignore_index && target >= 0 && target < p.columns;
}

// An element of the row that is subtracted from the others before summing: large logits would lose their differences.
template <bool kCapped, typename T>
__device__ __forceinline__ float pivot_of(const T* logits, float softcap) {
  const float first = cap<kCapped>(widen(logits[0]), softcap);
  return fabsf(first) < INFINITY ? first : 0.0f;
}

// Computes and stores the loss of a row; `total` is the sum of its capped logits minus `pivot_of` the row.
template <bool kCapped, typename T>
__device__ __forceinline__ void write_loss(const ForwardPointers<T>& p, int64_t row, OnlineSum softmax, float total) {
  const float log_sum = logf(softmax.sum), lse = softmax.most + log_sum;
  p.normalizer[2 * row] = softmax.most;
  p.normalizer[2 * row + 1] = log_sum;
  const int64_t target = p.target[row];
  float loss = 0.0f;
  if (has_loss(p, target)) {
    const T* const logits = p.logits + row_offset(row, p.columns);
    const float picked = cap<kCapped>(widen(logits[target]), p.softcap);
    loss = (1.0f - p.label_smoothing) * (softmax.most - picked) + log_sum;
    if (p.label_smoothing > 0.0f) {
      const float pivot = pivot_of<kCapped>(logits, p.softcap);
      loss += p.label_smoothing * ((softmax.most - pivot) - total / static_cast<float>(p.columns));
    }
    if (p.z_loss > 0.0f) loss += p.z_loss * lse * lse;
  }
  p.loss[row] = loss;
}

// Values of a row's gradient that all of its logits share.
struct RowGradient {
  float dloss;
  float most;
  float log_sum;
  float factor;  // multiplies the softmax
  float shared;  // subtracted for every logit
  float own;     // also subtracted for the target
  int64_t target;
  bool nothing;  // no loss and no gradient, for any logits
};

template <typename T>
__device__ __forceinline__ RowGradient row_gradient(const BackwardPointers<T>& p, int64_t row) {
  RowGradient g;
  g.dloss = p.dloss[row];
  g.most = p.normalizer[2 * row];
  g.log_sum = p.normalizer[2 * row + 1];
  g.factor = 1.0f + 2.0f * p.z_loss * (g.most + g.log_sum);
  g.shared = p.label_smoothing / static_cast<float>(p.columns);
  g.own = 1.0f - p.label_smoothing;
  g.target = p.target[row];
  g.nothing = !has_loss(p, g.target);
  return g;
}

// kHalf: the result is rounded to 16 bits.
template <bool kCapped, bool kHalf>
__device__ __forceinline__ float gradient_of(const RowGradient& g, float logit, float softcap, int64_t column) {
  if (g.nothing) return 0.0f;
  const float squashed = kCapped ? tanhf(logit / softcap) : 0.0f;
  const float z = kCapped ? softcap * squashed : logit;
  float gradient = (exponential<kHalf>((z - g.most) - g.log_sum) * g.factor - g.shared) - (column == g.target ? g.own : 0.0f);
  if (kCapped) gradient *= 1.0f - squashed * squashed;
  return gradient * g.dloss;
}

}  // namespace cross_entropy
}  // namespace kernel_pytorch
