// What every kernel of norm and activation is given, and what all of them do to one element or one vector.
#pragma once

#include "kernel_pytorch/cuda/activation_switch.cuh"
#include "kernel_pytorch/cuda/any_type.cuh"
#include "kernel_pytorch/cuda/dropout.cuh"
#include "kernel_pytorch/index.h"

namespace kernel_pytorch {
namespace norm_act {

// T of h and y, to which x and residual were promoted.
template <typename T>
struct ForwardPointers {
  Input x;
  Input residual;  // no data for none
  Input weight;    // no data for none
  Input bias;      // no data for none
  T* y;
  T* h;         // with a residual
  float* mean;  // null for the RMS norm
  float* rstd;
  DeviceDropout dropout;
  int64_t rows;
  int columns;
  float eps;
  Activation activation;
};

// T of dy, dh and h. Share p is of rows p, p + parts, ..., or of as many neighbours as a block takes at a time.
template <typename T>
struct BackwardPointers {
  const T* dy;
  const T* dh;  // null for none
  const T* h;
  Input weight;       // no data for none
  Input bias;         // no data for none
  const float* mean;  // null for the RMS norm
  const float* rstd;
  Output dx;             // no data where it is not needed
  Output dresidual;      // no data where it is not needed
  float* weight_shares;  // `(parts, columns)`; null where dweight is not needed
  float* bias_shares;    // the same for dbias
  DeviceDropout dropout;
  int64_t rows;
  int64_t parts;
  int columns;
  bool adds;
  bool rounded;  // all gradients to 16 bits
  Activation activation;
};

// x_hat times weight, plus bias.
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

// From z to y. `kPlain`: neither activation nor dropout.
template <bool kPlain, typename T, int N>
__device__ __forceinline__ void finish(const ForwardPointers<T>& p, const DropoutRow& dropout, int column, float (&z)[N]) {
  if constexpr (!kPlain) {
    activate_all<kRounded<T>, N>(p.activation, z);
    if (dropout.drops && p.residual.data == nullptr) drop<N>(dropout, column, z);
  }
}

// From dy, dropped, to dz, the gradient of what is activated. `kRoundedSums`: it is known that all gradients have 16 bits.
template <bool kRoundedSums, typename T, int N>
__device__ __forceinline__ void undo_activation(const BackwardPointers<T>& p, const float (&z)[N], float (&dy)[N]) {
  if (kRoundedSums || (kRounded<T> && p.rounded)) {
    multiply_by_slope<true, N>(p.activation, z, dy);
  } else {
    multiply_by_slope<false, N>(p.activation, z, dy);
  }
}

// The same from dy as it came.
template <bool kRoundedSums, typename T, int N>
__device__ __forceinline__ void undo_activation(const BackwardPointers<T>& p, const DropoutRow& dropout, int column,
                                                const float (&z)[N], float (&dy)[N]) {
  if (dropout.drops && !p.adds) drop<N>(dropout, column, dy);
  if (p.activation == Activation::kIdentity) return;
  undo_activation<kRoundedSums, T, N>(p, z, dy);
}

// The gradient of h, dh added, to those of x and the residual.
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
