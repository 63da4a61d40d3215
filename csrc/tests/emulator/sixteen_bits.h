// 16-bit numbers, rounded to nearest, ties to even.
#pragma once

#include <cstdint>
#include <cstring>

namespace emulator {

inline uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float float_of(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

struct HalfFormat {
  static float widened(uint16_t bits) {
    const uint32_t sign = (bits & 0x8000u) << 16, exponent = bits >> 10 & 31, digits = bits & 0x3ffu;
    if (exponent == 0) return float_of(sign | bits_of(static_cast<float>(digits) * 0x1p-24f));
    return float_of(sign | (exponent == 31 ? 255u : exponent + 112) << 23 | digits << 13);
  }
  static uint16_t rounded(float value) {
    const uint32_t sign = bits_of(value) >> 16 & 0x8000u, size = bits_of(value) & 0x7fffffffu;
    if (size > 0x7f800000u) return 0x7fff;
    if (size >= bits_of(65520.0f)) return static_cast<uint16_t>(sign | 0x7c00u);
    // Adding one half rounds a subnormal number and puts its digits into the lowest bits.
    if (size < bits_of(0x1p-14f)) return static_cast<uint16_t>(sign | (bits_of(float_of(size) + 0.5f) - bits_of(0.5f)));
    return static_cast<uint16_t>(sign | (size + 0xfff + (size >> 13 & 1) - (112u << 23)) >> 13);
  }
};

struct BFloatFormat {
  static float widened(uint16_t bits) { return float_of(static_cast<uint32_t>(bits) << 16); }
  static uint16_t rounded(float value) {
    const uint32_t bits = bits_of(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
    return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  }
};

template <typename Format>
struct SixteenBits {
  uint16_t bits;

  static SixteenBits rounded(float value) { return {Format::rounded(value)}; }
  float widened() const { return Format::widened(bits); }
};

}  // namespace emulator
