// Vectors of the computation dtype, and loops over rows with them.
//
// `Vector<float>` and `Vector<double>` have the width of the instruction set that the file is compiled for. They are
// the compiler's own vector types, so + - * / and comparisons are written as for scalars. 16-bit elements are converted
// in registers: to float32 when loaded, rounded when stored.
//
// For files that are compiled once for every instruction set (isa.h): everything here has internal linkage.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace kernel_pytorch {
namespace {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

template <typename Compute>
constexpr int kLanes = kVectorBytes / static_cast<int>(sizeof(Compute));

template <typename Compute>
struct VectorOf;
template <>
struct VectorOf<float> {
  typedef float type __attribute__((vector_size(kVectorBytes)));
  typedef int32_t mask __attribute__((vector_size(kVectorBytes)));
};
template <>
struct VectorOf<double> {
  typedef double type __attribute__((vector_size(kVectorBytes)));
  typedef int64_t mask __attribute__((vector_size(kVectorBytes)));
};
template <typename Compute>
using Vector = typename VectorOf<Compute>::type;

typedef uint32_t Words __attribute__((vector_size(kVectorBytes)));
typedef uint16_t Halves __attribute__((vector_size(kVectorBytes / 2)));

// Elements of 16-bit tensors, stored as bits: arithmetic is done in float32.
struct Float16 {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

template <typename To, typename From>
inline To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

template <typename Compute>
inline Vector<Compute> broadcast(Compute value) {
  return value - Vector<Compute>{};
}

// Conversions of single elements.

// float16 to float32: the exponent bias differs by 112; the multiplication also converts subnormals.
inline float widen(Float16 value) {
  const uint32_t magnitude = static_cast<uint32_t>(value.bits & 0x7FFFu) << 13;
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16;
  const float scaled = bit_cast<float>(magnitude) * 0x1p112f;
  return bit_cast<float>(sign | (magnitude >= 0x0F800000u ? magnitude | 0x7F800000u : bit_cast<uint32_t>(scaled)));
}

inline void narrow(float value, Float16* target) {
  const uint32_t bits = bit_cast<uint32_t>(value);
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  const uint32_t normal = (magnitude - 0x38000000u + 0x0FFFu + ((magnitude >> 13) & 1u)) >> 13;
  // Adding 0.5 rounds a subnormal and aligns its digits with the mantissa of 0.5.
  const uint32_t subnormal = bit_cast<uint32_t>(bit_cast<float>(magnitude) + 0.5f) - 0x3F000000u;
  const uint32_t finite = magnitude < 0x38800000u ? subnormal : normal;
  const uint32_t large = magnitude > 0x7F800000u ? 0x7E00u | ((magnitude >> 13) & 0x03FFu) : 0x7C00u;
  target->bits = static_cast<uint16_t>(((bits >> 16) & 0x8000u) | (magnitude >= 0x477FF000u ? large : finite));
}

// Whole vectors.

inline Vector<float> load(const float* source) {
  Vector<float> values;
  std::memcpy(&values, source, sizeof values);
  return values;
}

inline Vector<double> load(const double* source) {
  Vector<double> values;
  std::memcpy(&values, source, sizeof values);
  return values;
}

// Unsigned 16 bits to 32 and back; GCC's own conversion splits the vectors.
inline Words widen_bits(Halves bits) {
#if defined(__AVX512F__)
  return bit_cast<Words>(_mm512_cvtepu16_epi32(bit_cast<__m256i>(bits)));
#elif defined(__AVX2__)
  return bit_cast<Words>(_mm256_cvtepu16_epi32(bit_cast<__m128i>(bits)));
#else
  return __builtin_convertvector(bits, Words);
#endif
}

inline Halves narrow_bits(Words words) {
#if defined(__AVX512F__)
  return bit_cast<Halves>(_mm512_cvtepi32_epi16(bit_cast<__m512i>(words)));
#else
  return __builtin_convertvector(words, Halves);
#endif
}

inline Vector<float> load(const BFloat16* source) {
  Halves bits;
  std::memcpy(&bits, source, sizeof bits);
  return bit_cast<Vector<float>>(widen_bits(bits) << 16);
}

inline Vector<float> load(const Float16* source) {
#if defined(__AVX512F__)
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(source)));
#elif defined(__F16C__)
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source)));
#else
  Vector<float> values;
  for (int i = 0; i < kLanes<float>; ++i) values[i] = widen(source[i]);
  return values;
#endif
}

// Elements of a bool tensor. A mask has all bits of a lane set where the element is true.
struct Bool {
  uint8_t bits;
};

inline VectorOf<float>::mask load_mask(const Bool* source, float) {
#if defined(__AVX512F__)
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source));
  return -bit_cast<VectorOf<float>::mask>(_mm512_cvtepu8_epi32(bytes));
#elif defined(__AVX2__)
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(source));
  return -bit_cast<VectorOf<float>::mask>(_mm256_cvtepu8_epi32(bytes));
#else
  VectorOf<float>::mask lanes;
  for (int i = 0; i < kLanes<float>; ++i) lanes[i] = -static_cast<int32_t>(source[i].bits);
  return lanes;
#endif
}

inline VectorOf<double>::mask load_mask(const Bool* source, double) {
  VectorOf<double>::mask lanes;
  for (int i = 0; i < kLanes<double>; ++i) lanes[i] = -static_cast<int64_t>(source[i].bits);
  return lanes;
}

inline void store(float* target, Vector<float> values) { std::memcpy(target, &values, sizeof values); }

inline void store(double* target, Vector<double> values) { std::memcpy(target, &values, sizeof values); }

// Rounds to nearest, ties to even; a NaN keeps its sign and upper bits and remains a NaN.
inline void store(BFloat16* target, Vector<float> values) {
  const Words bits = bit_cast<Words>(values);
  const Words rounded = bits + 0x7FFFu + ((bits >> 16) & 1u);
  const Words quiet = bits | 0x00400000u;
  const Words kept = (values != values ? quiet : rounded) >> 16;
  const Halves halves = narrow_bits(kept);
  std::memcpy(target, &halves, sizeof halves);
}

inline void store(Float16* target, Vector<float> values) {
#if defined(__AVX512F__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(target), _mm512_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(target), _mm256_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT));
#else
  for (int i = 0; i < kLanes<float>; ++i) narrow(values[i], target + i);
#endif
}

// Computation type for elements of a type.
template <typename T>
using ComputeFor = std::conditional_t<std::is_same_v<T, double>, double, float>;

// Selects a whole vector, or the first `count` elements at the end of a row; elements beyond read as zero.
struct Whole {};
struct Part {
  int count;
};

template <typename T>
inline Vector<ComputeFor<T>> load(const T* source, Whole) {
  return load(source);
}

// Copy the first `count` elements of an array to or from a vector, with masks where the processor has them.
template <typename T>
inline void read_part(const T* source, int count, T* elements) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 2) {
    const __m256i bits = _mm256_maskz_loadu_epi16(static_cast<__mmask16>((1u << count) - 1u), source);
    std::memcpy(elements, &bits, sizeof bits);
  } else if constexpr (sizeof(T) == 4) {
    const __m512i bits = _mm512_maskz_loadu_epi32(static_cast<__mmask16>((1u << count) - 1u), source);
    std::memcpy(elements, &bits, sizeof bits);
  } else {
    const __m512i bits = _mm512_maskz_loadu_epi64(static_cast<__mmask8>((1u << count) - 1u), source);
    std::memcpy(elements, &bits, sizeof bits);
  }
#else
  std::memset(elements, 0, kLanes<ComputeFor<T>> * sizeof(T));
  std::memcpy(elements, source, static_cast<size_t>(count) * sizeof(T));
#endif
}

template <typename T>
inline void write_part(T* target, int count, const T* elements) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 2) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(elements));
    _mm256_mask_storeu_epi16(target, static_cast<__mmask16>((1u << count) - 1u), bits);
  } else if constexpr (sizeof(T) == 4) {
    _mm512_mask_storeu_epi32(target, static_cast<__mmask16>((1u << count) - 1u), _mm512_loadu_si512(elements));
  } else {
    _mm512_mask_storeu_epi64(target, static_cast<__mmask8>((1u << count) - 1u), _mm512_loadu_si512(elements));
  }
#else
  std::memcpy(target, elements, static_cast<size_t>(count) * sizeof(T));
#endif
}

template <typename T>
inline Vector<ComputeFor<T>> load(const T* source, Part part) {
  T elements[kLanes<ComputeFor<T>>];
  read_part(source, part.count, elements);
  return load(elements);
}

template <typename Compute>
inline typename VectorOf<Compute>::mask load_mask(const Bool* source, Whole) {
  return load_mask(source, Compute{});
}

template <typename Compute>
inline typename VectorOf<Compute>::mask load_mask(const Bool* source, Part part) {
  Bool elements[kLanes<Compute>] = {};
  std::memcpy(elements, source, static_cast<size_t>(part.count));
  return load_mask(elements, Compute{});
}

template <typename T, typename V>
inline void store(T* target, V values, Whole) {
  store(target, values);
}

template <typename T, typename V>
inline void store(T* target, V values, Part part) {
  T elements[kLanes<ComputeFor<T>>];
  store(elements, values);
  write_part(target, part.count, elements);
}

// Calls `body(column, lanes)` for every vector of a row; `lanes` is `Whole` or `Part`.
template <typename Compute, typename Body>
inline void for_vectors(int64_t columns, const Body& body) {
  int64_t column = 0;
  for (; column + kLanes<Compute> <= columns; column += kLanes<Compute>) body(column, Whole{});
  if (column < columns) body(column, Part{static_cast<int>(columns - column)});
}

// Replaces the elements beyond the end of a row.
template <typename V, typename Element>
inline V fill_beyond(V values, Whole, Element) {
  return values;
}

template <typename V, typename Element>
inline V fill_beyond(V values, Part part, Element fill) {
  for (int i = part.count; i < static_cast<int>(sizeof(V) / sizeof(Element)); ++i) values[i] = fill;
  return values;
}

// Sums pairwise in double: a chain of additions would take longer than a short row.
inline double add_lanes(Vector<double> values) {
  double lanes[kLanes<double>];
  std::memcpy(lanes, &values, sizeof values);
  for (int half = kLanes<double> / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  }
  return lanes[0];
}

inline double add_lanes(Vector<float> values) {
  typedef float Half __attribute__((vector_size(kVectorBytes / 2)));
  Half halves[2];
  std::memcpy(halves, &values, sizeof values);
  const Vector<double> lower = __builtin_convertvector(halves[0], Vector<double>);
  return add_lanes(lower + __builtin_convertvector(halves[1], Vector<double>));
}

// The sum of `term(column, lanes)` over a row, in four independent vectors; beyond a few thousand elements partial sums
// are added in double, so that rounding errors do not grow with the length of the row.
template <typename Compute, typename Term>
inline double sum_row(int64_t columns, const Term& term) {
  constexpr int64_t kStep = 4 * kLanes<Compute>;
  constexpr int64_t kRun = 64 * kStep;
  double total = 0.0;
  int64_t column = 0;
  while (columns - column >= kStep) {
    const int64_t end = column + (columns - column < kRun ? (columns - column) / kStep * kStep : kRun);
    Vector<Compute> a = {}, b = {}, c = {}, d = {};
    for (; column < end; column += kStep) {
      a += term(column, Whole{});
      b += term(column + kLanes<Compute>, Whole{});
      c += term(column + 2 * kLanes<Compute>, Whole{});
      d += term(column + 3 * kLanes<Compute>, Whole{});
    }
    total += add_lanes((a + b) + (c + d));
  }
  if (column == columns) return total;
  Vector<Compute> rest = {};
  for (; column + kLanes<Compute> <= columns; column += kLanes<Compute>) rest += term(column, Whole{});
  if (column < columns) rest += term(column, Part{static_cast<int>(columns - column)});
  return total + add_lanes(rest);
}

// Several sums of a row in one pass, for expensive terms: `body(column, lanes, terms)` adds to each of `kSums` vectors.
template <typename Compute, int kSums, typename Body>
inline void sum_row_together(int64_t columns, double (&totals)[kSums], const Body& body) {
  constexpr int64_t kRun = 128 * kLanes<Compute>;
  for (double& total : totals) total = 0.0;
  for (int64_t column = 0; column < columns;) {
    Vector<Compute> terms[kSums] = {};
    const int64_t end = columns - column < kRun ? columns : column + kRun;
    for (; column + kLanes<Compute> <= end; column += kLanes<Compute>) body(column, Whole{}, terms);
    if (column < end) body(column, Part{static_cast<int>(end - column)}, terms);
    column = end;
    for (int i = 0; i < kSums; ++i) totals[i] += add_lanes(terms[i]);
  }
}

// Maximum of `term(column, lanes)` over a row, ignoring NaN. Terms beyond the end must not exceed those of the row.
template <typename Compute, typename Term>
inline Compute max_row(int64_t columns, const Term& term) {
  constexpr int64_t kStep = 4 * kLanes<Compute>;
  const auto larger_of = [](Vector<Compute> value, Vector<Compute> most) { return value > most ? value : most; };
  const Vector<Compute> least = broadcast(-static_cast<Compute>(__builtin_inf()));
  Vector<Compute> a = least, b = least, c = least, d = least;
  int64_t column = 0;
  for (; column + kStep <= columns; column += kStep) {
    a = larger_of(term(column, Whole{}), a);
    b = larger_of(term(column + kLanes<Compute>, Whole{}), b);
    c = larger_of(term(column + 2 * kLanes<Compute>, Whole{}), c);
    d = larger_of(term(column + 3 * kLanes<Compute>, Whole{}), d);
  }
  for (; column + kLanes<Compute> <= columns; column += kLanes<Compute>) a = larger_of(term(column, Whole{}), a);
  if (column < columns) a = larger_of(term(column, Part{static_cast<int>(columns - column)}), a);
  a = larger_of(larger_of(a, b), larger_of(c, d));
  Compute most = a[0];
  for (int i = 1; i < kLanes<Compute>; ++i) most = a[i] > most ? a[i] : most;
  return most;
}

}  // namespace
}  // namespace kernel_pytorch
