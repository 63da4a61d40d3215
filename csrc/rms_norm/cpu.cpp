// CPU backend of RMSNorm. x, residual and h have the element type T; y and dy have Y.

#include "kernel_pytorch/cpu/shares.h"
#include "kernel_pytorch/cpu/types.h"
#include "rms_norm.h"

namespace kernel_pytorch {
namespace rms_norm {

namespace {

// Returns offset + weight for a row; null without a weight.
template <typename Compute>
const Compute* scale_of(const Widened<Compute>& scales, int64_t row, int64_t weight_rows, int64_t columns) {
  return scales.data() ? scales.data() + row_offset(row % weight_rows, columns) : nullptr;
}

// Returns the row to normalize: x, or the sum with the residual, which is rounded and stored for the next block first.
template <typename T, typename Compute>
const T* row_of(const Forward& f, int64_t offset) {
  const T* x = static_cast<const T*>(f.x.data) + offset;
  if (!f.residual) return x;
  const T* residual = static_cast<const T*>(f.residual.data) + offset;
  T* sum = static_cast<T*>(f.h.data) + offset;
  for_vectors<Compute>(f.columns, [&](int64_t column, auto lanes) {
    store(sum + column, load(x + column, lanes) + load(residual + column, lanes), lanes);
  });
  return sum;
}

template <typename T, typename Y, typename Compute>
void normalise_row(const T* h, const Compute* scale, Compute rstd, Y* y, int64_t columns) {
  for_vectors<Compute>(columns, [&](int64_t column, auto lanes) {
    Vector<Compute> value = load(h + column, lanes) * rstd;
    if (scale != nullptr) value *= load(scale + column, lanes);
    store(y + column, value, lanes);
  });
}

// --8<-- [start:forward]
// Several rows are processed together as long as they fit into the L1 cache: a division and a square root take longer
// than a row of a head, so several of them are computed at once.
constexpr int64_t kTogether = 8;
constexpr int64_t kTogetherElements = 2048;

template <typename T, typename Y>
void forward_rows(const Forward& f, int64_t begin, int64_t end) {
  using Compute = ComputeFor<T>;
  const Widened<Compute> scales(f.weight, f.weight_rows * f.columns, f.offset);
  const int64_t together = larger(1, smaller(kTogether, kTogetherElements / larger(1, f.columns)));
  for (int64_t first = begin; first < end; first += together) {
    const int64_t rows = smaller(together, end - first);
    const T* h[kTogether];
    double squares[kTogether] = {};
    for (int64_t r = 0; r < rows; ++r) {
      h[r] = row_of<T, Compute>(f, row_offset(first + r, f.columns));
      squares[r] = sum_row<Compute>(f.columns, [&](int64_t column, auto lanes) {
        const Vector<Compute> value = load(h[r] + column, lanes);
        return value * value;
      });
    }
    Compute rstd[kTogether];
    for (int64_t r = 0; r < kTogether; ++r) {
      rstd[r] = static_cast<Compute>(1.0 / __builtin_sqrt(squares[r] / static_cast<double>(f.columns) + f.eps));
    }
    for (int64_t r = 0; r < rows; ++r) {
      static_cast<Compute*>(f.rstd.data)[first + r] = rstd[r];
      const Compute* scale = scale_of(scales, first + r, f.weight_rows, f.columns);
      Y* y = static_cast<Y*>(f.y.data) + row_offset(first + r, f.columns);
      normalise_row<T, Y, Compute>(h[r], scale, rstd[r], y, f.columns);
    }
  }
}
// --8<-- [end:forward]

// Gradients of one row; outputs that are not needed are null. `kScaled`, `kAdded`: whether there are a weight and a dh.
template <bool kScaled, bool kAdded, typename T, typename Y, typename Compute>
void backward_row(const Y* dy, const T* dh, const T* h, const Compute* scale, Compute rstd, T* dx, Compute* dweight,
                  int64_t columns) {
  const auto g_at = [&](int64_t column, auto lanes) {
    Vector<Compute> g = load(dy + column, lanes);
    if constexpr (kScaled) g *= load(scale + column, lanes);
    return g;
  };
  const auto add_dweight = [&](int64_t column, auto lanes) {
    const Vector<Compute> x_hat = load(h + column, lanes) * rstd;
    const Vector<Compute> sum = load(dweight + column, lanes) + load(dy + column, lanes) * x_hat;
    store(dweight + column, sum, lanes);
  };
  if (dx == nullptr) return for_vectors<Compute>(columns, add_dweight);
  const double products = sum_row<Compute>(
      columns, [&](int64_t column, auto lanes) { return g_at(column, lanes) * load(h + column, lanes); });
  // x_hat * mean(g * x_hat) is h * slope, with one slope per row.
  const Compute slope = static_cast<Compute>(products / static_cast<double>(columns) * rstd * rstd);
  for_vectors<Compute>(columns, [&](int64_t column, auto lanes) {
    Vector<Compute> gradient = (g_at(column, lanes) - load(h + column, lanes) * slope) * rstd;
    if constexpr (kAdded) gradient += load(dh + column, lanes);
    store(dx + column, gradient, lanes);
    if (dweight != nullptr) add_dweight(column, lanes);
  });
}

template <typename T, typename Y>
void backward_parts(const Backward& b, int64_t begin, int64_t end) {
  using Compute = ComputeFor<T>;
  const Widened<Compute> scales(b.weight, b.weight_rows * b.columns, b.offset);
  const int64_t size = b.weight_rows * b.columns;
  for (int64_t part = begin; part < end; ++part) {
    const Range range = share_of(b.rows, b.parts, part);
    Compute* share = b.dweight ? static_cast<Compute*>(b.shares.data) + part * size : nullptr;
    if (share != nullptr) std::memset(share, 0, static_cast<size_t>(size) * sizeof(Compute));
    for (int64_t row = range.begin; row < range.end; ++row) {
      const int64_t offset = row_offset(row, b.columns);
      const Y* dy = static_cast<const Y*>(b.dy.data) + offset;
      const T* dh = b.dh ? static_cast<const T*>(b.dh.data) + offset : nullptr;
      const T* h = static_cast<const T*>(b.h.data) + offset;
      const Compute* scale = scale_of(scales, row, b.weight_rows, b.columns);
      const Compute rstd = static_cast<const Compute*>(b.rstd.data)[row];
      T* dx = b.dx ? static_cast<T*>(b.dx.data) + offset : nullptr;
      Compute* dweight = share ? share + row_offset(row % b.weight_rows, b.columns) : nullptr;
      const auto run = scale ? dh ? backward_row<true, true, T, Y, Compute> : backward_row<true, false, T, Y, Compute>
                       : dh  ? backward_row<false, true, T, Y, Compute>
                             : backward_row<false, false, T, Y, Compute>;
      run(dy, dh, h, scale, rstd, dx, dweight, b.columns);
    }
  }
}

}  // namespace

namespace KP_ISA {

void forward(const Forward& f, int64_t begin, int64_t end) {
  with_type(f.x.dtype, [&](auto x) {
    using T = typename decltype(x)::type;
    with_result_type<T>(f.y.dtype, [&](auto y) { forward_rows<T, typename decltype(y)::type>(f, begin, end); });
  });
}

void backward(const Backward& b, int64_t begin, int64_t end) {
  with_type(b.h.dtype, [&](auto h) {
    using T = typename decltype(h)::type;
    with_result_type<T>(b.dy.dtype, [&](auto dy) { backward_parts<T, typename decltype(dy)::type>(b, begin, end); });
  });
}

void add_shares(const Backward& b, int64_t begin, int64_t end) {
  with_type(b.dweight.dtype, [&](auto type) {
    using W = typename decltype(type)::type;
    const auto* shares = static_cast<const ComputeFor<W>*>(b.shares.data);
    add_shares_in_order(shares, static_cast<W*>(b.dweight.data), b.weight_rows * b.columns, b.parts, begin, end);
  });
}

}  // namespace KP_ISA
}  // namespace rms_norm
}  // namespace kernel_pytorch
