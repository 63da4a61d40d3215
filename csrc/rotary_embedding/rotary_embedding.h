// Rotary position embedding: what the operator hands to whoever computes it.
//
//     y1 = x1 * cos - x2 * sin,  y2 = x2 * cos + x1 * sin        for every pair (x1, x2) of a head
//
// Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021, https://arxiv.org/abs/2104.09864. The
// gradient is the same with the sign of sin turned.
//
// x is `(tokens, heads, columns)`, strided; y has its dtype and is contiguous.
#pragma once

#include "kernel_pytorch/cpu/isa.h"
#include "kernel_pytorch/rotary.h"

namespace kernel_pytorch {
namespace rotary_embedding {

struct Arguments {
  Input x;
  Output y;
  Rotation rotation;
  HeadStrides strides;  // of x
  int64_t tokens;
  int64_t heads;
  int64_t columns;
};

// The twin: tokens `begin` to `end`.
KP_DECLARE_FOR_EACH_ISA(void rotate(const Arguments&, int64_t begin, int64_t end))

// CUDA: 0 or CUDA's error code. `rung` is a number of kernels/, 0 for the best for the shape.
int launch(const Arguments&, int64_t rung, void* stream);

}  // namespace rotary_embedding
}  // namespace kernel_pytorch
