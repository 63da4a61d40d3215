// CPU backend of bias and activation.

#include "bias_act.h"
#include "kernel_pytorch/cpu/activations.h"
#include "kernel_pytorch/cpu/shares.h"
#include "kernel_pytorch/cpu/types.h"

namespace kernel_pytorch {
namespace bias_act {

namespace {

template <Activation A, typename T>
void forward_tiles(const Forward& f, int64_t begin, int64_t end) {
  using Compute = ComputeFor<T>;
  const Widened<Compute> bias(f.bias, f.columns, 0.0);
  for (int64_t index = begin; index < end; ++index) {
    const Tile tile = tile_at(index, f.columns, kTileColumns);
    const int64_t columns = tile.columns.end - tile.columns.begin;
    const int64_t start = row_offset(tile.row, f.columns) + tile.columns.begin;
    const T* x = static_cast<const T*>(f.x.data) + start;
    T* y = static_cast<T*>(f.y.data) + start;
    if (const Compute* added = bias.data()) {
      added += tile.columns.begin;
      for_vectors<Compute>(columns, [&](int64_t column, auto lanes) {
        const Vector<Compute> z = load(x + column, lanes) + load(added + column, lanes);
        store(y + column, activate<A, Compute>(z).value, lanes);
      });
    } else {
      for_vectors<Compute>(columns, [&](int64_t column, auto lanes) {
        store(y + column, activate<A, Compute>(load(x + column, lanes)).value, lanes);
      });
    }
  }
}

// Number of columns whose sums stay in the L1 cache while rows are added.
constexpr int64_t kSummed = 4096;

// Gradients of a piece of a row, which are also added to `sums`. Pointers to missing or unneeded tensors are null.
template <Activation A, bool kBiased, typename T, typename Compute>
void backward_piece(const T* dy, const T* x, const Compute* bias, T* dx, Compute* sums, int64_t columns) {
  for_vectors<Compute>(columns, [&](int64_t column, auto lanes) {
    Vector<Compute> gradient = load(dy + column, lanes);
    if constexpr (A != Activation::kIdentity) {
      Vector<Compute> z = load(x + column, lanes);
      if constexpr (kBiased) z += load(bias + column, lanes);
      const Activated<Compute> activated = activate<A, Compute>(z);
      gradient *= activated.slope;
    }
    if (dx != nullptr) store(dx + column, gradient, lanes);
    if (sums != nullptr) store(sums + column, load(sums + column, lanes) + gradient, lanes);
  });
}

// Same for `rows` rows. They are added before the partial sum is updated, since shorter chains round less. Each row is
// processed piece by piece, since a vector of every row in turn would be more streams than a processor prefetches.
template <Activation A, bool kBiased, typename T, typename Compute>
void backward_rows(const T* dy, const T* x, const Compute* bias, T* dx, Compute* share, int64_t rows, int64_t columns) {
  Compute sums[kSummed];
  for (int64_t begin = 0; begin < columns; begin += kSummed) {
    const int64_t width = smaller(kSummed, columns - begin);
    if (share != nullptr) std::memset(sums, 0, sizeof sums);
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t at = row_offset(row, columns) + begin;
      backward_piece<A, kBiased, T, Compute>(dy + at, x ? x + at : nullptr, bias ? bias + begin : nullptr,
                                             dx ? dx + at : nullptr, share ? sums : nullptr, width);
    }
    if (share == nullptr) continue;
    for_vectors<Compute>(width, [&](int64_t column, auto lanes) {
      store(share + begin + column, load(share + begin + column, lanes) + load(sums + column, lanes), lanes);
    });
  }
}

template <Activation A, typename T>
void backward_parts(const Backward& b, int64_t begin, int64_t end) {
  using Compute = ComputeFor<T>;
  const Widened<Compute> bias(b.bias, b.columns, 0.0);
  const auto run = bias.data() ? backward_rows<A, true, T, Compute> : backward_rows<A, false, T, Compute>;
  const int64_t group = b.dbias ? 8 : 1;
  for (int64_t part = begin; part < end; ++part) {
    const Range range = share_of(b.rows, b.parts, part);
    Compute* share = b.dbias ? static_cast<Compute*>(b.shares.data) + row_offset(part, b.columns) : nullptr;
    if (share != nullptr) std::memset(share, 0, static_cast<size_t>(b.columns) * sizeof(Compute));
    for (int64_t row = range.begin; row < range.end; row += group) {
      const int64_t offset = row_offset(row, b.columns);
      const T* dy = static_cast<const T*>(b.dy.data) + offset;
      const T* x = b.x ? static_cast<const T*>(b.x.data) + offset : nullptr;
      T* dx = b.dx ? static_cast<T*>(b.dx.data) + offset : nullptr;
      run(dy, x, bias.data(), dx, share, smaller(group, range.end - row), b.columns);
    }
  }
}

}  // namespace

namespace KP_ISA {

void forward(const Forward& f, int64_t begin, int64_t end) {
  with_type(f.x.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    with_activation(f.activation, [&](auto a) { forward_tiles<decltype(a)::value, T>(f, begin, end); });
  });
}

void backward(const Backward& b, int64_t begin, int64_t end) {
  with_type(b.dy.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    with_activation(b.activation, [&](auto a) { backward_parts<decltype(a)::value, T>(b, begin, end); });
  });
}

void add_shares(const Backward& b, int64_t begin, int64_t end) {
  with_type(b.dbias.dtype, [&](auto type) {
    using W = typename decltype(type)::type;
    const auto* shares = static_cast<const ComputeFor<W>*>(b.shares.data);
    add_shares_in_order(shares, static_cast<W*>(b.dbias.data), b.columns, b.parts, begin, end);
  });
}

}  // namespace KP_ISA
}  // namespace bias_act
}  // namespace kernel_pytorch
