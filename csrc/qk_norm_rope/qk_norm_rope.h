// RMSNorm of every head of q and k, then rotary position embedding: the parameters that operators pass to the CPU and
// CUDA backends. For q, and for k in the same way:
//
//     n = q * rstd * (offset + weight),  rstd = 1 / sqrt(mean(q^2) + eps)       per head
//     y1 = n1 * cos - n2 * sin,  y2 = n2 * cos + n1 * sin                       for every pair (n1, n2) of a head
//
//     g: dy through the transposed rotation,  q_hat = q * rstd
//     dq = rstd * (g * (offset + weight) - q_hat * mean(g * (offset + weight) * q_hat)),  dweight = sum of g * q_hat
//
// q and k are `(tokens, heads, columns)`, strided, with one dtype; their numbers of heads may differ. dq and dk are
// contiguous. The weights are `(columns)`, of any dtype, float64 exactly if q and k are, on CUDA both of one dtype.
// rstd and partial sums are float32, or float64 with q and k.
#pragma once

#include "kernel_pytorch/cpu/isa.h"
#include "kernel_pytorch/rotary.h"

namespace kernel_pytorch {
namespace qk_norm_rope {

// q or k.
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
  Input dy;  // if missing, no gradient of this side is needed
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
  Output shares;  // partial sums `(2, parts, columns)`, with a dweight
  int64_t tokens;
  int64_t columns;
  int64_t parts;
  double offset;
};

// CPU backend: tokens `begin` to `end` of a forward; parts `begin` to `end` of a backward; columns `begin` to `end` of
// the sums of the partial sums.
KP_DECLARE_FOR_EACH_ISA(void forward(const Forward&, int64_t begin, int64_t end))
KP_DECLARE_FOR_EACH_ISA(void backward(const Backward&, int64_t begin, int64_t end))
KP_DECLARE_FOR_EACH_ISA(void add_shares(const Backward&, int64_t begin, int64_t end))

// CUDA backend: returns 0 or CUDA's error code. `rung` is a file number in kernels/, 0 for the best for the shape.
int launch_forward(const Forward&, int64_t rung, void* stream);
int launch_backward(const Backward&, void* stream);

}  // namespace qk_norm_rope
}  // namespace kernel_pytorch
