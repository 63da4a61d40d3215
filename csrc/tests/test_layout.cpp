// Tests the layouts of rows over threads, and quotients for which 32 bits are enough.

#include "kernel_pytorch/cuda/layout.h"

#include <cstdio>
#include <initializer_list>

using namespace kernel_pytorch;

static int failures = 0;

static void expect(bool right, const char* what, long long a, long long b) {
  if (right) return;
  ++failures;
  std::printf("%s: wrong at %lld, %lld\n", what, a, b);
}

static void test_layouts() {
  constexpr Lengths kLengths = {{32, 512, 2048, 4096}, 4, 256};
  const int64_t most = int64_t{8} * kMostClusterThreads * kMostBlocks;
  for (int64_t vectors = 1; vectors <= most; vectors += vectors < 9000 ? 1 : 997) {
    const RowLayout layout = layout_of(vectors, kLengths);
    const int64_t held = int64_t{layout.each} * layout.threads * layout.cluster;
    expect(held >= vectors, "everything is held", vectors, held);
    expect(layout.threads * layout.rows <= 1024, "threads of a block", vectors, layout.threads * layout.rows);
    const bool lanes = layout.threads < kWarpThreads;
    expect(lanes ? kWarpThreads % layout.threads == 0 : layout.threads % kWarpThreads == 0, "whole warps", vectors,
           layout.threads);
    expect((layout.threads * layout.rows) % kWarpThreads == 0, "blocks of whole warps", vectors, layout.rows);
    if (vectors <= 4096) expect(layout.cluster == 1, "one block", vectors, layout.cluster);
    if (layout.cluster == 1) continue;
    expect(layout.cluster <= kMostBlocks && layout.threads <= kMostClusterThreads, "a cluster that there is", vectors,
           layout.cluster);
    expect(held < 2 * vectors + 2 * 4096, "no larger cluster than needed", vectors, held);
  }
  expect(layout_of(most + 1, kLengths).cluster == 0, "too long for a cluster", most + 1, 0);
  expect(layout_of(4097, kLengths, 0).cluster == 0, "a card without clusters", 4097, 0);
  constexpr Lengths kFour = {{32, 512, 2048, 4096}, 4, 512, 4};
  expect(layout_of(most / 2 + 1, kFour).cluster == 0, "four vectors at most", most / 2 + 1, 0);
}

// Expected number of teams: threads per multiprocessor are limited, and larger clusters use fewer than 132 of them.
static void test_teams() {
  constexpr Lengths kLengths = {{512, 1024, 1024, 1024}, 4, 256};
  for (const int64_t vectors : {1, 16, 128, 512, 1024, 2048, 4096, 8192, 16384, 32768}) {
    const RowLayout layout = layout_of(vectors, kLengths);
    const int64_t reached = layout.cluster > 8 ? 112 : layout.cluster > 2 ? 120 : 132;
    const int64_t teams = teams_of(layout, 1024);
    expect(teams >= 1, "somebody works", vectors, teams);
    expect(teams * layout.cluster * layout.threads * layout.rows <= reached * 1024, "at a time", vectors, teams);
    for (const int64_t rows : {0, 1, 7, 100, 100000}) {
      const int64_t shares = shares_of(rows, layout, 1024);
      expect(shares >= 1 && shares <= teams && (rows == 0 || shares <= rows), "shares", rows, shares);
    }
  }
}

static void test_quotients() {
  const int64_t large = (int64_t{1} << 32) + 5;
  for (const int64_t value : {int64_t{0}, int64_t{1}, int64_t{4095}, large - 6, large, large * 1000 + 3}) {
    for (const int64_t divisor : {int64_t{1}, int64_t{3}, int64_t{4096}, large}) {
      expect(quotient(value, divisor) == value / divisor, "quotient", value, divisor);
      expect(remainder(value, divisor) == value % divisor, "remainder", value, divisor);
    }
  }
}

int main() {
  test_layouts();
  test_teams();
  test_quotients();
  return failures == 0 ? 0 : 1;
}
