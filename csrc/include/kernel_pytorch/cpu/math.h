// Elementary functions on vectors: branch-free for float32; for float64 the C library's function, lane by lane.
//
// The polynomials for float32 are weighted minimax fits (least squares on Chebyshev nodes, reweighted after Lawson
// until the error is level; C. L. Lawson, 1961) to functions computed to 40 digits. The error stated with each
// polynomial is relative to the function, in exact arithmetic.
#pragma once

#include "kernel_pytorch/cpu/vector.h"

namespace kernel_pytorch {
namespace {

#define KP_INLINE inline __attribute__((always_inline))

// Applies `function` to every lane.
template <typename Function>
KP_INLINE Vector<double> each_lane(Vector<double> x, const Function& function) {
  Vector<double> result;
  for (int i = 0; i < kLanes<double>; ++i) result[i] = function(x[i]);
  return result;
}

// c0 + c1 x + c2 x^2 + ...
KP_INLINE Vector<float> polynomial(Vector<float>, float c) { return broadcast(c); }

template <typename... Coefficients>
KP_INLINE Vector<float> polynomial(Vector<float> x, float c, Coefficients... more) {
  return polynomial(x, more...) * x + c;
}

template <typename Compute>
KP_INLINE Vector<Compute> absolute(Vector<Compute> x) {
  using Mask = typename VectorOf<Compute>::mask;
  constexpr int kSign = 8 * static_cast<int>(sizeof(Compute)) - 1;
  const Mask sign = Mask{} + (decltype(Mask{}[0] + 0){1} << kSign);
  return bit_cast<Vector<Compute>>(bit_cast<Mask>(x) & ~sign);
}

// Combines a nonnegative magnitude with the sign of another value.
KP_INLINE Vector<float> with_sign_of(Vector<float> magnitude, Vector<float> sign) {
  return bit_cast<Vector<float>>(bit_cast<Words>(magnitude) | (bit_cast<Words>(sign) & 0x80000000u));
}

// min(x, limit), except that NaN is kept. GCC compiles comparisons of floats to the min instruction only up to AVX2.
KP_INLINE Vector<float> at_most(Vector<float> x, float limit) {
#if defined(__AVX512F__)
  return _mm512_min_ps(broadcast(limit), x);
#else
  const Vector<float> limits = broadcast(limit);
  return limits < x ? limits : x;
#endif
}

KP_INLINE Vector<double> at_most(Vector<double> x, double limit) {
  const Vector<double> limits = broadcast(limit);
  return limits < x ? limits : x;
}

KP_INLINE Vector<float> at_least(Vector<float> x, float limit) {
#if defined(__AVX512F__)
  return _mm512_max_ps(broadcast(limit), x);
#else
  const Vector<float> limits = broadcast(limit);
  return limits > x ? limits : x;
#endif
}

KP_INLINE Vector<double> at_least(Vector<double> x, double limit) {
  const Vector<double> limits = broadcast(limit);
  return limits > x ? limits : x;
}

// -|x|
KP_INLINE Vector<float> negative(Vector<float> x) {
  return bit_cast<Vector<float>>(bit_cast<Words>(x) | 0x80000000u);
}

KP_INLINE Vector<double> negative(Vector<double> x) { return -absolute<double>(x); }

// Adding kRound rounds n to an integer and leaves n + 64, the exponent of 2^n times 2^64, in the lower bits of the sum.
constexpr float kRound = 0x1.8p23f + 64.0f;

// Range reduction for e^r 2^n, with x = r + n ln(2), |r| <= ln(2) / 2.
struct Reduced {
  Vector<float> shifted;
  Vector<float> r;
};

KP_INLINE Reduced reduce(Vector<float> x) {
  const Vector<float> shifted = x * 0x1.715476p0f + kRound;
  const Vector<float> n = shifted - kRound;
  return {shifted, (x - n * 0x1.62e4p-1f) - n * 0x1.7f7d1cp-20f};
}

// (e^r - 1 - r) / r^2 to 2^-28. The exponent is set 64 too high and then corrected by a multiplication, so that small
// results become subnormal.
KP_INLINE Vector<float> exp_of_reduced(Reduced x) {
  const Vector<float> p = polynomial(x.r, 1.0f, 1.0f, 0x1p-1f, 0x1.55548ep-3f, 0x1.55545ep-5f, 0x1.123bep-7f,
                                     0x1.6db4e4p-10f);
  const Words scaled = bit_cast<Words>(p) + (bit_cast<Words>(x.shifted) << 23);
  return bit_cast<Vector<float>>(scaled) * 0x1p-64f;
}

// exp(x) for x <= 0; NaN is kept.
KP_INLINE Vector<float> exp_of_negative(Vector<float> x) { return exp_of_reduced(reduce(at_least(x, -104.0f))); }

KP_INLINE Vector<double> exp_of_negative(Vector<double> x) {
  return each_lane(x, [](double lane) { return __builtin_exp(lane); });
}

// exp(x + rest) for x <= 0, with rest so small that x + rest rounds to x.
KP_INLINE Vector<float> exp_of_negative(Vector<float> x, Vector<float> rest) {
  Reduced reduced = reduce(at_least(x, -104.0f));
  reduced.r += rest;
  return exp_of_reduced(reduced);
}

// A sigmoid and its derivative s (1 - s), both computed from e = exp(-|x|), which neither overflows nor cancels.
template <typename Compute>
struct Sigmoid {
  Vector<Compute> value;
  Vector<Compute> slope;
};

template <typename Compute>
KP_INLINE Sigmoid<Compute> sigmoid(Vector<Compute> x) {
  const Vector<Compute> one = broadcast(Compute{1});
  const Vector<Compute> e = exp_of_negative(negative(x));
  const Vector<Compute> reciprocal = one / (one + e);
  const Vector<Compute> small = e * reciprocal;
  return {x < Vector<Compute>{} ? small : reciprocal, small * reciprocal};
}

// The hyperbolic tangent and its derivative 1 - t^2 = 4 e / (1 + e)^2, e = exp(-2 |x|).
template <typename Compute>
struct Tanh {
  Vector<Compute> value;
  Vector<Compute> slope;
};

// Below 0.6 an odd polynomial, (tanh(x) / x - 1) / x^2 to 2^-33; above it (1 - e) / (1 + e).
KP_INLINE Tanh<float> tanh(Vector<float> x) {
  const Vector<float> magnitude = absolute<float>(x);
  const Vector<float> e = exp_of_negative(-2.0f * magnitude);
  const Vector<float> reciprocal = 1.0f / (1.0f + e);
  const Vector<float> s = x * x;
  const Vector<float> p = polynomial(s, -0x1.555554p-2f, 0x1.11109ep-3f, -0x1.b9fa8ap-5f, 0x1.6418d8p-6f,
                                     -0x1.0ee55cp-7f, 0x1.246dfcp-9f);
  const Vector<float> small = magnitude + magnitude * s * p;
  const Vector<float> large = (1.0f - e) * reciprocal;
  const Vector<float> value = magnitude < broadcast(0.6f) ? small : large;
  return {with_sign_of(value, x), 4.0f * e * reciprocal * reciprocal};
}

KP_INLINE Tanh<double> tanh(Vector<double> x) {
  const Vector<double> value = each_lane(x, [](double lane) { return __builtin_tanh(lane); });
  return {value, 1.0 - value * value};
}

// The standard normal distribution function Phi(x) = (1 + erf(x / sqrt(2))) / 2 and its derivative, the density.
// Accurate in the lower tail too, where 1 + erf cancels.
template <typename Compute>
struct Normal {
  Vector<Compute> distribution;
  Vector<Compute> density;
};

// Phi(-u) = exp(-u^2 / 2) R(u), where R(u) (u + 4) is a polynomial of (u - 4) / (u + 4) to 2^-29, for u from 0 to 14.7,
// where the exponential underflows. Its argument has two parts, since a rounding error would be amplified by u^2 / 2.
KP_INLINE Normal<float> normal(Vector<float> x) {
  const Vector<float> u = at_most(absolute<float>(x), 16.0f);
  const Vector<float> upper = bit_cast<Vector<float>>(bit_cast<Words>(u) & 0xFFFFF000u);
  const Vector<float> e = exp_of_negative(-0.5f * (upper * upper), -0.5f * ((u - upper) * (u + upper)));
  const Vector<float> reciprocal = 1.0f / (u + 4.0f);
  const Vector<float> t = (u - 4.0f) * reciprocal;
  const Vector<float> p = polynomial(t, 0x1.82b4bcp-1f, -0x1.373e3ap-1f, 0x1.8c6dbap-2f, -0x1.7dff04p-3f,
                                     0x1.eec846p-5f, -0x1.ee5316p-8f, -0x1.c9a936p-9f, 0x1.acfc74p-10f,
                                     0x1.674f2cp-13f, -0x1.cf52bcp-13f, -0x1.804b0ap-15f);
  const Vector<float> tail = e * (p * reciprocal);
  return {x > Vector<float>{} ? 1.0f - tail : tail, e * 0x1.988454p-2f};
}

KP_INLINE Normal<double> normal(Vector<double> x) {
  return {each_lane(x, [](double lane) { return 0.5 * __builtin_erfc(lane * -0.7071067811865476); }),
          exp_of_negative(-0.5 * x * x) * 0.3989422804014327};
}

}  // namespace
}  // namespace kernel_pytorch
