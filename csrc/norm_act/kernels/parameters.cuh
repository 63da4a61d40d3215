// Parameters of the kernels of norm and activation, and the operations on one element or vector that they share.
#pragma once

#include "kernel_pytorch/cuda/activation_switch.cuh"
#include "kernel_pytorch/cuda/any_type.cuh"
#include "kernel_pytorch/cuda/dropout.cuh"
#include "kernel_pytorch/index.h"

namespace kernel_pytorch {
namespace norm_act {

// T: element type of h and y, to which x and the residual promote.
template <typename T>
struct ForwardPointers {
  Input x;
  Input residual;  // optional
  Input weight;    // optional
  Input bias;      // optional
  T* y;
  T* h;         // only with a residual
  float* mean;  // null for RMS norm
  float* rstd;
  DeviceDropout dropout;
  int64_t rows;
  int columns;
  float eps;
  Activation activation;
};

// T: element type of dy, dh and h. Part p has rows p, p + parts, ...
template <typename T>
struct BackwardPointers {
  const T* dy;
  const T* dh;  // may be null
  const T* h;
  Input weight;       // optional
  Input bias;         // optional
  const float* mean;  // null for RMS norm
  const float* rstd;
  Output dx;             // null data if not needed
  Output dresidual;      // null data if not needed
  float* weight_shares;  // partial sums `(parts, columns)`; null if dweight is not needed
  float* bias_shares;    // same for dbias
  DeviceDropout dropout;
  int64_t rows;
  int64_t parts;
  int columns;
  bool adds;
  bool rounded;  // gradients of parameters have 16 bits
  Activation activation;
};

// Multiplies x_hat by weight and adds bias.
template <int N>
__device__ __forceinline__ void scale_and_shift(const Input& weight, const Input& bias, int column, float (&z)[N]) {
  float parameter[N];
  if (weight.data != nullptr) {
    load_as<N>(weight, column, parameter);
#pragma unroll
    for (int i = 0; i < N; ++i) z[i] *= parameter[i];
  }
  if (bias.data != nullptr) {
    load_as<N>(bias, column, parameter);
#pragma unroll
    for (int i = 0; i < N; ++i) z[i] += parameter[i];
  }
}

// Computes y from z. `kPlain`: neither activation nor dropout.
template <bool kPlain, typename T, int N>
__device__ __forceinline__ void finish(const ForwardPointers<T>& p, const DropoutRow& dropout, int column, float (&z)[N]) {
  if constexpr (!kPlain) {
    activate_all<kRounded<T>, N>(p.activation, z);
    if (dropout.drops && p.residual.data == nullptr) drop<N>(dropout, column, z);
  }
}

// Computes dz, the gradient before the activation, from dy after dropout. `kRoundedSums`: all gradients have 16 bits.
template <bool kRoundedSums, typename T, int N>
__device__ __forceinline__ void undo_activation(const BackwardPointers<T>& p, const float (&z)[N], float (&dy)[N]) {
  if (kRoundedSums || (kRounded<T> && p.rounded)) {
    multiply_by_slope<true, N>(p.activation, z, dy);
  } else {
    multiply_by_slope<false, N>(p.activation, z, dy);
  }
}

// Same from dy before dropout.
template <bool kRoundedSums, typename T, int N>
__device__ __forceinline__ void undo_activation(const BackwardPointers<T>& p, const DropoutRow& dropout, int column,
                                                const float (&z)[N], float (&dy)[N]) {
  if (dropout.drops && !p.adds) drop<N>(dropout, column, dy);
  if (p.activation == Activation::kIdentity) return;
  undo_activation<kRoundedSums, T, N>(p, z, dy);
}

// Stores the gradients of x and the residual, from the gradient of h with dh added.
template <bool kPlain, typename T, int N>
__device__ __forceinline__ void store_gradients(const BackwardPointers<T>& p, const DropoutRow& dropout, int64_t offset,
                                                int column, float (&gradient)[N]) {
  if (p.dresidual.data != nullptr) store_promoted<T, N>(p.dresidual, offset + column, gradient);
  if (p.dx.data == nullptr) return;
  if constexpr (!kPlain) {
    if (dropout.drops && p.adds) drop<N>(dropout, column, gradient);
  }
  store_promoted<T, N>(p.dx, offset + column, gradient);
}

}  // namespace norm_act
}  // namespace kernel_pytorch
