// Bias and activation, forward and backward: parameters that operators pass to the CPU and CUDA backends.
//
//     y = activation(x + bias)        dx = dy * activation'(x + bias)        dbias = sum over rows of dx, not rounded
//
// First fused by Shoeybi et al., "Megatron-LM", 2019, https://arxiv.org/abs/1909.08053.
//
// All tensors are contiguous; x, y, dy and dx have one dtype. The bias is `(columns,)`, of any dtype, but float64
// exactly if the others are. Partial sums are float32, or float64 with the others.
#pragma once

#include "kernel_pytorch/activation.h"
#include "kernel_pytorch/cpu/isa.h"
#include "kernel_pytorch/dtype.h"
#include "kernel_pytorch/index.h"

namespace kernel_pytorch {
namespace bias_act {

struct Forward {
  Input x;
  Input bias;  // optional
  Output y;
  int64_t rows;
  int64_t columns;
  Activation activation;
};

struct Backward {
  Input dy;
  Input x;     // missing for the identity
  Input bias;  // optional
  Output dx;   // optional
  Output dbias;   // optional
  Output shares;  // with dbias: partial sums `(parts, columns)`
  int64_t rows;
  int64_t columns;
  int64_t parts;
  Activation activation;
};

constexpr int64_t kTileColumns = 4096;

// CPU backend: tiles `begin` to `end` of a forward, of kTileColumns; parts `begin` to `end` of a backward; columns
// `begin` to `end` of the sum of the partial sums.
KP_DECLARE_FOR_EACH_ISA(void forward(const Forward&, int64_t begin, int64_t end))
KP_DECLARE_FOR_EACH_ISA(void backward(const Backward&, int64_t begin, int64_t end))
KP_DECLARE_FOR_EACH_ISA(void add_shares(const Backward&, int64_t begin, int64_t end))

// CUDA backend: returns 0 or CUDA's error code. `rung` is a file number in kernels/, 0 for the best for shape and GPU.
int launch_forward(const Forward&, int64_t rung, void* stream);
int launch_backward(const Backward&, void* stream);

}  // namespace bias_act
}  // namespace kernel_pytorch
