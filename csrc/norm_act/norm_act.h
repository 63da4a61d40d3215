// Norm, residual, dropout and activation: parameters that the operators pass to the CPU and CUDA backends.
//
//     h = residual + dropout(x)           with a residual, else h = x
//     x_hat = (h - mean) * rstd,          mean = mean(h) for layer norm, 0 for RMS norm
//                                         rstd = 1 / sqrt(mean((h - mean)^2) + eps)
//     z = x_hat * weight + bias
//     y = activation(z)                   with a residual, else y = dropout(activation(z))
//
//     dz = dropout(dy) * activation'(z)   dropout here only without a residual
//     dweight = sum over rows of dz * x_hat        dbias = sum over rows of dz        g = dz * weight
//     dresidual = rstd * (g - mean(g) - x_hat * mean(g * x_hat)) + dh                 without mean(g) for RMS norm
//     dx = dropout(dresidual)             with a residual, else dresidual
//
// Ba, Kiros and Hinton, "Layer Normalization", 2016, https://arxiv.org/abs/1607.06450; Zhang and Sennrich, "Root Mean
// Square Layer Normalization", 2019, https://arxiv.org/abs/1910.07467.
//
// All tensors are contiguous. h, y, dy and dh have one dtype, to which x and the residual promote. On CUDA x, the
// residual, their gradients and the parameters `(columns,)` may each have another dtype. On the CPU x and the residual
// have that of h; parameters are float64 exactly if h is. Statistics and partial sums are float32, or float64 if h is.
#pragma once

#include "kernel_pytorch/activation.h"
#include "kernel_pytorch/cpu/isa.h"
#include "kernel_pytorch/cuda/layout.h"
#include "kernel_pytorch/dtype.h"
#include "kernel_pytorch/index.h"
#include "kernel_pytorch/philox.h"

namespace kernel_pytorch {
namespace norm_act {

struct Norm {
  int64_t rows;
  int64_t columns;
  double eps;
  bool layer;  // layer norm; else RMS norm
  bool adds;   // with a residual dropout applies to x; else to y
  Activation activation;
  Dropout dropout;
};

struct Forward {
  Norm norm;
  Input x;
  Input residual;  // with `adds`
  Input weight;    // optional
  Input bias;      // optional
  Output y;
  Output h;     // with `adds`
  Output mean;  // with `layer`
  Output rstd;
};

struct Backward {
  Norm norm;
  Input dy;
  Input dh;  // optional
  Input h;
  Input weight;  // optional
  Input bias;    // optional
  Input mean;    // with `layer`
  Input rstd;
  Output dx;         // optional
  Output dresidual;  // optional, with `adds`
  Output dweight;    // optional
  Output dbias;      // optional
  Output weight_shares;  // with dweight: partial sums `(parts, columns)`
  Output bias_shares;    // with dbias
  int64_t parts;
};

// CPU backend: rows `begin` to `end` of a forward; parts `begin` to `end` of a backward; columns `begin` to `end` of
// the sums of the partial sums.
KP_DECLARE_FOR_EACH_ISA(void forward(const Forward&, int64_t begin, int64_t end))
KP_DECLARE_FOR_EACH_ISA(void backward(const Backward&, int64_t begin, int64_t end))
KP_DECLARE_FOR_EACH_ISA(void add_shares(const Backward&, int64_t begin, int64_t end))

// Few threads with several vectors each, since a thread's overhead per row is as large as the cost of a vector. The
// backward also has the partial sums of both parameters in registers, and the gradient of an activation.
constexpr Lengths kForwardLengths = {{32, 64, 2048, 2048}, 4, 512};
constexpr Lengths kAddLengths = {{32, 64, 2048, 2048}, 4, 512, 4};
constexpr Lengths kBackwardLengths = {{128, 1024, 1024, 1024}, 4, 256, 4};
constexpr Lengths kActivatedLengths = {{128, 512, 512, 512}, 2, 256, 2};

inline bool is_plain(const Norm& norm) { return norm.activation == Activation::kIdentity && !norm.dropout; }

// Number of partial sums of the parameters' gradients on CUDA, for elements of `size` bytes: one for each team that a
// large GPU runs at once, as long as those of both parameters fit in 32 MiB.
inline int64_t shares_on_cuda(const Norm& norm, int64_t size) {
  constexpr int64_t kFloats = int64_t{1} << 23;
  const bool plain = is_plain(norm);
  const RowLayout layout = layout_of(norm.columns * size / 16, plain ? kBackwardLengths : kActivatedLengths);
  const int resident = layout.each > 1 ? 512 : plain ? 768 : 640;
  return larger(1, smaller(shares_of(norm.rows, layout, resident), kFloats / (2 * norm.columns)));
}

// CUDA backend: returns 0 or CUDA's error code. `rung` is a file number in kernels/, 0 for the best for shape and GPU.
int launch_forward(const Forward&, int64_t rung, void* stream);
int launch_backward(const Backward&, int64_t rung, void* stream);

}  // namespace norm_act
}  // namespace kernel_pytorch
