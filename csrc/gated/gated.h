// Gated linear units, forward and backward: parameters that operators pass to the CPU and CUDA backends.
//
//     y = activation(z) * (u + offset)       z = min(gate, limit), u = clamp(up, -limit, limit)
//
//     dgate = dy * (u + offset) * activation'(z), 0 if gate > limit
//     dup = dy * activation(z), 0 if |up| > limit
//
// activation is z * sigmoid(alpha * z), gelu, gelu_tanh or relu. Shazeer, "GLU Variants Improve Transformer", 2020,
// https://arxiv.org/abs/2002.05202.
//
// All tensors have one dtype. y and dy are contiguous. Rows of gate and up, and of their gradients, start `stride`
// elements apart: columns, or 2 * columns if each row holds gate and then up.
#pragma once

#include "kernel_pytorch/activation.h"
#include "kernel_pytorch/cpu/isa.h"
#include "kernel_pytorch/dtype.h"
#include "kernel_pytorch/index.h"

namespace kernel_pytorch {
namespace gated {

struct Shape {
  int64_t rows;
  int64_t columns;
  int64_t stride;
};

struct Function {
  Activation activation;
  double alpha;
  double limit;  // infinity without a limit
  double offset;
};

struct Forward {
  Input gate;
  Input up;
  Output y;
  Shape shape;
  Function function;
};

struct Backward {
  Input dy;
  Input gate;
  Input up;
  Output dgate;  // optional
  Output dup;    // optional
  Shape shape;
  Function function;
};

constexpr int64_t kTileColumns = 4096;

// CPU backend: tiles `begin` to `end`, of kTileColumns.
KP_DECLARE_FOR_EACH_ISA(void forward(const Forward&, int64_t begin, int64_t end))
KP_DECLARE_FOR_EACH_ISA(void backward(const Backward&, int64_t begin, int64_t end))

// CUDA backend: returns 0 or CUDA's error code. `rung` is a file number in kernels/, 0 for the best for shape and GPU.
int launch_forward(const Forward&, int64_t rung, void* stream);
int launch_backward(const Backward&, void* stream);

}  // namespace gated
}  // namespace kernel_pytorch
