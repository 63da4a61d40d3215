// What every kernel of RMSNorm is given: pointers of the types that it is compiled for, and sizes.
#pragma once

#include <cstdint>

namespace kernel_pytorch {
namespace rms_norm {

// T of x, residual and h; W of the weight; Y of the result.
template <typename T, typename W, typename Y>
struct ForwardPointers {
  const T* x;
  const T* residual;  // null for none
  const W* weight;    // null for none
  Y* y;
  T* h;  // with a residual
  float* rstd;
  int64_t rows;
  int columns;
  int weight_rows;
  float eps;
  float offset;
};

// T of h and dx, W of the weight, Y of dy. The rows of share p are p, p + parts, ...; parts is a multiple of
// weight_rows, so that they all have weight row p % weight_rows.
template <typename T, typename W, typename Y>
struct BackwardPointers {
  const Y* dy;
  const T* dh;  // null for none
  const T* h;
  const W* weight;  // null for none
  const float* rstd;
  T* dx;          // null where it is not needed
  float* shares;  // `(parts, columns)`; null where dweight is not needed
  int64_t rows;
  int64_t parts;
  int columns;
  int weight_rows;
  float offset;
};

}  // namespace rms_norm
}  // namespace kernel_pytorch
