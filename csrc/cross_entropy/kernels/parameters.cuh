// What every kernel of cross entropy is given, and what they share.
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
  float softcap;  // 0 for none
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

// A number of a row to sum the others relative to: of large logits their differences would be lost in the sum.
template <bool kCapped, typename T>
__device__ __forceinline__ float pivot_of(const T* logits, float softcap) {
  const float first = cap<kCapped>(widen(logits[0]), softcap);
  return fabsf(first) < INFINITY ? first : 0.0f;
}

// The loss of a row, whose capped logits less `pivot_of` it add up to `total`.
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

// What the gradient of a row is made of, the same for all its logits.
struct RowGradient {
  float dloss;
  float most;
  float log_sum;
  float factor;  // of the softmax
  float shared;  // taken off every logit
  float own;     // taken off the target's too
  int64_t target;
  bool nothing;  // no loss, no gradient, whatever the logits are
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

// kHalf: what becomes of it is rounded to 16 bits.
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
