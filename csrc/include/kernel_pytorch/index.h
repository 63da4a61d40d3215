// Tiles, offsets and masks: arithmetic that host and device share, so that it is tested without a GPU.
//
// Sizes and offsets are 64 bits wide, because a tensor may have more than 2^31 elements.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define KP_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define KP_HOST_DEVICE inline
#endif

namespace kernel_pytorch {

KP_HOST_DEVICE constexpr int64_t ceil_divide(int64_t value, int64_t divisor) { return (value + divisor - 1) / divisor; }

KP_HOST_DEVICE constexpr int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

KP_HOST_DEVICE constexpr int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

// value / divisor, in 32 bits where both fit, which takes a fraction of the instructions. Neither may be negative.
KP_HOST_DEVICE constexpr int64_t quotient(int64_t value, int64_t divisor) {
  return (value | divisor) < (int64_t{1} << 32) ? static_cast<uint32_t>(value) / static_cast<uint32_t>(divisor)
                                                : value / divisor;
}

KP_HOST_DEVICE constexpr int64_t remainder(int64_t value, int64_t divisor) {
  return value < divisor ? value : value - quotient(value, divisor) * divisor;
}

// Offset of a row in a contiguous (rows, columns) tensor.
KP_HOST_DEVICE constexpr int64_t row_offset(int64_t row, int64_t columns) { return row * columns; }

// A half-open range of rows or columns.
struct Range {
  int64_t begin;
  int64_t end;
};

// Rows of part `part` of `parts`: contiguous, in order, each row in exactly one part, sizes at most one apart. The
// parts depend only on the sizes, so sums over parts round identically for any number of threads.
KP_HOST_DEVICE constexpr Range share_of(int64_t rows, int64_t parts, int64_t part) {
  const int64_t size = rows / parts;
  const int64_t rest = rows % parts;
  const int64_t begin = part * size + smaller(part, rest);
  return {begin, begin + size + (part < rest ? 1 : 0)};
}

// A piece of one row: the unit of work of elementwise operators, so that several threads can also share one long row.
struct Tile {
  int64_t row;
  Range columns;
};

// Number of tiles of `width` columns that cover `rows` of `columns`; the last tile of a row may be narrower.
KP_HOST_DEVICE constexpr int64_t tiles_of(int64_t rows, int64_t columns, int64_t width) {
  return rows * ceil_divide(columns, width);
}

KP_HOST_DEVICE constexpr Tile tile_at(int64_t tile, int64_t columns, int64_t width) {
  const int64_t each = ceil_divide(columns, width);
  const int64_t begin = tile % each * width;
  return {tile / each, {begin, smaller(begin + width, columns)}};
}

// A contiguous tensor broadcast to the rows of another tensor. It lists the leading dimensions of that other tensor,
// without those of size one and with mergeable neighbours merged, and for each the step in the broadcast tensor, 0
// where it is repeated. PyTorch tensors have at most 64 dimensions.
struct Broadcast {
  static constexpr int kMaxDimensions = 64;
  int64_t size[kMaxDimensions];
  int64_t step[kMaxDimensions];
  int dimensions;
  int column_step;  // 0 if one element is broadcast along the whole row, else 1
};

KP_HOST_DEVICE constexpr void append_dimension(Broadcast& b, int64_t size, int64_t step) {
  if (size == 1) return;
  if (b.dimensions > 0) {
    const int last = b.dimensions - 1;
    if (b.step[last] == step * size) {
      b.size[last] *= size;
      b.step[last] = step;
      return;
    }
  }
  b.size[b.dimensions] = size;
  b.step[b.dimensions] = step;
  ++b.dimensions;
}

// Offset in the broadcast tensor of the row that corresponds to `row`.
KP_HOST_DEVICE constexpr int64_t broadcast_offset(const Broadcast& b, int64_t row) {
  int64_t offset = 0;
  for (int d = b.dimensions - 1; d > 0; --d) {
    offset += row % b.size[d] * b.step[d];
    row /= b.size[d];
  }
  return b.dimensions > 0 ? offset + row * b.step[0] : offset;
}

// Number of rows of the broadcast tensor; `broadcast_uses` returns how often each of them is used.
KP_HOST_DEVICE constexpr int64_t broadcast_rows(const Broadcast& b) {
  int64_t rows = 1;
  for (int d = 0; d < b.dimensions; ++d) rows *= b.step[d] != 0 ? b.size[d] : 1;
  return rows;
}

KP_HOST_DEVICE constexpr int64_t broadcast_uses(const Broadcast& b) {
  int64_t uses = 1;
  for (int d = 0; d < b.dimensions; ++d) uses *= b.step[d] != 0 ? 1 : b.size[d];
  return uses;
}

// The row that uses row `kept` of the broadcast tensor for the `use`-th time.
KP_HOST_DEVICE constexpr int64_t row_of_use(const Broadcast& b, int64_t kept, int64_t use) {
  int64_t row = 0, unit = 1;
  for (int d = b.dimensions - 1; d >= 0; --d) {
    const bool keeps = b.step[d] != 0;
    const int64_t rest = keeps ? kept : use;
    row += rest % b.size[d] * unit;
    kept = keeps ? rest / b.size[d] : kept;
    use = keeps ? use : rest / b.size[d];
    unit *= b.size[d];
  }
  return row;
}

// Number of valid elements in a vector of `width` at `column`: 0 beyond the end, fewer than `width` across it.
KP_HOST_DEVICE constexpr int valid_elements(int64_t column, int64_t columns, int width) {
  return static_cast<int>(larger(0, smaller(columns - column, width)));
}

// Whether rows of `columns` elements of `size` bytes that start at `address` can be read in 16-byte vectors.
KP_HOST_DEVICE constexpr bool rows_are_aligned(uint64_t address, int64_t columns, int64_t size) {
  return address % 16 == 0 && columns * size % 16 == 0;
}

}  // namespace kernel_pytorch
