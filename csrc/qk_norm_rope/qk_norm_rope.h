// RMSNorm of every head of q and k, then the rotary position embedding, forward and backward: what the operator hands to
// whoever computes it. For q, and for k likewise:
//
//     n = q * rstd * (offset + weight),  rstd = 1 / sqrt(mean(q^2) + eps)       of each head
//     y1 = n1 * cos - n2 * sin,  y2 = n2 * cos + n1 * sin                       for every pair (n1, n2) of a head
//
//     g: dy through the transposed rotation,  q_hat = q * rstd
//     dq = rstd * (g * (offset + weight) - q_hat * mean(g * (offset + weight) * q_hat)),  dweight = sum of g * q_hat
//
// q is `(tokens, heads, columns)`, strided, k the same with heads of its own; both of one dtype. dq and dk are contiguous.
// The weights are `(columns)`, of any dtype, float64 where the others are and nowhere else, on CUDA both of one; rstd and the
// shares are float32, or float64 with the others.
#pragma once

#include "kernel_pytorch/cpu/isa.h"
#include "kernel_pytorch/rotary.h"

namespace kernel_pytorch {
namespace qk_norm_rope {

// q, or k.
struct ForwardSide {
  Input x;
  Input weight;
  Output y;
  Output rstd;
  HeadStrides strides;  // of x
  int64_t heads;
};

struct Forward {
  ForwardSide sides[2];
  Rotation rotation;
  int64_t tokens;
  int64_t columns;
  double eps;
  double offset;
};

struct BackwardSide {
  Input dy;  // without it nothing of this side is wanted
  Input x;
  Input weight;
  Input rstd;
  Output dx;       // optional
  Output dweight;  // optional
  HeadStrides dy_strides;
  HeadStrides strides;  // of x
  int64_t heads;
};

struct Backward {
  BackwardSide sides[2];
  Rotation rotation;
  Output shares;  // with a dweight: `(2, parts, columns)`
  int64_t tokens;
  int64_t columns;
  int64_t parts;
  double offset;
};

// The twin: tokens `begin` to `end` of a forward; parts `begin` to `end` of a backward; columns `begin` to `end` of the
// sums of the shares.
KP_DECLARE_FOR_EACH_ISA(void forward(const Forward&, int64_t begin, int64_t end))
KP_DECLARE_FOR_EACH_ISA(void backward(const Backward&, int64_t begin, int64_t end))
KP_DECLARE_FOR_EACH_ISA(void add_shares(const Backward&, int64_t begin, int64_t end))

// CUDA: 0 or CUDA's error code. `rung` is a number of kernels/, 0 for the best for the shape.
int launch_forward(const Forward&, int64_t rung, void* stream);
int launch_backward(const Backward&, void* stream);

}  // namespace qk_norm_rope
}  // namespace kernel_pytorch
