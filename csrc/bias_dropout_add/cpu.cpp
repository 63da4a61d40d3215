// CPU backend of bias, dropout and residual. x, dx, the residual and y have the element type T.

#include "bias_dropout_add.h"
#include "kernel_pytorch/cpu/dropout.h"
#include "kernel_pytorch/cpu/shares.h"
#include "kernel_pytorch/cpu/types.h"

namespace kernel_pytorch {
namespace bias_dropout_add {

namespace {

template <typename T>
void forward_tiles(const Forward& f, int64_t begin, int64_t end) {
  using Compute = ComputeFor<T>;
  const Widened<Compute> biases(f.bias, f.columns, 0.0);
  DropoutRow<Compute> dropout(f.dropout, f.columns);
  for (int64_t index = begin; index < end; ++index) {
    const Tile tile = tile_at(index, f.columns, kTileColumns);
    const int64_t row = row_offset(tile.row, f.columns);
    const T* x = static_cast<const T*>(f.x.data) + row;
    const T* residual = static_cast<const T*>(f.residual.data) + row;
    T* y = static_cast<T*>(f.y.data) + row;
    const Compute* bias = biases.data();
    if (dropout) dropout.draw(tile.row, tile.columns.begin, tile.columns.end);
    for_vectors<Compute>(tile.columns.end - tile.columns.begin, [&](int64_t at, auto lanes) {
      const int64_t column = tile.columns.begin + at;
      Vector<Compute> z = load(x + column, lanes);
      if (bias != nullptr) z += load(bias + column, lanes);
      if (dropout) z = dropout.apply(z, column);
      store(y + column, load(residual + column, lanes) + z, lanes);
    });
  }
}

template <typename T>
void backward_parts(const Backward& b, int64_t begin, int64_t end) {
  using Compute = ComputeFor<T>;
  DropoutRow<Compute> dropout(b.dropout, b.columns);
  for (int64_t part = begin; part < end; ++part) {
    const Range range = share_of(b.rows, b.parts, part);
    Compute* share = b.dbias ? static_cast<Compute*>(b.shares.data) + row_offset(part, b.columns) : nullptr;
    if (share != nullptr) std::memset(share, 0, static_cast<size_t>(b.columns) * sizeof(Compute));
    for (int64_t row = range.begin; row < range.end; ++row) {
      const int64_t offset = row_offset(row, b.columns);
      const T* dy = static_cast<const T*>(b.dy.data) + offset;
      T* dx = b.dx ? static_cast<T*>(b.dx.data) + offset : nullptr;
      if (dropout) dropout.draw(row, 0, b.columns);
      for_vectors<Compute>(b.columns, [&](int64_t column, auto lanes) {
        Vector<Compute> gradient = load(dy + column, lanes);
        if (dropout) gradient = dropout.apply(gradient, column);
        if (dx != nullptr) store(dx + column, gradient, lanes);
        if (share != nullptr) store(share + column, load(share + column, lanes) + gradient, lanes);
      });
    }
  }
}

}  // namespace

namespace KP_ISA {

void forward(const Forward& f, int64_t begin, int64_t end) {
  with_type(f.y.dtype, [&](auto type) { forward_tiles<typename decltype(type)::type>(f, begin, end); });
}

void backward(const Backward& b, int64_t begin, int64_t end) {
  with_type(b.dy.dtype, [&](auto type) { backward_parts<typename decltype(type)::type>(b, begin, end); });
}

void add_shares(const Backward& b, int64_t begin, int64_t end) {
  with_type(b.dbias.dtype, [&](auto type) {
    using W = typename decltype(type)::type;
    const auto* shares = static_cast<const ComputeFor<W>*>(b.shares.data);
    add_shares_in_order(shares, static_cast<W*>(b.dbias.data), b.columns, b.parts, begin, end);
  });
}

}  // namespace KP_ISA
}  // namespace bias_dropout_add
}  // namespace kernel_pytorch
