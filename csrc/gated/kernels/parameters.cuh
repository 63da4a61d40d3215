// What every kernel of the gated linear units is given.
#pragma once

#include <cstdint>

namespace kernel_pytorch {
namespace gated {

// Rows of gate and up, and of their gradients, begin `stride` elements apart, those of y and dy `columns`.
struct Sizes {
  int64_t rows;
  int64_t columns;
  int64_t stride;
  float alpha;
  float limit;  // infinity for none
  float offset;
};

template <typename T>
struct ForwardPointers {
  const T* gate;
  const T* up;
  T* y;
  Sizes sizes;
};

template <typename T>
struct BackwardPointers {
  const T* dy;
  const T* gate;
  const T* up;
  T* dgate;  // null where it is not needed
  T* dup;    // null where it is not needed
  Sizes sizes;
};

}  // namespace gated
}  // namespace kernel_pytorch
