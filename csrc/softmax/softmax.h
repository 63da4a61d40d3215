// Softmax of scaled and masked scores, forward and backward: what the operator hands to whoever computes it.
//
//     z = scale * x + mask                        or -inf where a boolean mask is false
//     y = exp(z - max(z)) / sum(exp(z - max(z)))  zeros where a mask leaves nothing
//
//     dz = y * (dy - dot)     dot = sum(dy * y)     dx = scale * dz     dmask = dz, summed over what the mask is broadcast over
//
// The y that was stored sums to one only as far as it was rounded, and where one y is nearly one, dy - dot cancels: on CUDA
// dot is corrected once, to dot + sum((dy - dot) * y), as one step of Newton's does for sum(dy * y) / sum(y).
//
// The sum and the maximum in one pass: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018,
// https://arxiv.org/abs/1805.02867.
//
// All tensors are contiguous. The mask is bool, of the dtype of x, or float32 (float64 where x is); y is float32 where the
// mask is and x is narrower, else as x. dy, y and dx have one dtype; dots are float32, or float64 with them; dmask
// is as dots, on CUDA also as y.
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
  Output dots;  // with dmask: sum(dy * y) of each row
  Output dmask;  // optional; a row for each of the mask
  int64_t rows;
  int64_t columns;
  double scale;
  Broadcast broadcast;
};

constexpr int64_t kTileColumns = 512;

// The twin: rows `begin` to `end`; of dmask, tiles `begin` to `end` of kTileColumns.
KP_DECLARE_FOR_EACH_ISA(void forward(const Forward&, int64_t begin, int64_t end))
KP_DECLARE_FOR_EACH_ISA(void backward(const Backward&, int64_t begin, int64_t end))
KP_DECLARE_FOR_EACH_ISA(void mask_gradient(const Backward&, int64_t begin, int64_t end))

// CUDA: 0 or CUDA's error code. `rung` is a number of kernels/, 0 for the best for shape and architecture.
int launch_forward(const Forward&, int64_t rung, void* stream);
int launch_backward(const Backward&, void* stream);

}  // namespace softmax
}  // namespace kernel_pytorch
