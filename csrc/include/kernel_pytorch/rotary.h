// Rotary position embedding, as the operators that rotate have it in common: which columns are pairs, where heads lie.
//
// Of the columns of a head the first 2 * pairs are rotated, in pairs: column i with column i + pairs, or 2i with 2i + 1
// (interleaved). The others pass.
#pragma once

#include "kernel_pytorch/dtype.h"
#include "kernel_pytorch/index.h"

namespace kernel_pytorch {

// cos and sin are contiguous `(rows, pairs)` and of one dtype, that of what is rotated or the one that is computed in.
// Token t takes row t % rows.
struct Rotation {
  Input cos;
  Input sin;
  int64_t rows;
  int64_t pairs;
  bool interleaved;
  bool transposed;  // multiplied by the transposed matrix: what a gradient goes back through
};

// Tokens of heads in memory; the columns of a head lie side by side.
struct HeadStrides {
  int64_t token;
  int64_t head;
};

KP_HOST_DEVICE constexpr int64_t head_offset(HeadStrides strides, int64_t token, int64_t head) {
  return token * strides.token + head * strides.head;
}

// The first column of a pair.
KP_HOST_DEVICE constexpr int64_t first_of(int64_t pair, bool interleaved) { return interleaved ? 2 * pair : pair; }

// The second.
KP_HOST_DEVICE constexpr int64_t second_of(int64_t pair, int64_t pairs, bool interleaved) {
  return interleaved ? 2 * pair + 1 : pair + pairs;
}

// Where a rotated column finds its cos and sin, and the column that it is paired with.
struct Partner {
  int64_t pair;
  int64_t column;
  bool second;  // of the two
};

KP_HOST_DEVICE constexpr Partner partner_of(int64_t column, int64_t pairs, bool interleaved) {
  return interleaved      ? Partner{column / 2, column ^ 1, column % 2 == 1}
         : column < pairs ? Partner{column, column + pairs, false}
                          : Partner{column - pairs, column - pairs, true};
}

// A thread's two vectors of `width` columns of a head: the two halves of as many pairs, or, interleaved or where columns
// pass, two neighbours. Heads of whole slots: pairs a multiple of width, columns of 2 * width.
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
