// Operations of kernels 3 and 4 on a vector of a row: access to parameters, x to y, dy to gradients.
#pragma once

#include "parameters.cuh"
#include "statistics.cuh"

namespace kernel_pytorch {
namespace norm_act {

// Compile-time knowledge about the arguments. kTyped: all tensors have the kernel's type. kPlain: also there is neither
// activation nor dropout.
enum class Kind { kPlain, kTyped, kAny };

// Which part of weight and bias a thread holds in registers: that of all its vectors, packed; that of its next vector,
// prefetched; or none, so that they are loaded where they are used.
enum class Held { kAll, kNext, kNone };

// Keeps a load at its place in the program: otherwise the compiler moves the load of one branch down to its use.
template <typename T, int N>
__device__ __forceinline__ void hold_loads(Packed<T, N>& packed) {
#pragma unroll
  for (uint4& words : packed.words) asm volatile("" : "+r"(words.x), "+r"(words.y), "+r"(words.z), "+r"(words.w));
}

// `kShifts`: the bias is needed.
template <typename T, int kVectors, Kind kKind, Held kHeld, bool kShifts = true>
struct Parameters {
  static constexpr Held kHolds = kKind == Kind::kAny ? Held::kNone : kHeld;
  static constexpr int N = kVectorLength<T>, kCount = kHolds == Held::kAll ? kVectors : 1;

  const Input& weight;
  const Input& bias;
  Packed<T, N> held_weight[kCount];
  Packed<T, N> held_bias[kCount];

  __device__ __forceinline__ Parameters(const Input& of_weight, const Input& of_bias, int first, int stride, int columns)
      : weight(of_weight), bias(of_bias) {
    if constexpr (kHolds == Held::kAll) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) load(v, (v * stride + first) * N, columns);
    }
  }

  // Prefetches the parameters of the vector at `column`.
  __device__ __forceinline__ void expect(int column, int columns) {
    if constexpr (kHolds == Held::kNext) {
      load(0, column, columns);
      hold_loads(held_weight[0]);
      if constexpr (kShifts) hold_loads(held_bias[0]);
    }
  }

  // Must be called between two uses of held parameters (see `forget_unpacked` in vector.cuh).
  __device__ __forceinline__ void forget() {
    if constexpr (kHolds == Held::kAll) {
      forget_unpacked(held_weight);
      if constexpr (kShifts) forget_unpacked(held_bias);
    }
  }

  __device__ __forceinline__ void scale(int v, int column, float (&z)[N]) const {
    if (weight.data == nullptr) return;
    float parameter[N];
    read(weight, held_weight[v % kCount], column, parameter);
#pragma unroll
    for (int i = 0; i < N; ++i) z[i] *= parameter[i];
  }

  __device__ __forceinline__ void scale_and_shift(int v, int column, float (&z)[N]) const {
    static_assert(kShifts);
    if (bias.data == nullptr) return scale(v, column, z);
    float shift[N];
    read(bias, held_bias[v % kCount], column, shift);
    if (weight.data != nullptr) {
      float factor[N];
      read(weight, held_weight[v % kCount], column, factor);
#pragma unroll
      for (int i = 0; i < N; ++i) z[i] = fmaf(z[i], factor[i], shift[i]);
    } else {
#pragma unroll
      for (int i = 0; i < N; ++i) z[i] += shift[i];
    }
  }

 private:
  __device__ __forceinline__ void load(int i, int column, int columns) {
    if (column >= columns) return;
    if (weight.data != nullptr) load_kept(static_cast<const T*>(weight.data) + column, held_weight[i]);
    if constexpr (kShifts) {
      if (bias.data != nullptr) load_kept(static_cast<const T*>(bias.data) + column, held_bias[i]);
    }
  }

  __device__ __forceinline__ static void read(const Input& source, const Packed<T, N>& held, int column,
                                              float (&values)[N]) {
    if constexpr (kHolds != Held::kNone) {
      unpack(held, values);
    } else if constexpr (kKind != Kind::kAny) {
      load_vector<T, N>(static_cast<const T*>(source.data) + column, values);
    } else {
      load_as<N>(source, column, values);
    }
  }
};

// Replaces x by h, rounded and packed, and stores it.
template <bool kPlain, typename T, int N>
__device__ __forceinline__ void add_residual(const ForwardPointers<T>& p, const DropoutRow& dropout, int64_t offset,
                                             int column, const Packed<T, N>& residual, Packed<T, N>& h) {
  float sum[N], added[N];
  unpack(h, added);
  unpack(residual, sum);
  if constexpr (!kPlain) {
    if (dropout.drops) drop<N>(dropout, column, added);
  }
#pragma unroll
  for (int i = 0; i < N; ++i) sum[i] += added[i];
  pack(sum, h);
  store_packed(p.h + offset + column, h);
}

// Replaces h by x_hat. 16-bit types use one fused multiply-add: their rounding hides its larger error for large means.
template <typename T, int N>
__device__ __forceinline__ void normalize(float mean, float rstd, float (&h)[N]) {
  if constexpr (kRounded<T>) {
    const float shift = -mean * rstd;
#pragma unroll
    for (int i = 0; i < N; ++i) h[i] = fmaf(h[i], rstd, shift);
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) h[i] = (h[i] - mean) * rstd;
  }
}

// Computes y from h, in place, and stores it.
template <Kind kKind, typename T, typename Parameters, int N>
__device__ __forceinline__ void store_y(const ForwardPointers<T>& p, const Parameters& parameters, const DropoutRow& dropout,
                                        int64_t offset, int column, int v, Statistics found, float (&z)[N]) {
  normalize<T>(found.mean, found.rstd, z);
  parameters.scale_and_shift(v, column, z);
  finish<kKind == Kind::kPlain, T, N>(p, dropout, column, z);
  store_vector<T, N>(p.y + offset + column, z);
}

template <typename T>
__device__ __forceinline__ void store_statistics(const ForwardPointers<T>& p, int64_t row, Statistics found) {
  if (p.mean != nullptr) p.mean[row] = found.mean;
  p.rstd[row] = found.rstd;
}

// Partial sums of the gradients of the parameters.
template <int kVectors, int N>
struct ParameterShares {
  float weight[kVectors][N] = {};
  float bias[kVectors][N] = {};
};

// Adds the contribution of one vector, from dz, to the gradients of the parameters.
template <int kVectors, int N>
__device__ __forceinline__ void add_to_shares(const float (&x_hat)[N], const float (&dz)[N], int v,
                                              ParameterShares<kVectors, N>& shares) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    shares.weight[v][i] = fmaf(dz[i], x_hat[i], shares.weight[v][i]);
    shares.bias[v][i] += dz[i];
  }
}

// Adds the contribution of one vector, from g, to the sums of its row.
template <int N>
__device__ __forceinline__ void add_to_sums(const float (&x_hat)[N], const float (&g)[N], float& of_g, float& of_product) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    of_g += g[i];
    of_product = fmaf(g[i], x_hat[i], of_product);
  }
}

// Replaces dy by g for one vector, and adds the sums of g and of g * x_hat to `sums`.
template <Kind kKind, typename T, typename Parameters, int kVectors, int N>
__device__ __forceinline__ void make_g(const BackwardPointers<T>& p, const Parameters& parameters, const DropoutRow& dropout,
                                       int column, int v, const float (&x_hat)[N], float (&g)[N],
                                       ParameterShares<kVectors, N>& shares, float2& sums) {
  if constexpr (kKind != Kind::kPlain) {
    float z[N];
#pragma unroll
    for (int i = 0; i < N; ++i) z[i] = x_hat[i];
    parameters.scale_and_shift(v, column, z);
    undo_activation<kKind != Kind::kAny && kRounded<T>>(p, dropout, column, z, g);
  }
  add_to_shares(x_hat, g, v, shares);
  parameters.scale(v, column, g);
  add_to_sums(x_hat, g, sums.x, sums.y);
}

// Computes the gradient of h, without dh, from g and h: rstd (g - mean(g) - x_hat mean(g x_hat)). 16-bit types use two
// fused multiply-adds, whose error their rounding hides.
template <typename T>
class InputGradient {
 public:
  __device__ __forceinline__ InputGradient(float2 sums, float mean, float rstd, bool centred, int columns)
      : mean_(mean), rstd_(rstd) {
    const float share = 1.0f / static_cast<float>(columns);
    of_g_ = centred ? sums.x * share : 0.0f;
    of_product_ = sums.y * share;
    along_ = -rstd * rstd * of_product_;
    rest_ = -rstd * (of_g_ - mean * rstd * of_product_);
  }

  template <int N>
  __device__ __forceinline__ void apply(const float (&h)[N], float (&g)[N]) const {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if constexpr (kRounded<T>) {
        g[i] = fmaf(g[i], rstd_, fmaf(h[i], along_, rest_));
      } else {
        g[i] = rstd_ * (g[i] - of_g_ - (h[i] - mean_) * rstd_ * of_product_);
      }
    }
  }

 private:
  float mean_;
  float rstd_;
  float of_g_;
  float of_product_;
  float along_;
  float rest_;
};

// Stores the gradients of x and the residual, from the gradient of h with dh added.
template <Kind kKind, typename T, int N>
__device__ __forceinline__ void store_row(const BackwardPointers<T>& p, const DropoutRow& dropout, int64_t offset, int column,
                                          float (&gradient)[N]) {
  if constexpr (kKind == Kind::kAny) {
    store_gradients<false, T, N>(p, dropout, offset, column, gradient);
  } else {
    if (p.dresidual.data != nullptr) store_vector<T, N>(static_cast<T*>(p.dresidual.data) + offset + column, gradient);
    if (p.dx.data == nullptr) return;
    if constexpr (kKind != Kind::kPlain) {
      if (dropout.drops && p.adds) drop<N>(dropout, column, gradient);
    }
    store_vector<T, N>(static_cast<T*>(p.dx.data) + offset + column, gradient);
  }
}

}  // namespace norm_act
}  // namespace kernel_pytorch
