// How rows that stay in registers are laid over threads: arithmetic alone, for kernels' launchers and for allocation.
#pragma once

#include "kernel_pytorch/index.h"

namespace kernel_pytorch {

constexpr int kWarpThreads = 32;
constexpr int kFewThreads = 128;  // of a block that has several short rows
constexpr int kMostBlocks = 16;   // of a cluster

constexpr int kMostClusterThreads = 512;  // of a block of a cluster

// How many vectors of 16 bytes a thread takes: up to `until[i]` of a row `1 << i` of them. A row longer than the last is
// shared by a cluster of blocks of `cluster_threads`, with `cluster_each` vectors a thread; where even the largest cluster
// does not hold it, by one of more threads and then with up to `most_cluster_each`.
struct Lengths {
  int64_t until[4];
  int cluster_each;
  int cluster_threads;
  int most_cluster_each = 8;
};

struct RowLayout {
  int each;     // vectors a thread
  int threads;  // of a row in one block; a power of two below a warp, else whole warps
  int rows;     // of a block
  int cluster;  // blocks of a row; 0 where no cluster holds it
};

// `most_blocks` are those that a cluster may have, 0 where there are none.
inline RowLayout layout_of(int64_t vectors, const Lengths& lengths, int most_blocks = kMostBlocks) {
  if (vectors <= kWarpThreads) {
    int lanes = 1;
    while (lanes < vectors) lanes *= 2;
    return {1, lanes, kFewThreads / lanes, 1};
  }
  for (int i = 0; i < 4; ++i) {
    if (vectors > lengths.until[i]) continue;
    const int64_t threads = ceil_divide(ceil_divide(vectors, int64_t{1} << i), kWarpThreads) * kWarpThreads;
    return {1 << i, static_cast<int>(threads), threads == kWarpThreads ? kFewThreads / kWarpThreads : 1, 1};
  }
  RowLayout layout = {lengths.cluster_each, lengths.cluster_threads, 1, 0};
  const auto blocks_for = [&] { return ceil_divide(vectors, int64_t{layout.each} * layout.threads); };
  while (blocks_for() > most_blocks && layout.threads < kMostClusterThreads) layout.threads *= 2;
  while (blocks_for() > most_blocks && layout.each < lengths.most_cluster_each) layout.each *= 2;
  if (blocks_for() > most_blocks) return layout;
  layout.cluster = 2;
  while (layout.cluster < blocks_for()) layout.cluster *= 2;
  return layout;
}

// Teams that a large card (132 multiprocessors, of which larger clusters reach fewer) runs at a time, with `resident`
// threads on each.
inline int64_t teams_of(const RowLayout& layout, int resident) {
  const int blocks = layout.cluster == 0 ? 1 : layout.cluster;
  const int reached = blocks <= 2 ? 132 : blocks <= 8 ? 120 : 112;
  const int on_each = resident / (layout.threads * layout.rows);
  return int64_t{reached} * (on_each > 1 ? on_each : 1) / blocks;
}

// Shares of the rows for a gradient that is summed over them: one for every team that runs at a time; by shape alone, so
// that sums have one order everywhere.
inline int64_t shares_of(int64_t rows, const RowLayout& layout, int resident) {
  return larger(1, smaller(teams_of(layout, resident), ceil_divide(rows, layout.rows)));
}

}  // namespace kernel_pytorch
