// CPU backend of norm, residual, dropout and activation. x, residual, h and y have the element type T.

#include "kernel_pytorch/cpu/activations.h"
#include "kernel_pytorch/cpu/dropout.h"
#include "kernel_pytorch/cpu/shares.h"
#include "kernel_pytorch/cpu/types.h"
#include "norm_act.h"

namespace kernel_pytorch {
namespace norm_act {

namespace {

// A parameter in the computation dtype; a missing one is filled with its neutral value, which saves kernel variants.
template <typename Compute>
class Parameter {
 public:
  Parameter(Input given, int64_t columns, Compute otherwise)
      : given_(given, columns, 0.0), filled_(given ? 0 : columns) {
    for (int64_t i = 0; !given && i < columns; ++i) filled_.data()[i] = otherwise;
  }
  const Compute* data() const { return given_.data() ? given_.data() : filled_.data(); }

 private:
  Widened<Compute> given_;
  Buffer<Compute> filled_;
};

template <Activation A, typename T>
void forward_rows(const Forward& f, int64_t begin, int64_t end) {
  using Compute = ComputeFor<T>;
  const Norm& norm = f.norm;
  const int64_t columns = norm.columns;
  const Parameter<Compute> weights(f.weight, columns, 1), biases(f.bias, columns, 0);
  const Compute *weight = weights.data(), *bias = biases.data();
  DropoutRow<Compute> dropout(norm.dropout, columns);
  for (int64_t row = begin; row < end; ++row) {
    const int64_t offset = row_offset(row, columns);
    const T* x = static_cast<const T*>(f.x.data) + offset;
    const T* h = x;
    if (dropout) dropout.draw(row, 0, columns);
    if (norm.adds) {
      // Round first, so that the values normalized here are those that the next block receives.
      const T* residual = static_cast<const T*>(f.residual.data) + offset;
      T* sum = static_cast<T*>(f.h.data) + offset;
      for_vectors<Compute>(columns, [&](int64_t column, auto lanes) {
        Vector<Compute> added = load(x + column, lanes);
        if (dropout) added = dropout.apply(added, column);
        store(sum + column, load(residual + column, lanes) + added, lanes);
      });
      h = sum;
    }
    Compute mean = 0;
    if (norm.layer) {
      const double sum = sum_row<Compute>(columns, [&](int64_t column, auto lanes) { return load(h + column, lanes); });
      mean = static_cast<Compute>(sum / static_cast<double>(columns));
      static_cast<Compute*>(f.mean.data)[row] = mean;
    }
    const double squares = sum_row<Compute>(columns, [&](int64_t column, auto lanes) {
      const Vector<Compute> apart = fill_beyond(load(h + column, lanes), lanes, mean) - mean;
      return apart * apart;
    });
    const double variance = squares / static_cast<double>(columns);
    const Compute rstd = static_cast<Compute>(1.0 / __builtin_sqrt(variance + norm.eps));
    static_cast<Compute*>(f.rstd.data)[row] = rstd;
    T* y = static_cast<T*>(f.y.data) + offset;
    const bool drops = dropout && !norm.adds;
    for_vectors<Compute>(columns, [&](int64_t column, auto lanes) {
      const Vector<Compute> x_hat = (load(h + column, lanes) - mean) * rstd;
      const Vector<Compute> z = x_hat * load(weight + column, lanes) + load(bias + column, lanes);
      Vector<Compute> value = activate<A, Compute>(z).value;
      if (drops) value = dropout.apply(value, column);
      store(y + column, value, lanes);
    });
  }
}

// Data that the backward needs for all rows; outputs that are not needed are null.
template <typename Compute>
struct Shared {
  const Compute* weight;
  const Compute* bias;
  Compute* dweight;
  Compute* dbias;
  Compute* g;  // scratch for rows that are processed together
};

// Gradients of `kRows` rows from `first` on, with one update of the partial sums.
template <Activation A, int kRows, typename T, typename Compute>
void backward_rows(const Backward& b, const Shared<Compute>& s, const DropoutRow<Compute>& dropout, int64_t first) {
  const int64_t columns = b.norm.columns, start = row_offset(first, columns);
  const T* dy = static_cast<const T*>(b.dy.data) + start;
  const T* h = static_cast<const T*>(b.h.data) + start;
  const bool drops_dy = dropout && !b.norm.adds, drops_dx = dropout && b.norm.adds;
  Compute mean[kRows], rstd[kRows];
  for (int r = 0; r < kRows; ++r) {
    mean[r] = b.norm.layer ? static_cast<const Compute*>(b.mean.data)[first + r] : Compute{0};
    rstd[r] = static_cast<const Compute*>(b.rstd.data)[first + r];
  }
  double sums[2 * kRows];  // sums of g and of g * x_hat
  sum_row_together<Compute>(columns, sums, [&](int64_t column, auto lanes, auto& terms) {
    const Vector<Compute> weight = load(s.weight + column, lanes);
    Vector<Compute> of_weight = {}, of_bias = {};
    for (int r = 0; r < kRows; ++r) {
      const int64_t at = r * columns + column;
      const Vector<Compute> x_hat = (load(h + at, lanes) - mean[r]) * rstd[r];
      Vector<Compute> dz = load(dy + at, lanes);
      if (drops_dy) dz = dropout.apply(dz, column);
      if constexpr (A != Activation::kIdentity) {
        const Activated<Compute> activated = activate<A, Compute>(x_hat * weight + load(s.bias + column, lanes));
        dz *= activated.slope;
      }
      const Vector<Compute> g = dz * weight;
      of_weight += dz * x_hat;
      of_bias += dz;
      store(s.g + at, g, lanes);
      terms[2 * r] += g;
      terms[2 * r + 1] += g * x_hat;
    }
    if (s.dweight != nullptr) store(s.dweight + column, load(s.dweight + column, lanes) + of_weight, lanes);
    if (s.dbias != nullptr) store(s.dbias + column, load(s.dbias + column, lanes) + of_bias, lanes);
  });
  if (!b.dx && !b.dresidual) return;
  for (int r = 0; r < kRows; ++r) {
    const int64_t offset = start + r * columns;
    const T* dh = b.dh ? static_cast<const T*>(b.dh.data) + offset : nullptr;
    T* dx = b.dx ? static_cast<T*>(b.dx.data) + offset : nullptr;
    T* dresidual = b.dresidual ? static_cast<T*>(b.dresidual.data) + offset : nullptr;
    const auto mean_of = [&](double sum) { return static_cast<Compute>(sum / static_cast<double>(columns)); };
    const Compute of_g = b.norm.layer ? mean_of(sums[2 * r]) : Compute{0}, of_product = mean_of(sums[2 * r + 1]);
    for_vectors<Compute>(columns, [&](int64_t column, auto lanes) {
      const Vector<Compute> x_hat = (load(h + r * columns + column, lanes) - mean[r]) * rstd[r];
      Vector<Compute> gradient = (load(s.g + r * columns + column, lanes) - of_g - x_hat * of_product) * rstd[r];
      if (dh != nullptr) gradient += load(dh + column, lanes);
      if (dresidual != nullptr) store(dresidual + column, gradient, lanes);
      if (drops_dx) gradient = dropout.apply(gradient, column);
      if (dx != nullptr) store(dx + column, gradient, lanes);
    });
  }
}

template <Activation A, typename T>
void backward_parts(const Backward& b, int64_t begin, int64_t end) {
  using Compute = ComputeFor<T>;
  const int64_t columns = b.norm.columns;
  const Parameter<Compute> weights(b.weight, columns, 1), biases(b.bias, columns, 0);
  // Without activation and dropout (whose mask is for one row) rows are grouped, which saves accesses to partial sums.
  constexpr int kTogether = A == Activation::kIdentity ? 4 : 1;
  const Buffer<Compute> scratch(kTogether * columns);
  DropoutRow<Compute> dropout(b.norm.dropout, columns);
  const auto share_at = [&](Output shares, int64_t part) {
    Compute* share = shares ? static_cast<Compute*>(shares.data) + row_offset(part, columns) : nullptr;
    if (share != nullptr) std::memset(share, 0, static_cast<size_t>(columns) * sizeof(Compute));
    return share;
  };
  for (int64_t part = begin; part < end; ++part) {
    const Range range = share_of(b.norm.rows, b.parts, part);
    const Shared<Compute> shared = {weights.data(), biases.data(), share_at(b.weight_shares, part),
                                    share_at(b.bias_shares, part), scratch.data()};
    int64_t row = range.begin;
    for (; !dropout && row + kTogether <= range.end; row += kTogether) {
      backward_rows<A, kTogether, T, Compute>(b, shared, dropout, row);
    }
    for (; row < range.end; ++row) {
      if (dropout) dropout.draw(row, 0, columns);
      backward_rows<A, 1, T, Compute>(b, shared, dropout, row);
    }
  }
}

void add_shares_of(Input shares, Output sums, const Backward& b, int64_t begin, int64_t end) {
  if (!sums) return;
  with_type(sums.dtype, [&](auto type) {
    using W = typename decltype(type)::type;
    add_shares_in_order(static_cast<const ComputeFor<W>*>(shares.data), static_cast<W*>(sums.data), b.norm.columns,
                        b.parts, begin, end);
  });
}

}  // namespace

namespace KP_ISA {

void forward(const Forward& f, int64_t begin, int64_t end) {
  with_type(f.y.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    with_activation(f.norm.activation, [&](auto a) { forward_rows<decltype(a)::value, T>(f, begin, end); });
  });
}

void backward(const Backward& b, int64_t begin, int64_t end) {
  with_type(b.h.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    with_activation(b.norm.activation, [&](auto a) { backward_parts<decltype(a)::value, T>(b, begin, end); });
  });
}

void add_shares(const Backward& b, int64_t begin, int64_t end) {
  add_shares_of(b.weight_shares, b.dweight, b, begin, end);
  add_shares_of(b.bias_shares, b.dbias, b, begin, end);
}

}  // namespace KP_ISA
}  // namespace norm_act
}  // namespace kernel_pytorch
