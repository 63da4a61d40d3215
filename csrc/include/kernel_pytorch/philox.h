// Dropout mask: Philox-4x32-10 of a seed and an element's position, in integer arithmetic that host and device share.
//
// A tensor is viewed as rows of its last dimension. The key is the seed. Counter `row * ceil(columns / 4) + column / 4`
// provides one word for each of four neighbouring columns. An element is kept if the upper 31 bits of its word are at
// least round(p * 2^31). Reference: packages/fused-ln-act/src/kernel_pytorch/fused_ln_act/philox.py.
//
// Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011, https://doi.org/10.1145/2063384.2063405.
#pragma once

#include "kernel_pytorch/index.h"

namespace kernel_pytorch {

constexpr uint32_t kPhiloxFactorA = 0xD2511F53u, kPhiloxFactorC = 0xCD9E8D57u;
constexpr uint32_t kPhiloxStepA = 0x9E3779B9u, kPhiloxStepB = 0xBB67AE85u;
constexpr int kPhiloxRounds = 10;
constexpr int kPhiloxWords = 4;

struct PhiloxWords {
  uint32_t word[kPhiloxWords];
};

KP_HOST_DEVICE constexpr PhiloxWords philox(uint64_t seed, uint64_t counter) {
  uint32_t a = static_cast<uint32_t>(counter), b = static_cast<uint32_t>(counter >> 32), c = 0, d = 0;
  uint32_t key_a = static_cast<uint32_t>(seed), key_b = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint64_t of_a = static_cast<uint64_t>(a) * kPhiloxFactorA;
    const uint64_t of_c = static_cast<uint64_t>(c) * kPhiloxFactorC;
    a = static_cast<uint32_t>(of_c >> 32) ^ b ^ key_a;
    b = static_cast<uint32_t>(of_c);
    c = static_cast<uint32_t>(of_a >> 32) ^ d ^ key_b;
    d = static_cast<uint32_t>(of_a);
    key_a += kPhiloxStepA;
    key_b += kPhiloxStepB;
  }
  return {{a, b, c, d}};
}

// Counter of an element, which uses word `column % 4`.
KP_HOST_DEVICE constexpr int64_t dropout_counter(int64_t row, int64_t column, int64_t columns) {
  return row * ceil_divide(columns, kPhiloxWords) + column / kPhiloxWords;
}

// Threshold for the upper 31 bits of a word: elements whose word is below it are dropped.
KP_HOST_DEVICE constexpr uint32_t dropout_threshold(double p) {
  return static_cast<uint32_t>(smaller(static_cast<int64_t>(p * 2147483648.0 + 0.5), 2147483647));
}

KP_HOST_DEVICE constexpr bool is_kept(uint32_t word, uint32_t threshold) { return (word >> 1) >= threshold; }

// Drops an element or multiplies it by `scale`; does nothing if `seed` is null. The seed is on the device of the
// tensors.
struct Dropout {
  const int64_t* seed = nullptr;
  uint32_t threshold = 0;
  double scale = 1.0;
  explicit operator bool() const { return seed != nullptr; }
};

}  // namespace kernel_pytorch
