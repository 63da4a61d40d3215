// RMSNorm, forward and backward: the parameters that operators pass to the CPU and CUDA backends.
//
//     h = x + residual                                      with a residual, else h = x
//     y = h * rstd * (offset + weight),  rstd = 1 / sqrt(mean(h^2) + eps)
//
//     g = dy * (offset + weight),  x_hat = h * rstd
//     dx = rstd * (g - x_hat * mean(g * x_hat)) + dh        dweight = sum over rows of dy * x_hat
//
// Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019, https://arxiv.org/abs/1910.07467.
//
// All tensors are contiguous. x, residual, h, dh and dx have one dtype; y and dy have it too, or float32 if that dtype
// has 16 bits and a wider weight promotes it. The weight is `(weight_rows, columns)`, of any dtype, but float64 exactly
// if the others are; row r uses its row r % weight_rows. rstd and partial sums are float32, or float64 with the others.
#pragma once

#include "kernel_pytorch/cpu/isa.h"
#include "kernel_pytorch/cuda/layout.h"
#include "kernel_pytorch/dtype.h"
#include "kernel_pytorch/index.h"

namespace kernel_pytorch {
namespace rms_norm {

struct Forward {
  Input x;
  Input residual;  // optional
  Input weight;    // optional
  Output y;
  Output h;  // with a residual
  Output rstd;
  int64_t rows;
  int64_t columns;
  int64_t weight_rows;
  double eps;
  double offset;
};

struct Backward {
  Input dy;
  Input dh;  // optional
  Input h;
  Input weight;  // optional
  Input rstd;
  Output dx;       // optional
  Output dweight;  // optional
  Output shares;   // with dweight: partial sums `(parts, weight_rows, columns)`, on CUDA `(parts, columns)`
  int64_t rows;
  int64_t columns;
  int64_t weight_rows;
  int64_t parts;
  double offset;
};

// CPU backend: rows `begin` to `end` of a forward; parts `begin` to `end` of a backward; columns `begin` to `end` of
// the sum of the partial sums.
KP_DECLARE_FOR_EACH_ISA(void forward(const Forward&, int64_t begin, int64_t end))
KP_DECLARE_FOR_EACH_ISA(void backward(const Backward&, int64_t begin, int64_t end))
KP_DECLARE_FOR_EACH_ISA(void add_shares(const Backward&, int64_t begin, int64_t end))

// Layouts for CUDA, from measurements on an H200. Short rows need few registers, so more blocks fit; threads of long
// rows load all vectors at once. A residual doubles the numbers per thread; so does dy, in addition to the partial
// sums.
constexpr Lengths kForwardLengths = {{32, 512, 2048, 4096}, 4, 512};
constexpr Lengths kAddLengths = {{32, 512, 2048, 2048}, 4, 512};
// For elements of `size` bytes: partial sums for eight vectors of 16-bit numbers would take 64 registers.
constexpr Lengths backward_lengths(int64_t size) { return {{512, 1024, 1024, 1024}, 4, 256, size == 2 ? 4 : 8}; }

// CUDA backend: returns 0 or CUDA's error code. `rung` is a file number in kernels/, 0 for the best for shape and GPU.
int launch_forward(const Forward&, int64_t rung, void* stream);
int launch_backward(const Backward&, void* stream);

}  // namespace rms_norm
}  // namespace kernel_pytorch
