// Cross entropy of logits, forward and backward: the parameters that operators pass to the CPU and CUDA backends.
//
//     z = logits, or softcap * tanh(logits / softcap)
//     most = max(z),  log_sum = log(sum(exp(z - most))),  lse = most + log_sum
//     loss = log_sum - (1 - s) (z[target] - most) - s (mean(z) - most) + z_loss lse^2
//     dlogits = dloss * ((1 + 2 z_loss lse) exp(z - most - log_sum) - s / V - (1 - s) [target]) * (1 - (z / softcap)^2)
//
// most and log_sum are stored separately, and logits are subtracted from most, never from lse: for large logits, lse
// would lose the digits of its logarithm. NaN and infinity among the logits make the loss NaN: the maximum ignores NaN,
// the sum propagates it.
//
// s is the label smoothing (Szegedy et al., 2016, https://arxiv.org/abs/1512.00567), z_loss keeps lse near zero
// (Chowdhery et al., 2022, https://arxiv.org/abs/2204.02311), the cap bounds logits (Gemma Team, 2024,
// https://arxiv.org/abs/2408.00118). One pass computes both the maximum and the sum (Milakov and Gimelshein, 2018,
// https://arxiv.org/abs/1805.02867).
//
// All tensors are contiguous, targets int64. A token whose target is `ignore_index` or outside the vocabulary has zero
// loss and zero gradient for any logits. loss, normalizer and dloss are float32, or float64 if the logits are.
#pragma once

#include "kernel_pytorch/cpu/isa.h"
#include "kernel_pytorch/dtype.h"
#include "kernel_pytorch/index.h"

namespace kernel_pytorch {
namespace cross_entropy {

struct Options {
  int64_t ignore_index;
  double label_smoothing;
  double z_loss;
  double softcap;  // 0 without a cap
};

struct Forward {
  Input logits;
  const int64_t* target;
  Output loss;
  Output normalizer;  // (rows, 2): most, log_sum
  int64_t rows;
  int64_t columns;
  Options options;
};

struct Backward {
  Input dloss;
  Input normalizer;
  Input logits;
  const int64_t* target;
  Output dlogits;  // may share memory with the logits
  int64_t rows;
  int64_t columns;
  Options options;
};

// Whether a token has a loss.
KP_HOST_DEVICE bool counts(int64_t target, int64_t columns, const Options& options) {
  return target != options.ignore_index && target >= 0 && target < columns;
}

// CPU backend: rows `begin` to `end`.
KP_DECLARE_FOR_EACH_ISA(void forward(const Forward&, int64_t begin, int64_t end))
KP_DECLARE_FOR_EACH_ISA(void backward(const Backward&, int64_t begin, int64_t end))

// CUDA backend: returns 0 or CUDA's error code. `rung` is a file number in kernels/, 0 for the best for shape and GPU.
int launch_forward(const Forward&, int64_t rung, void* stream);
int launch_backward(const Backward&, void* stream);

}  // namespace cross_entropy
}  // namespace kernel_pytorch
