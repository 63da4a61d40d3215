// CPU backend of RMSNorm per head with rotary position embedding. All tensors except the weights have element type T.

#include "kernel_pytorch/cpu/rotary.h"
#include "qk_norm_rope.h"

namespace kernel_pytorch {
namespace qk_norm_rope {

namespace {

template <typename T, typename Compute>
void forward_token(const ForwardSide& side, const Forward& f, const Angles<Compute>& angles, const Compute* scale,
                   int64_t token) {
  for (int64_t head = 0; head < side.heads; ++head) {
    const T* x = static_cast<const T*>(side.x.data) + head_offset(side.strides, token, head);
    const int64_t row = token * side.heads + head;
    const double squares = sum_row<Compute>(f.columns, [&](int64_t column, auto lanes) {
      const Vector<Compute> value = load(x + column, lanes);
      return value * value;
    });
    const Compute rstd = static_cast<Compute>(1.0 / __builtin_sqrt(squares / static_cast<double>(f.columns) + f.eps));
    static_cast<Compute*>(side.rstd.data)[row] = rstd;
    const auto normalized = [&](int64_t column, auto lanes) {
      return load(x + column, lanes) * rstd * load(scale + column, lanes);
    };
    angles.rotate(f.columns, normalized, static_cast<T*>(side.y.data) + row_offset(row, f.columns));
  }
}

template <typename T>
void forward_tokens(const Forward& f, int64_t begin, int64_t end) {
  using Compute = ComputeFor<T>;
  const Widened<Compute> q_scale(f.sides[0].weight, f.columns, f.offset);
  const Widened<Compute> k_scale(f.sides[1].weight, f.columns, f.offset);
  Angles<Compute> angles(f.rotation);
  for (int64_t token = begin; token < end; ++token) {
    angles.move_to(token);
    forward_token<T>(f.sides[0], f, angles, q_scale.data(), token);
    forward_token<T>(f.sides[1], f, angles, k_scale.data(), token);
  }
}

// Gradients of one head; dx and dweight are null if not needed. `g` is scratch for one head.
template <typename T, typename Compute>
void backward_head(const T* dy, const T* x, const Compute* scale, Compute rstd, const Angles<Compute>& angles, Compute* g,
                   T* dx, Compute* dweight, int64_t columns) {
  angles.rotate(columns, [&](int64_t column, auto lanes) { return load(dy + column, lanes); }, g);
  if (dweight != nullptr) {
    for_vectors<Compute>(columns, [&](int64_t column, auto lanes) {
      const Vector<Compute> x_hat = load(x + column, lanes) * rstd;
      store(dweight + column, load(dweight + column, lanes) + load(g + column, lanes) * x_hat, lanes);
    });
  }
  if (dx == nullptr) return;
  const double products = sum_row<Compute>(columns, [&](int64_t column, auto lanes) {
    return load(g + column, lanes) * load(scale + column, lanes) * load(x + column, lanes);
  });
  // x_hat * mean(g * scale * x_hat) is x * slope, with one slope per head.
  const Compute slope = static_cast<Compute>(products / static_cast<double>(columns) * rstd * rstd);
  for_vectors<Compute>(columns, [&](int64_t column, auto lanes) {
    const Vector<Compute> scaled = load(g + column, lanes) * load(scale + column, lanes);
    store(dx + column, (scaled - load(x + column, lanes) * slope) * rstd, lanes);
  });
}

// `sum` is scratch for one head: it adds the heads of a token first, so that chains of sums stay short.
template <typename T, typename Compute>
void backward_token(const BackwardSide& side, const Backward& b, const Angles<Compute>& angles, const Compute* scale,
                    Compute* g, Compute* sum, Compute* share, int64_t token) {
  Compute* dweight = share != nullptr ? sum : nullptr;
  if (dweight != nullptr) std::memset(sum, 0, static_cast<size_t>(b.columns) * sizeof(Compute));
  for (int64_t head = 0; head < side.heads; ++head) {
    const int64_t row = token * side.heads + head;
    const T* dy = static_cast<const T*>(side.dy.data) + head_offset(side.dy_strides, token, head);
    const T* x = static_cast<const T*>(side.x.data) + head_offset(side.strides, token, head);
    T* dx = side.dx ? static_cast<T*>(side.dx.data) + row_offset(row, b.columns) : nullptr;
    const Compute rstd = static_cast<const Compute*>(side.rstd.data)[row];
    backward_head(dy, x, scale, rstd, angles, g, dx, dweight, b.columns);
  }
  if (share == nullptr) return;
  for_vectors<Compute>(b.columns, [&](int64_t column, auto lanes) {
    store(share + column, load(share + column, lanes) + load(sum + column, lanes), lanes);
  });
}

template <typename T>
void backward_parts(const Backward& b, int64_t begin, int64_t end) {
  using Compute = ComputeFor<T>;
  const Widened<Compute> q_scale(b.sides[0].weight, b.columns, b.offset);
  const Widened<Compute> k_scale(b.sides[1].weight, b.columns, b.offset);
  const Compute* const scales[2] = {q_scale.data(), k_scale.data()};
  Angles<Compute> angles(b.rotation);
  const Buffer<Compute> scratch(2 * b.columns);
  Compute* g = scratch.data();
  for (int64_t part = begin; part < end; ++part) {
    const Range range = share_of(b.tokens, b.parts, part);
    Compute* own[2] = {nullptr, nullptr};
    for (int i = 0; i < 2; ++i) {
      if (!b.sides[i].dweight) continue;
      own[i] = static_cast<Compute*>(b.shares.data) + row_offset(i * b.parts + part, b.columns);
      std::memset(own[i], 0, static_cast<size_t>(b.columns) * sizeof(Compute));
    }
    for (int64_t token = range.begin; token < range.end; ++token) {
      angles.move_to(token);
      for (int i = 0; i < 2; ++i) {
        if (b.sides[i].dy) backward_token<T>(b.sides[i], b, angles, scales[i], g, g + b.columns, own[i], token);
      }
    }
  }
}

template <typename W>
void add_shares_of_columns(const Backward& b, int side, int64_t begin, int64_t end) {
  using Compute = ComputeFor<W>;
  const Compute* shares = static_cast<const Compute*>(b.shares.data) + row_offset(side * b.parts, b.columns) + begin;
  W* dweight = static_cast<W*>(b.sides[side].dweight.data) + begin;
  for_vectors<Compute>(end - begin, [&](int64_t column, auto lanes) {
    Vector<Compute> sum = {}, lost = {};
    for (int64_t part = 0; part < b.parts; ++part) {
      // Kahan summation: the rounding error of an addition is corrected in the next one.
      const Vector<Compute> term = load(shares + row_offset(part, b.columns) + column, lanes) - lost;
      const Vector<Compute> next = sum + term;
      lost = (next - sum) - term;
      sum = next;
    }
    store(dweight + column, sum, lanes);
  });
}

}  // namespace

namespace KP_ISA {

void forward(const Forward& f, int64_t begin, int64_t end) {
  with_type(f.sides[0].x.dtype, [&](auto x) { forward_tokens<typename decltype(x)::type>(f, begin, end); });
}

void backward(const Backward& b, int64_t begin, int64_t end) {
  with_type(b.sides[0].x.dtype, [&](auto x) { backward_parts<typename decltype(x)::type>(b, begin, end); });
}

void add_shares(const Backward& b, int64_t begin, int64_t end) {
  for (int side = 0; side < 2; ++side) {
    if (!b.sides[side].dweight) continue;
    with_type(b.sides[side].dweight.dtype,
              [&](auto type) { add_shares_of_columns<typename decltype(type)::type>(b, side, begin, end); });
  }
}

}  // namespace KP_ISA
}  // namespace qk_norm_rope
}  // namespace kernel_pytorch
