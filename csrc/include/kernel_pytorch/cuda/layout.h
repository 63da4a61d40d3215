// Layouts of rows in registers over threads: arithmetic only, for launchers of kernels and for allocation.
#pragma once

#include "kernel_pytorch/index.h"

namespace kernel_pytorch {

constexpr int kWarpThreads = 32;
constexpr int kFewThreads = 128;  // per block with several short rows
constexpr int kMostBlocks = 16;   // per cluster

constexpr int kMostClusterThreads = 512;  // per block of a cluster

// Number of 16-byte vectors per thread: `1 << i` for rows of up to `until[i]` vectors. Longer rows are shared by a
// cluster of blocks of `cluster_threads` threads with `cluster_each` vectors each. If the largest cluster does not hold
// a row, blocks get more threads, and then threads up to `most_cluster_each` vectors.
struct Lengths {
  int64_t until[4];
  int cluster_each;
  int cluster_threads;
  int most_cluster_each = 8;
};

struct RowLayout {
  int each;     // vectors per thread
  int threads;  // per row in one block; a power of two below a warp, else whole warps
  int rows;     // per block
  int cluster;  // blocks per row; 0 if no cluster holds it
};

// `most_blocks` is the largest cluster size, 0 if clusters are not supported.
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

// Number of teams that a large GPU runs at once, with `resident` threads per multiprocessor. It has 132
// multiprocessors; larger clusters cannot use all of them.
inline int64_t teams_of(const RowLayout& layout, int resident) {
  const int blocks = layout.cluster == 0 ? 1 : layout.cluster;
  const int reached = blocks <= 2 ? 132 : blocks <= 8 ? 120 : 112;
  const int on_each = resident / (layout.threads * layout.rows);
  return int64_t{reached} * (on_each > 1 ? on_each : 1) / blocks;
}

// Number of partial sums for a gradient that is summed over rows: one for each team that runs at once. It depends only
// on the shape, so that the order of summation is the same on every device.
inline int64_t shares_of(int64_t rows, const RowLayout& layout, int resident) {
  return larger(1, smaller(teams_of(layout, resident), ceil_divide(rows, layout.rows)));
}

}  // namespace kernel_pytorch
