// Parameters of the kernels of the gated linear units.
#pragma once

#include <cstdint>

namespace kernel_pytorch {
namespace gated {

// Rows of gate and up, and of their gradients, start `stride` elements apart; rows of y and dy start `columns` apart.
struct Sizes {
  int64_t rows;
  int64_t columns;
  int64_t stride;
  float alpha;
  float limit;  // infinity without a limit
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
  T* dgate;  // null if not needed
  T* dup;    // null if not needed
  Sizes sizes;
};

}  // namespace gated
}  // namespace kernel_pytorch
