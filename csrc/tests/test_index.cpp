// Tests the index arithmetic shared by kernels and CPU backends. Prints each error; exits with the number of errors.

#include <cstdio>
#include <initializer_list>

#include "kernel_pytorch/index.h"

using namespace kernel_pytorch;

namespace {

int faults = 0;

void expect(bool right, const char* what, long long a = 0, long long b = 0, long long c = 0) {
  if (right) return;
  std::printf("%s (%lld, %lld, %lld)\n", what, a, b, c);
  ++faults;
}

void shares_cover_all_rows_once(int64_t rows, int64_t parts) {
  int64_t next = 0;
  for (int64_t part = 0; part < parts; ++part) {
    const Range range = share_of(rows, parts, part);
    expect(range.begin == next, "share_of leaves a gap or an overlap", rows, parts, part);
    const int64_t size = range.end - range.begin;
    expect(size == rows / parts || size == rows / parts + 1, "share_of is uneven", rows, parts, part);
    next = range.end;
  }
  expect(next == rows, "share_of does not end with the rows", rows, parts);
}

}  // namespace

int main() {
  for (const int64_t rows : {0, 1, 2, 63, 64, 65, 1031}) {
    for (const int64_t parts : {1, 2, 3, 64, 67}) shares_cover_all_rows_once(rows, parts);
  }
  const int64_t huge = (int64_t{1} << 40) + 7;
  for (const int64_t part : {0, 1, 262, 263}) {
    const Range range = share_of(huge, 264, part), next = share_of(huge, 264, part + 1);
    expect(part == 263 ? range.end == huge : range.end == next.begin, "share_of beyond 2^31", part);
  }
  expect(row_offset(70000, 70000) == 4900000000, "row_offset beyond 2^31");
  expect(row_offset(int64_t{1} << 33, 5) == int64_t{5} << 33, "row_offset beyond 2^31");
  expect(ceil_divide(0, 4) == 0 && ceil_divide(1, 4) == 1 && ceil_divide(4, 4) == 1 && ceil_divide(5, 4) == 2,
         "ceil_divide");
  expect(ceil_divide((int64_t{1} << 40) + 1, 2) == (int64_t{1} << 39) + 1, "ceil_divide beyond 2^31");
  for (int64_t columns = 0; columns < 40; ++columns) {
    int total = 0;
    for (int64_t column = 0; column < 48; column += 8) {
      const int valid = valid_elements(column, columns, 8);
      expect(valid >= 0 && valid <= 8, "valid_elements out of its width", column, columns);
      expect(valid == 0 || column + valid <= columns, "valid_elements reads beyond the row", column, columns);
      total += valid;
    }
    expect(total == columns, "valid_elements misses elements", columns, total);
  }
  expect(valid_elements((int64_t{1} << 33) - 3, int64_t{1} << 33, 8) == 3, "valid_elements beyond 2^31");
  expect(rows_are_aligned(256, 8, 2) && !rows_are_aligned(264, 8, 2) && !rows_are_aligned(256, 9, 2),
         "rows_are_aligned");
  return faults;
}
