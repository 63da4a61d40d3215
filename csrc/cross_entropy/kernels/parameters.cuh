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
  float* lse;
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
  const float* lse;
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

// The loss of a row, whose capped logits add up to `total`. Logits are taken from their maximum, not from lse: where they
// are large, that has no digits left of its logarithm.
template <bool kCapped, typename T>
__device__ __forceinline__ void write_loss(const ForwardPointers<T>& p, int64_t row, OnlineSum softmax, float total) {
  const float lse = softmax.log_sum_exp();
  p.lse[row] = lse;
  const int64_t target = p.target[row];
  float loss = 0.0f;
  if (has_loss(p, target)) {
    const float picked = cap<kCapped>(widen(p.logits[row_offset(row, p.columns) + target]), p.softcap);
    loss = (1.0f - p.label_smoothing) * (softmax.most - picked) + logf(softmax.sum);
    if (p.label_smoothing > 0.0f) {
      loss += p.label_smoothing * (softmax.most - total / static_cast<float>(p.columns));
    }
    if (p.z_loss > 0.0f) loss += p.z_loss * lse * lse;
  }
  p.loss[row] = loss;
}

// What the gradient of a row is made of, the same for all its logits.
struct RowGradient {
  float dloss;
  float lse;
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
  g.lse = p.lse[row];
  g.factor = 1.0f + 2.0f * p.z_loss * g.lse;
  g.shared = p.label_smoothing / static_cast<float>(p.columns);
  g.own = 1.0f - p.label_smoothing;
  g.target = p.target[row];
  g.nothing = !has_loss(p, g.target) || g.dloss == 0.0f;
  return g;
}

// kHalf: what becomes of it is rounded to 16 bits.
template <bool kCapped, bool kHalf>
__device__ __forceinline__ float gradient_of(const RowGradient& g, float logit, float softcap, int64_t column) {
  if (g.nothing) return 0.0f;
  const float squashed = kCapped ? tanhf(logit / softcap) : 0.0f;
  const float z = kCapped ? softcap * squashed : logit;
  float gradient = (exponential<kHalf>(z - g.lse) * g.factor - g.shared) - (column == g.target ? g.own : 0.0f);
  if (kCapped) gradient *= 1.0f - squashed * squashed;
  return gradient * g.dloss;
}

}  // namespace cross_entropy
}  // namespace kernel_pytorch
