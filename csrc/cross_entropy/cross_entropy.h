// Cross entropy of logits, forward and backward: what the operator hands to whoever computes it.
//
//     z = logits, or softcap * tanh(logits / softcap)
//     lse = log(sum(exp(z)))
//     loss = lse - (1 - s) z[target] - s mean(z) + z_loss lse^2
//     dlogits = dloss * ((1 + 2 z_loss lse) exp(z - lse) - s / V - (1 - s) [target]) * (1 - (z / softcap)^2)
//
// s is the label smoothing (Szegedy et al., 2016, https://arxiv.org/abs/1512.00567), z_loss keeps lse near zero (Chowdhery
// et al., 2022, https://arxiv.org/abs/2204.02311), the cap bounds logits (Gemma Team, 2024,
// https://arxiv.org/abs/2408.00118). The maximum and the sum are taken in one walk (Milakov and Gimelshein, 2018,
// https://arxiv.org/abs/1805.02867).
//
// All tensors are contiguous, targets int64. A token whose target is `ignore_index` or no word has no loss and no
// gradient, whatever its logits are; neither has one whose dloss is zero. loss, lse and dloss are float32, or float64 if
// the logits are.
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
  double softcap;  // 0 for none
};

struct Forward {
  Input logits;
  const int64_t* target;
  Output loss;
  Output lse;
  int64_t rows;
  int64_t columns;
  Options options;
};

struct Backward {
  Input dloss;
  Input lse;
  Input logits;
  const int64_t* target;
  Output dlogits;  // may be the logits
  int64_t rows;
  int64_t columns;
  Options options;
};

// Whether a token has a loss.
KP_HOST_DEVICE bool counts(int64_t target, int64_t columns, const Options& options) {
  return target != options.ignore_index && target >= 0 && target < columns;
}

// The twin: rows `begin` to `end`.
KP_DECLARE_FOR_EACH_ISA(void forward(const Forward&, int64_t begin, int64_t end))
KP_DECLARE_FOR_EACH_ISA(void backward(const Backward&, int64_t begin, int64_t end))

// CUDA: 0 or CUDA's error code. `version` is a number of kernels/, 0 for the best for shape and architecture.
int launch_forward(const Forward&, int64_t version, void* stream);
int launch_backward(const Backward&, void* stream);

}  // namespace cross_entropy
}  // namespace kernel_pytorch
