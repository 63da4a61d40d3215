// CPU backend of softmax. x has element type T, y has Y, the mask has M, which is `NoMask` without a mask.

#include "kernel_pytorch/cpu/math.h"
#include "kernel_pytorch/cpu/types.h"
#include "softmax.h"

namespace kernel_pytorch {
namespace softmax {

namespace {

struct NoMask {};

// Applies the mask to scores; `step` is 0 if one element of the mask is broadcast along the whole row.
template <typename Compute, typename M, typename Lanes>
KP_INLINE Vector<Compute> masked(Vector<Compute> z, [[maybe_unused]] const M* mask, int64_t column,
                                 [[maybe_unused]] int step, Lanes lanes) {
  if constexpr (std::is_same_v<M, NoMask>) {
    return z;
  } else if constexpr (std::is_same_v<M, Bool>) {
    const Vector<Compute> never = broadcast(-static_cast<Compute>(__builtin_inf()));
    if (step == 0) return mask->bits != 0 ? z : never;
    return load_mask<Compute>(mask + column, lanes) ? z : never;
  } else {
    if (step == 0) return z + load(mask, Part{1})[0];
    return z + load(mask + column, lanes);
  }
}

// Computes one row in the buffer `scores`, which may be y itself.
template <typename T, typename M, typename Y, typename Compute>
void forward_row(const T* x, const M* mask, int step, Y* y, Compute* scores, Compute scale, int64_t columns) {
  constexpr Compute kNever = -static_cast<Compute>(__builtin_inf());
  const Compute most = max_row<Compute>(columns, [&](int64_t column, auto lanes) {
    const Vector<Compute> z = masked<Compute>(load(x + column, lanes) * scale, mask, column, step, lanes);
    store(scores + column, z, lanes);
    return fill_beyond(z, lanes, kNever);
  });
  // In a fully masked row every exponential is zero instead of NaN.
  const Compute base = !std::is_same_v<M, NoMask> && most == kNever ? Compute{0} : most;
  const double sum = sum_row<Compute>(columns, [&](int64_t column, auto lanes) {
    const Vector<Compute> power = exp_of_negative(load(scores + column, lanes) - base);
    store(scores + column, power, lanes);
    return fill_beyond(power, lanes, Compute{0});
  });
  const Compute share = sum == 0.0 ? Compute{0} : static_cast<Compute>(1.0 / sum);
  for_vectors<Compute>(columns, [&](int64_t column, auto lanes) {
    store(y + column, load(scores + column, lanes) * share, lanes);
  });
}

template <typename T, typename M, typename Y>
void forward_rows(const Forward& f, int64_t begin, int64_t end) {
  using Compute = ComputeFor<T>;
  constexpr bool kInPlace = std::is_same_v<Y, Compute>;
  const Compute scale = static_cast<Compute>(f.scale);
  const Buffer<Compute> scratch(kInPlace ? 0 : f.columns);
  for (int64_t row = begin; row < end; ++row) {
    const int64_t offset = row_offset(row, f.columns);
    const M* mask = static_cast<const M*>(f.mask.data);
    if (mask != nullptr) mask += broadcast_offset(f.broadcast, row);
    Y* y = static_cast<Y*>(f.y.data) + offset;
    Compute* scores = kInPlace ? reinterpret_cast<Compute*>(y) : scratch.data();
    const T* x = static_cast<const T*>(f.x.data) + offset;
    forward_row(x, mask, f.broadcast.column_step, y, scores, scale, f.columns);
  }
}

template <typename T>
void forward_of(const Forward& f, int64_t begin, int64_t end) {
  using Compute = ComputeFor<T>;
  if (!f.mask) return forward_rows<T, NoMask, T>(f, begin, end);
  if (f.mask.dtype == DType::kBool) return forward_rows<T, Bool, T>(f, begin, end);
  if (f.mask.dtype == f.x.dtype) return forward_rows<T, T, T>(f, begin, end);
  if constexpr (!std::is_same_v<T, Compute>) return forward_rows<T, Compute, Compute>(f, begin, end);
}

template <typename T>
void backward_rows(const Backward& b, int64_t begin, int64_t end) {
  using Compute = ComputeFor<T>;
  const Compute scale = static_cast<Compute>(b.scale);
  for (int64_t row = begin; row < end; ++row) {
    const int64_t offset = row_offset(row, b.columns);
    const T* dy = static_cast<const T*>(b.dy.data) + offset;
    const T* y = static_cast<const T*>(b.y.data) + offset;
    const Compute dot = static_cast<Compute>(sum_row<Compute>(
        b.columns, [&](int64_t column, auto lanes) { return load(dy + column, lanes) * load(y + column, lanes); }));
    if (b.dots) static_cast<Compute*>(b.dots.data)[row] = dot;
    if (!b.dx) continue;
    T* dx = static_cast<T*>(b.dx.data) + offset;
    for_vectors<Compute>(b.columns, [&](int64_t column, auto lanes) {
      store(dx + column, load(y + column, lanes) * (load(dy + column, lanes) - dot) * scale, lanes);
    });
  }
}

template <typename T>
void mask_gradient_tiles(const Backward& b, int64_t begin, int64_t end) {
  using Compute = ComputeFor<T>;
  Compute sum[kTileColumns], lost[kTileColumns];
  const int64_t uses = broadcast_uses(b.broadcast);
  for (int64_t index = begin; index < end; ++index) {
    const Tile tile = tile_at(index, b.columns, kTileColumns);
    const int64_t columns = tile.columns.end - tile.columns.begin;
    std::memset(sum, 0, sizeof sum);
    std::memset(lost, 0, sizeof lost);
    for (int64_t use = 0; use < uses; ++use) {
      const int64_t row = row_of_use(b.broadcast, tile.row, use);
      const int64_t offset = row_offset(row, b.columns) + tile.columns.begin;
      const T* dy = static_cast<const T*>(b.dy.data) + offset;
      const T* y = static_cast<const T*>(b.y.data) + offset;
      const Compute dot = static_cast<const Compute*>(b.dots.data)[row];
      for_vectors<Compute>(columns, [&](int64_t column, auto lanes) {
        // Kahan summation: the rounding error of an addition is corrected in the next one.
        const Vector<Compute> dz = load(y + column, lanes) * (load(dy + column, lanes) - dot);
        const Vector<Compute> before = load(sum + column, lanes);
        const Vector<Compute> term = dz - load(lost + column, lanes);
        const Vector<Compute> next = before + term;
        store(lost + column, (next - before) - term, lanes);
        store(sum + column, next, lanes);
      });
    }
    Compute* dmask = static_cast<Compute*>(b.dmask.data) + row_offset(tile.row, b.columns) + tile.columns.begin;
    std::memcpy(dmask, sum, static_cast<size_t>(columns) * sizeof(Compute));
  }
}

}  // namespace

namespace KP_ISA {

void forward(const Forward& f, int64_t begin, int64_t end) {
  with_type(f.x.dtype, [&](auto type) { forward_of<typename decltype(type)::type>(f, begin, end); });
}

void backward(const Backward& b, int64_t begin, int64_t end) {
  with_type(b.y.dtype, [&](auto type) { backward_rows<typename decltype(type)::type>(b, begin, end); });
}

void mask_gradient(const Backward& b, int64_t begin, int64_t end) {
  with_type(b.y.dtype, [&](auto type) { mask_gradient_tiles<typename decltype(type)::type>(b, begin, end); });
}

}  // namespace KP_ISA
}  // namespace softmax
}  // namespace kernel_pytorch
