// Tests tiles and broadcast masks against a brute-force count. Prints each error; exits with 1 if there is one.

#include <cstdio>
#include <initializer_list>

#include "kernel_pytorch/index.h"

using namespace kernel_pytorch;

namespace {

int wrong = 0;

void expect(bool right, const char* what, int64_t at) {
  if (right) return;
  ++wrong;
  std::printf("%s: wrong at %lld\n", what, static_cast<long long>(at));
}

void check_tiles(int64_t rows, int64_t columns, int64_t width) {
  int64_t tile = 0;
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t begin = 0; begin < columns; begin += width, ++tile) {
      const Tile found = tile_at(tile, columns, width);
      const int64_t end = begin + width < columns ? begin + width : columns;
      expect(found.row == row && found.columns.begin == begin && found.columns.end == end, "tile_at", tile);
    }
  }
  expect(tiles_of(rows, columns, width) == tile, "tiles_of", tile);
}

// A mask of shape (a, b, c) or ones, broadcast to rows of shape (a, b, c).
void check_broadcast(int64_t a, int64_t b, int64_t c, bool has_a, bool has_b, bool has_c, int64_t columns) {
  Broadcast broadcast{};
  const int64_t step_c = has_c ? columns : 0;
  const int64_t step_b = has_b ? columns * (has_c ? c : 1) : 0;
  const int64_t step_a = has_a ? columns * (has_c ? c : 1) * (has_b ? b : 1) : 0;
  append_dimension(broadcast, a, step_a);
  append_dimension(broadcast, b, step_b);
  append_dimension(broadcast, c, step_c);
  const int64_t kept_rows = broadcast_rows(broadcast), uses = broadcast_uses(broadcast);
  expect(kept_rows == (has_a ? a : 1) * (has_b ? b : 1) * (has_c ? c : 1), "broadcast_rows", kept_rows);
  expect(kept_rows * uses == a * b * c, "broadcast_uses", uses);
  for (int64_t row = 0; row < a * b * c; ++row) {
    const int64_t i = row / (b * c), j = row / c % b, k = row % c;
    expect(broadcast_offset(broadcast, row) == i * step_a + j * step_b + k * step_c, "broadcast_offset", row);
  }
  bool seen[4096] = {};
  for (int64_t kept = 0; kept < kept_rows; ++kept) {
    for (int64_t use = 0; use < uses; ++use) {
      const int64_t row = row_of_use(broadcast, kept, use);
      expect(row >= 0 && row < a * b * c && !seen[row], "row_of_use: each row once", row);
      expect(broadcast_offset(broadcast, row) == kept * columns, "row_of_use: of its mask row", row);
      seen[row] = true;
    }
  }
}

}  // namespace

int main() {
  for (const int64_t columns : {1, 5, 8, 9, 4096, 4097}) {
    for (const int64_t width : {1, 8, 4096}) check_tiles(3, columns, width);
  }
  for (int chosen = 0; chosen < 8; ++chosen) {
    check_broadcast(3, 4, 5, chosen & 1, chosen & 2, chosen & 4, 24);
    check_broadcast(1, 4, 1, chosen & 1, chosen & 2, chosen & 4, 7);
    check_broadcast(2, 1, 3, chosen & 1, chosen & 2, chosen & 4, 1);
  }
  return wrong != 0;
}
