// Tests the random words of the dropout mask against the Python reference. Prints each error; exits with 1 if any.

#include "kernel_pytorch/philox.h"

#include <cstdio>

using namespace kernel_pytorch;

namespace {

int wrong = 0;

void expect(bool right, const char* what, long long at) {
  if (right) return;
  ++wrong;
  std::printf("%s: wrong at %lld\n", what, at);
}

struct Answer {
  int64_t seed;
  uint64_t counter;
  uint32_t word[kPhiloxWords];
};

// The first one is from Random123 (kat_vectors, philox4x32 10); all of them are from philox.py of fused-ln-act.
constexpr Answer kAnswers[] = {
    {0, 0, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
    {1, 0, {0xe3e80670, 0xe50a0ebc, 0x95f222c0, 0xb615aa27}},
    {-3, 7, {0xd64d9b84, 0x3ddf7033, 0xaa7beabb, 0xe35b14fb}},
    {INT64_MAX, 4294967295, {0xb1693dc0, 0x841ec283, 0xff04df7d, 0xc8a72ef0}},
    {12345678901234567, 1099511627781, {0x8bbdbd2d, 0xc96437c2, 0x922823ab, 0x0d044f6b}},
};

// Mask of a (3, 7) tensor with seed 42, p = 0.4.
constexpr const char* kMask[] = {"1100101", "1111111", "0100000"};

}  // namespace

int main() {
  for (const Answer& answer : kAnswers) {
    const PhiloxWords found = philox(static_cast<uint64_t>(answer.seed), answer.counter);
    for (int i = 0; i < kPhiloxWords; ++i) expect(found.word[i] == answer.word[i], "philox", answer.seed);
  }
  expect(dropout_threshold(0.0) == 0, "threshold of 0", 0);
  expect(dropout_threshold(0.1) == 214748365, "threshold of 0.1", 0);
  expect(dropout_threshold(0.5) == 1u << 30, "threshold of 0.5", 0);
  expect(dropout_threshold(0.9) == 1932735283, "threshold of 0.9", 0);
  expect(dropout_threshold(0.99999999999) == 2147483647, "the largest threshold", 0);
  expect(is_kept(0, 0) && !is_kept(1, 1) && is_kept(2, 1) && !is_kept(0xFFFFFFFDu, 0x7FFFFFFFu), "is_kept", 0);
  for (int64_t row = 0; row < 3; ++row) {
    for (int64_t column = 0; column < 7; ++column) {
      const PhiloxWords words = philox(42, static_cast<uint64_t>(dropout_counter(row, column, 7)));
      const bool kept = is_kept(words.word[column % kPhiloxWords], dropout_threshold(0.4));
      expect(kept == (kMask[row][column] == '1'), "mask", row * 7 + column);
    }
  }
  expect(dropout_counter(int64_t{1} << 31, 5, 8) == (int64_t{1} << 32) + 1, "dropout_counter beyond 2^32", 0);
  return wrong != 0;
}
