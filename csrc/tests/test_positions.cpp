// Tests the table row of a token: with and without positions, in 32 and 64 bits, inside and outside of the tables.

#include "rotary_embedding/rotary_embedding.h"

#include <cstdio>
#include <vector>

using namespace kernel_pytorch;
using rotary_embedding::Positions;
using rotary_embedding::table_row;

static int failures = 0;

static void expect(int64_t found, int64_t right, const char* what, long long token) {
  if (found == right) return;
  ++failures;
  std::printf("%s: token %lld has row %lld, and not %lld\n", what, token, static_cast<long long>(found),
              static_cast<long long>(right));
}

static void test_tables_by_token() {
  for (int64_t rows = 1; rows < 7; ++rows) {
    for (int64_t token = 0; token < 20; ++token) expect(table_row({nullptr, 1, true}, rows, token), token % rows, "none", token);
  }
  expect(table_row({nullptr, 1, true}, int64_t{1} << 33, int64_t{5} << 33), 0, "beyond 2^31", int64_t{5} << 33);
}

template <typename T>
static void test_positions(const std::vector<T>& positions) {
  const auto count = static_cast<int64_t>(positions.size());
  const Positions given = {positions.data(), count, sizeof(T) == 8};
  for (int64_t rows = 0; rows < 7; ++rows) {
    for (int64_t token = 0; token < 3 * count; ++token) {  // three sequences with the same positions
      const int64_t position = positions[static_cast<size_t>(token % count)];
      expect(table_row(given, rows, token), position >= 0 && position < rows ? position : -1, "positions", token);
    }
  }
}

int main() {
  test_tables_by_token();
  test_positions<int64_t>({0, 3, 1, 4, 4, -1, 5, 6, int64_t{1} << 32, (int64_t{1} << 32) + 2, -(int64_t{1} << 62)});
  test_positions<int32_t>({0, 3, 1, 4, 4, -1, 5, 6, 2147483647, -2147483647 - 1});
  return failures != 0;
}
