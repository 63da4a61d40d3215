// Parameters of the RMSNorm kernels: typed pointers and sizes.
#pragma once

#include <cstdint>

namespace kernel_pytorch {
namespace rms_norm {

// T: element type of x, residual and h; W: of the weight; Y: of y.
template <typename T, typename W, typename Y>
struct ForwardPointers {
  const T* x;
  const T* residual;  // may be null
  const W* weight;    // may be null
  Y* y;
  T* h;  // only with a residual
  float* rstd;
  int64_t rows;
  int columns;
  int weight_rows;
  float eps;
  float offset;
};

// T: element type of h and dx; W: of the weight; Y: of dy. Part p has rows p, p + parts, ...; parts is a multiple of
// weight_rows, so that all rows of a part use weight row p % weight_rows.
template <typename T, typename W, typename Y>
struct BackwardPointers {
  const Y* dy;
  const T* dh;  // may be null
  const T* h;
  const W* weight;  // may be null
  const float* rstd;
  T* dx;          // null if not needed
  float* shares;  // partial sums `(parts, columns)`; null if dweight is not needed
  int64_t rows;
  int64_t parts;
  int columns;
  int weight_rows;
  float offset;
};

}  // namespace rms_norm
}  // namespace kernel_pytorch
