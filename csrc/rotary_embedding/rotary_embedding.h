// Rotary position embedding of one tensor or of q and k: parameters that operators pass to the CPU and CUDA backends.
//
//     y1 = x1 * cos - x2 * sin,  y2 = x2 * cos + x1 * sin        for every pair (x1, x2) of a head
//
// Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021, https://arxiv.org/abs/2104.09864.
// The gradient is the same operation with sin negated.
//
// x is `(tokens, heads, columns)`, strided; y is contiguous, with its dtype. q and k may differ in heads and strides.
#pragma once

#include "kernel_pytorch/cpu/isa.h"
#include "kernel_pytorch/rotary.h"

namespace kernel_pytorch {
namespace rotary_embedding {

// q or k.
struct Side {
  Input x;
  Output y;
  HeadStrides strides;  // of x
  int64_t heads;
};

// Row of the tables for each token: token t uses position t % count; without data, row t % rows of the tables.
struct Positions {
  const void* data;
  int64_t count;
  bool wide;  // int64, else int32
};

struct Arguments {
  Side sides[2];  // for a single tensor the second one has no heads
  Rotation rotation;
  Positions positions;
  int64_t tokens;
  int64_t columns;
};

// Row of the tables for a token, or -1 if its position is outside of the tables: its heads become NaN.
KP_HOST_DEVICE int64_t table_row(const Positions& positions, int64_t rows, int64_t token) {
  if (positions.data == nullptr) return remainder(token, rows);
  const int64_t place = remainder(token, positions.count);
  const int64_t position = positions.wide ? static_cast<const int64_t*>(positions.data)[place]
                                          : static_cast<const int32_t*>(positions.data)[place];
  return position >= 0 && position < rows ? position : -1;
}

// CPU backend: tokens `begin` to `end`.
KP_DECLARE_FOR_EACH_ISA(void rotate(const Arguments&, int64_t begin, int64_t end))

// CUDA backend: returns 0 or CUDA's error code. `rung` is a file number in kernels/, 0 for the best for the shape.
int launch(const Arguments&, int64_t rung, void* stream);

}  // namespace rotary_embedding
}  // namespace kernel_pytorch
