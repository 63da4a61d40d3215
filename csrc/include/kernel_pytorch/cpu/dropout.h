// Dropout of whole rows: draws the mask of philox.h for a vector of counters at a time.
#pragma once

#include "kernel_pytorch/cpu/buffer.h"
#include "kernel_pytorch/cpu/vector.h"
#include "kernel_pytorch/philox.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace kernel_pytorch {
namespace {

typedef uint64_t Longs __attribute__((vector_size(kVectorBytes)));
constexpr int kCounters = kVectorBytes / static_cast<int>(sizeof(uint64_t));

// Products of the lower 32 bits of all lanes.
inline Longs multiply_words(Longs a, Longs b) {
#if defined(__AVX512F__)
  return bit_cast<Longs>(_mm512_mul_epu32(bit_cast<__m512i>(a), bit_cast<__m512i>(b)));
#elif defined(__AVX2__)
  return bit_cast<Longs>(_mm256_mul_epu32(bit_cast<__m256i>(a), bit_cast<__m256i>(b)));
#elif defined(__SSE2__)
  return bit_cast<Longs>(_mm_mul_epu32(bit_cast<__m128i>(a), bit_cast<__m128i>(b)));
#else
  return (a & 0xFFFFFFFFu) * (b & 0xFFFFFFFFu);
#endif
}

// Interleaved lanes of two vectors: `first` has those of the lower halves, `second` those of the upper halves.
struct Woven {
  Longs first;
  Longs second;
};

inline Woven weave(Longs a, Longs b) {
#if defined(__AVX512F__)
  const __m512i first = _mm512_setr_epi64(0, 8, 1, 9, 2, 10, 3, 11), second = _mm512_setr_epi64(4, 12, 5, 13, 6, 14, 7, 15);
  const __m512i x = bit_cast<__m512i>(a), y = bit_cast<__m512i>(b);
  return {bit_cast<Longs>(_mm512_permutex2var_epi64(x, first, y)), bit_cast<Longs>(_mm512_permutex2var_epi64(x, second, y))};
#elif defined(__AVX2__)
  const __m256i even = _mm256_unpacklo_epi64(bit_cast<__m256i>(a), bit_cast<__m256i>(b));
  const __m256i odd = _mm256_unpackhi_epi64(bit_cast<__m256i>(a), bit_cast<__m256i>(b));
  return {bit_cast<Longs>(_mm256_permute2x128_si256(even, odd, 0x20)),
          bit_cast<Longs>(_mm256_permute2x128_si256(even, odd, 0x31))};
#else
  return {Longs{a[0], b[0]}, Longs{a[1], b[1]}};
#endif
}

// Dropout masks of one row at a time. Empty if there is no dropout.
template <typename Compute>
class DropoutRow {
 public:
  using Mask = typename VectorOf<Compute>::mask;

  DropoutRow(const Dropout& dropout, int64_t columns)
      : quads_(ceil_divide(columns, kPhiloxWords)),
        kept_(dropout ? ceil_divide(quads_, kCounters) * kCounters * kPhiloxWords : 0) {
    if (!dropout) return;
    seed_ = static_cast<uint64_t>(*dropout.seed);
    least_ = static_cast<int32_t>(dropout.threshold);
    scale_ = static_cast<Compute>(dropout.scale);
  }

  explicit operator bool() const { return kept_.data() != nullptr; }

  // Draws the masks of the columns from `begin`, a multiple of four, to `end` of a row.
  void draw(int64_t row, int64_t begin, int64_t end) {
    const int64_t last = ceil_divide(end, kPhiloxWords);
    Longs lane;
    for (int i = 0; i < kCounters; ++i) lane[i] = static_cast<uint64_t>(i);
    for (int64_t quad = begin / kPhiloxWords; quad < last; quad += kCounters) {
      draw_vector(lane + static_cast<uint64_t>(row * quads_ + quad), kept_.data() + kPhiloxWords * quad);
    }
  }

  // Applies dropout to the vector at `column` of the row that was drawn last.
  Vector<Compute> apply(Vector<Compute> x, int64_t column) const {
    Mask kept;
    std::memcpy(&kept, kept_.data() + column, sizeof kept);
    return kept ? x * scale_ : Vector<Compute>{};
  }

 private:
  typedef int32_t Words32 __attribute__((vector_size(kVectorBytes)));
  using Lane = std::conditional_t<sizeof(Compute) == 8, int64_t, int32_t>;

  void draw_vector(Longs counter, Lane* kept) const {
    Longs a = counter & 0xFFFFFFFFu, b = counter >> 32, c = {}, d = {};
    uint32_t key_a = static_cast<uint32_t>(seed_), key_b = static_cast<uint32_t>(seed_ >> 32);
    const Longs factor_a = Longs{} + kPhiloxFactorA, factor_c = Longs{} + kPhiloxFactorC;
    for (int round = 0; round < kPhiloxRounds; ++round) {
      const Longs of_a = multiply_words(a, factor_a), of_c = multiply_words(c, factor_c);
      // The products ignore the upper halves of b and d.
      a = (of_c >> 32) ^ b ^ static_cast<uint64_t>(key_a);
      b = of_c;
      c = (of_a >> 32) ^ d ^ static_cast<uint64_t>(key_b);
      d = of_a;
      key_a += kPhiloxStepA;
      key_b += kPhiloxStepB;
    }
    const Woven words = weave((a & 0xFFFFFFFFu) | (b << 32), (c & 0xFFFFFFFFu) | (d << 32));
    store_kept(words.first, kept);
    store_kept(words.second, kept + 2 * kCounters);
  }

  void store_kept(Longs words, Lane* kept) const {
    const Words32 lanes = bit_cast<Words32>(bit_cast<Words>(words) >> 1) >= least_;
    if constexpr (sizeof(Lane) == sizeof(int32_t)) {
      std::memcpy(kept, &lanes, sizeof lanes);
    } else {
      for (int i = 0; i < 2 * kCounters; ++i) kept[i] = lanes[i];
    }
  }

  const int64_t quads_;
  const Buffer<Lane> kept_;
  uint64_t seed_ = 0;
  int32_t least_ = 0;
  Compute scale_ = 1;
};

}  // namespace
}  // namespace kernel_pytorch
