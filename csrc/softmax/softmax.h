// Softmax of scaled, masked scores, forward and backward: parameters that operators pass to the CPU and CUDA backends.
//
//     z = scale * x + mask                        or -inf where a boolean mask is false
//     y = exp(z - max(z)) / sum(exp(z - max(z)))  zeros if the mask excludes the whole row
//
//     dz = y * (dy - dot)     dot = sum(dy * y)     dx = scale * dz     dmask = dz, summed over what the mask is broadcast over
//
// The stored y sums to one only up to rounding, and if one y is near one, dy - dot cancels. On CUDA dot is therefore
// corrected once, to dot + sum((dy - dot) * y): one Newton step for sum(dy * y) / sum(y).
//
// Sum and maximum in one pass: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018,
// https://arxiv.org/abs/1805.02867.
//
// All tensors are contiguous. The mask is bool, of the dtype of x, or float32 (float64 if x is). y is float32 if the
// mask is and x is narrower, else it has the dtype of x. dy, y and dx have one dtype; dots are float32, or float64 if
// they are; dmask has the dtype of dots, on CUDA or that of y.
#pragma once

#include "kernel_pytorch/cpu/isa.h"
#include "kernel_pytorch/dtype.h"
#include "kernel_pytorch/index.h"

namespace kernel_pytorch {
namespace softmax {

struct Forward {
  Input x;
  Input mask;  // optional
  Output y;
  int64_t rows;
  int64_t columns;
  double scale;
  Broadcast broadcast;
};

struct Backward {
  Input dy;
  Input y;
  Output dx;    // optional
  Output dots;  // with dmask: sum(dy * y) per row
  Output dmask;  // optional; one row for each row of the mask
  int64_t rows;
  int64_t columns;
  double scale;
  Broadcast broadcast;
};

constexpr int64_t kTileColumns = 512;

// CPU backend: rows `begin` to `end`; for dmask, tiles `begin` to `end` of kTileColumns.
KP_DECLARE_FOR_EACH_ISA(void forward(const Forward&, int64_t begin, int64_t end))
KP_DECLARE_FOR_EACH_ISA(void backward(const Backward&, int64_t begin, int64_t end))
KP_DECLARE_FOR_EACH_ISA(void mask_gradient(const Backward&, int64_t begin, int64_t end))

// CUDA backend: returns 0 or CUDA's error code. `rung` is a file number in kernels/, 0 for the best for shape and GPU.
int launch_forward(const Forward&, int64_t rung, void* stream);
int launch_backward(const Backward&, void* stream);

}  // namespace softmax
}  // namespace kernel_pytorch
