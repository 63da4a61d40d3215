// Rotary position embedding: pairing of columns and addressing of heads, shared by all operators that rotate.
//
// The first 2 * pairs columns of a head are rotated in pairs: column i with column i + pairs, or, if interleaved, 2i
// with 2i + 1. The remaining columns pass through unchanged.
#pragma once

#include "kernel_pytorch/dtype.h"
#include "kernel_pytorch/index.h"

namespace kernel_pytorch {

// cos and sin are contiguous `(rows, pairs)` and have one dtype, that of the rotated tensor or the computation dtype.
// Token t uses row t % rows.
struct Rotation {
  Input cos;
  Input sin;
  int64_t rows;
  int64_t pairs;
  bool interleaved;
  bool transposed;  // multiply by the transposed matrix, as the backward does
};

// Strides of tokens and heads in memory; the columns of a head are contiguous.
struct HeadStrides {
  int64_t token;
  int64_t head;
};

KP_HOST_DEVICE constexpr int64_t head_offset(HeadStrides strides, int64_t token, int64_t head) {
  return token * strides.token + head * strides.head;
}

// First column of a pair.
KP_HOST_DEVICE constexpr int64_t first_of(int64_t pair, bool interleaved) { return interleaved ? 2 * pair : pair; }

// Second column of a pair.
KP_HOST_DEVICE constexpr int64_t second_of(int64_t pair, int64_t pairs, bool interleaved) {
  return interleaved ? 2 * pair + 1 : pair + pairs;
}

// Index of the cos and sin of a rotated column, and the column it is paired with.
struct Partner {
  int64_t pair;
  int64_t column;
  bool second;  // the column is the second of the pair
};

KP_HOST_DEVICE constexpr Partner partner_of(int64_t column, int64_t pairs, bool interleaved) {
  return interleaved      ? Partner{column / 2, column ^ 1, column % 2 == 1}
         : column < pairs ? Partner{column, column + pairs, false}
                          : Partner{column - pairs, column - pairs, true};
}

// Columns of a head for one thread, as two vectors of `width`: both halves of `width` pairs, or two neighbouring
// vectors if interleaved or passed through. Heads consist of whole slots: width divides pairs, and 2 * width divides
// columns.
struct Slot {
  int first;
  int second;
  bool passes;
};

KP_HOST_DEVICE constexpr Slot slot_at(int slot, int pairs, int width, bool interleaved) {
  const bool passes = slot * width >= pairs;
  const int first = interleaved || passes ? 2 * slot * width : slot * width;
  return {first, interleaved || passes ? first + width : first + pairs, passes};
}

}  // namespace kernel_pytorch
