// Tests the pairing of columns, the offsets of heads, and the columns of each thread of the CUDA kernels.

#include "kernel_pytorch/rotary.h"

#include <cstdio>
#include <vector>

using namespace kernel_pytorch;

static int failures = 0;

static void expect(bool right, const char* what, long long a, long long b) {
  if (right) return;
  ++failures;
  std::printf("%s: wrong at %lld, %lld\n", what, a, b);
}

static void test_pairs() {
  for (const bool interleaved : {false, true}) {
    for (int64_t pairs = 1; pairs < 40; ++pairs) {
      std::vector<int> seen(static_cast<size_t>(2 * pairs));
      for (int64_t pair = 0; pair < pairs; ++pair) {
        const int64_t first = first_of(pair, interleaved), second = second_of(pair, pairs, interleaved);
        ++seen[static_cast<size_t>(first)];
        ++seen[static_cast<size_t>(second)];
        expect(second - first == (interleaved ? 1 : pairs), "distance", pair, pairs);
        const Partner of_first = partner_of(first, pairs, interleaved), of_second = partner_of(second, pairs, interleaved);
        expect(of_first.pair == pair && of_first.column == second && !of_first.second, "partner of first", pair, pairs);
        expect(of_second.pair == pair && of_second.column == first && of_second.second, "partner of second", pair, pairs);
      }
      for (int64_t column = 0; column < 2 * pairs; ++column) {
        expect(seen[static_cast<size_t>(column)] == 1, "columns", column, pairs);
      }
    }
  }
}

static void test_slots() {
  for (const bool interleaved : {false, true}) {
    for (const int width : {4, 8}) {
      for (int pairs = width; pairs <= 8 * width; pairs += width) {
        for (int columns = 2 * pairs; columns <= 20 * width; columns += 2 * width) {
          std::vector<int> seen(static_cast<size_t>(columns));
          for (int index = 0; index < columns / (2 * width); ++index) {
            const Slot slot = slot_at(index, pairs, width, interleaved);
            for (int i = 0; i < width; ++i) {
              ++seen[static_cast<size_t>(slot.first + i)];
              ++seen[static_cast<size_t>(slot.second + i)];
              expect(slot.passes == (slot.first >= 2 * pairs), "passes", slot.first, pairs);
              if (slot.passes || interleaved) continue;
              const Partner partner = partner_of(slot.first + i, pairs, false);
              expect(partner.column == slot.second + i && partner.pair == index * width + i, "slot", index, i);
            }
            for (int i = 0; interleaved && !slot.passes && i < 2 * width; ++i) {  // both vectors, consecutively
              expect(slot.second == slot.first + width, "neighbours", index, i);
              expect(partner_of(slot.first + i, pairs, true).pair == index * width + i / 2, "their pairs", index, i);
            }
          }
          for (int column = 0; column < columns; ++column) {
            expect(seen[static_cast<size_t>(column)] == 1, "slots", column, columns);
          }
        }
      }
    }
  }
}

static void test_heads() {
  const HeadStrides packed = {3 * 4 * 16, 16};
  expect(head_offset(packed, 5, 2) == 5 * 192 + 32, "packed", 5, 2);
  const HeadStrides far = {int64_t{1} << 33, 128};
  expect(head_offset(far, 3, 1) == (int64_t{3} << 33) + 128, "beyond 2^31", 3, 1);
}

int main() {
  test_pairs();
  test_slots();
  test_heads();
  return failures != 0;
}
