// CPU backend of cross entropy.

#include "cross_entropy.h"
#include "kernel_pytorch/cpu/math.h"
#include "kernel_pytorch/cpu/types.h"

namespace kernel_pytorch {
namespace cross_entropy {

namespace {

// Number of columns that are reduced at a time: maximum and sum of a block are computed while it is in the L1 cache.
constexpr int64_t kBlock = 4096;

// Capped logits and their derivative with respect to the logits; the logits themselves, and one, without a cap.
template <typename Compute>
struct Capped {
  Vector<Compute> z;
  Vector<Compute> slope;
};

template <bool kCapped, typename Compute>
KP_INLINE Capped<Compute> cap(Vector<Compute> logits, Compute softcap) {
  if constexpr (!kCapped) return {logits, broadcast(Compute{1})};
  const Tanh<Compute> squashed = tanh(logits / softcap);
  return {squashed.value * softcap, squashed.slope};
}

// Sets the lanes beyond the end of a row to zero.
template <typename V>
KP_INLINE V keep_lanes(V values, Whole) {
  return values;
}

template <typename V>
KP_INLINE V keep_lanes(V values, Part part) {
  V kept = {};
  for (int i = 0; i < part.count; ++i) kept[i] = values[i];
  return kept;
}

template <typename Compute>
Compute largest_lane(Vector<Compute> values) {
  Compute found = values[0];
  for (int i = 1; i < kLanes<Compute>; ++i) found = values[i] > found ? values[i] : found;
  return found;
}

// An element of the row that is subtracted from the others before summing: large logits would lose their differences.
template <bool kCapped, typename T, typename Compute>
Compute pivot_of(const T* logits, Compute softcap) {
  const Compute first = cap<kCapped>(load(logits, Part{1}), softcap).z[0];
  return __builtin_isfinite(first) ? first : Compute{0};
}

// The maximum of `count` capped logits, ignoring NaN, which the sum propagates.
template <bool kCapped, typename T, typename Compute>
Compute block_maximum(const T* logits, int64_t count, Compute softcap) {
  Vector<Compute> found = broadcast(static_cast<Compute>(-__builtin_inf()));
  int64_t column = 0;
  for (; column + kLanes<Compute> <= count; column += kLanes<Compute>) {
    const Vector<Compute> values = load(logits + column);
    found = values > found ? values : found;
  }
  Compute most = largest_lane<Compute>(found);
  for (; column < count; ++column) {
    const Compute value = load(logits + column, Part{1})[0];
    most = value > most ? value : most;
  }
  // The cap is monotonic, so it is applied only to the maximum.
  return cap<kCapped>(broadcast(most), softcap).z[0];
}

template <bool kCapped, typename T>
void forward_row(const Forward& f, int64_t row) {
  using Compute = ComputeFor<T>;
  const Compute softcap = static_cast<Compute>(f.options.softcap);
  const T* logits = static_cast<const T*>(f.logits.data) + row_offset(row, f.columns);
  const bool smoothed = f.options.label_smoothing > 0.0;
  Compute most = static_cast<Compute>(-__builtin_inf());
  const Compute pivot = pivot_of<kCapped>(logits, softcap);
  double sum = 0.0, total = 0.0;  // total: sum of logits - pivot
  for (int64_t first = 0; first < f.columns; first += kBlock) {
    const T* block = logits + first;
    const int64_t count = smaller(f.columns - first, kBlock);
    const Compute maximum = block_maximum<kCapped>(block, count, softcap);
    if (maximum > most) {
      sum *= __builtin_exp(static_cast<double>(most) - static_cast<double>(maximum));
      most = maximum;
    }
    // If every logit so far is -inf, exp_of_negative(-inf - -inf) would be NaN.
    const Vector<Compute> shift = broadcast(most > static_cast<Compute>(-__builtin_inf()) ? most : Compute{0});
    sum += sum_row<Compute>(count, [&](int64_t column, auto lanes) {
      const Vector<Compute> z = cap<kCapped>(load(block + column, lanes), softcap).z - shift;
      return keep_lanes(exp_of_negative(z), lanes);
    });
    if (smoothed) {
      total += sum_row<Compute>(count, [&](int64_t column, auto lanes) {
        return keep_lanes(cap<kCapped>(load(block + column, lanes), softcap).z - pivot, lanes);
      });
    }
  }
  const double log_sum = __builtin_log(sum), lse = static_cast<double>(most) + log_sum;
  Compute* const normalizer = static_cast<Compute*>(f.normalizer.data) + 2 * row;
  normalizer[0] = most;
  normalizer[1] = static_cast<Compute>(log_sum);
  double loss = 0.0;
  const int64_t target = f.target[row];
  if (counts(target, f.columns, f.options)) {
    const double picked = cap<kCapped>(load(logits + target, Part{1}), softcap).z[0];
    loss = log_sum - (1.0 - f.options.label_smoothing) * (picked - most);
    if (smoothed) {
      const double mean = static_cast<double>(pivot) + total / static_cast<double>(f.columns);
      loss -= f.options.label_smoothing * (mean - most);
    }
    if (f.options.z_loss > 0.0) loss += f.options.z_loss * lse * lse;
  }
  static_cast<Compute*>(f.loss.data)[row] = static_cast<Compute>(loss);
}

template <bool kCapped, typename T>
void backward_row(const Backward& b, int64_t row) {
  using Compute = ComputeFor<T>;
  const Compute softcap = static_cast<Compute>(b.options.softcap);
  const int64_t offset = row_offset(row, b.columns);
  const T* logits = static_cast<const T*>(b.logits.data) + offset;
  T* dlogits = static_cast<T*>(b.dlogits.data) + offset;
  const Compute dloss = static_cast<const Compute*>(b.dloss.data)[row];
  const int64_t target = b.target[row];
  if (!counts(target, b.columns, b.options)) {
    std::memset(dlogits, 0, static_cast<size_t>(b.columns) * sizeof(T));
    return;
  }
  const Compute* const normalizer = static_cast<const Compute*>(b.normalizer.data) + 2 * row;
  const Compute most = normalizer[0], log_sum = normalizer[1];
  const double lse = static_cast<double>(most) + static_cast<double>(log_sum);
  const Compute factor = static_cast<Compute>(1.0 + 2.0 * b.options.z_loss * lse);
  const Compute shared = static_cast<Compute>(b.options.label_smoothing / static_cast<double>(b.columns));
  const auto gradient = [&](Vector<Compute> values, Compute extra) {
    const Capped<Compute> capped = cap<kCapped>(values, softcap);
    const Vector<Compute> at_logits = (exp_of_negative(capped.z - most - log_sum) * factor - shared - extra) * dloss;
    if constexpr (kCapped) return Vector<Compute>(at_logits * capped.slope);
    return at_logits;
  };
  const Compute own = static_cast<Compute>(1.0 - b.options.label_smoothing);
  const Vector<Compute> at_target = gradient(load(logits + target, Part{1}), own);  // before it is overwritten
  for_vectors<Compute>(b.columns, [&](int64_t column, auto lanes) {
    store(dlogits + column, gradient(load(logits + column, lanes), Compute{0}), lanes);
  });
  store(dlogits + target, at_target, Part{1});
}

}  // namespace

namespace KP_ISA {

void forward(const Forward& f, int64_t begin, int64_t end) {
  with_type(f.logits.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const auto run = f.options.softcap > 0.0 ? forward_row<true, T> : forward_row<false, T>;
    for (int64_t row = begin; row < end; ++row) run(f, row);
  });
}

void backward(const Backward& b, int64_t begin, int64_t end) {
  with_type(b.logits.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const auto run = b.options.softcap > 0.0 ? backward_row<true, T> : backward_row<false, T>;
    for (int64_t row = begin; row < end; ++row) run(b, row);
  });
}

}  // namespace KP_ISA
}  // namespace cross_entropy
}  // namespace kernel_pytorch
