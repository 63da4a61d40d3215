// What every kernel of the rotary position embedding is given.
#pragma once

#include "kernel_pytorch/rotary.h"

namespace kernel_pytorch {
namespace rotary_embedding {

// T of x and y, C of cos and sin.
template <typename T, typename C>
struct Pointers {
  const T* x;
  T* y;  // contiguous
  const C* cos;
  const C* sin;
  HeadStrides strides;  // of x
  int64_t rows;         // tokens times heads
  int64_t table_rows;
  int heads;
  int columns;
  int pairs;
  float sign;  // of sin
};

}  // namespace rotary_embedding
}  // namespace kernel_pytorch
