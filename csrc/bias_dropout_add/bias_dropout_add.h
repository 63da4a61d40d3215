// Bias, dropout and residual, forward and backward: parameters that operators pass to the CPU and CUDA backends.
//
//     y = residual + dropout(x + bias)
//
//     dx = dropout(dy)        dbias = sum over rows of dx, not rounded        dresidual = dy
//
// First fused by Shoeybi et al., "Megatron-LM", 2019, https://arxiv.org/abs/1909.08053.
//
// All tensors are contiguous. y and dy have one dtype, to which x and the residual promote. On CUDA x, dx, the residual
// and the bias `(columns,)` may each have another dtype. On the CPU x, dx and the residual have that of y, and the bias
// is float64 exactly if y is. Partial sums are float32, or float64 with y.
#pragma once

#include "kernel_pytorch/cpu/isa.h"
#include "kernel_pytorch/dtype.h"
#include "kernel_pytorch/philox.h"

namespace kernel_pytorch {
namespace bias_dropout_add {

struct Forward {
  Input x;
  Input bias;  // optional
  Input residual;
  Output y;
  Dropout dropout;
  int64_t rows;
  int64_t columns;
};

struct Backward {
  Input dy;
  Output dx;      // optional
  Output dbias;   // optional
  Output shares;  // with dbias: partial sums `(parts, columns)`
  Dropout dropout;
  int64_t rows;
  int64_t columns;
  int64_t parts;
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

}  // namespace bias_dropout_add
}  // namespace kernel_pytorch
