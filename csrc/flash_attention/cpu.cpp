// CPU backend of flash attention: blocks of queries and keys in float32 (float64 for float64); products multiply
// scalars with vectors.

#include "flash_attention.h"
#include "kernel_pytorch/cpu/math.h"
#include "kernel_pytorch/cpu/types.h"

namespace kernel_pytorch {
namespace flash_attention {

namespace {

constexpr int64_t kKeys = 64;  // per block
constexpr int64_t kRun = 64;   // products per partial sum, so that rounding errors do not grow with depth

template <typename Compute>
constexpr int64_t padded(int64_t size) {
  return ceil_divide(size, kLanes<Compute>) * kLanes<Compute>;
}

// c += a b for `kRows` rows of c and `kVectors` vectors of its columns.
template <int kRows, int kVectors, typename Compute>
KP_INLINE void multiply_tile(const Compute* a, int64_t a_stride, const Compute* b, int64_t b_stride, Compute* c,
                             int64_t c_stride, int64_t depth) {
  for (int64_t first = 0; first < depth; first += kRun) {
    const int64_t end = smaller(depth, first + kRun);
    Vector<Compute> sums[kRows][kVectors] = {};
    for (int64_t i = first; i < end; ++i) {
      Vector<Compute> values[kVectors];
      for (int v = 0; v < kVectors; ++v) values[v] = load(b + i * b_stride + v * kLanes<Compute>);
      for (int row = 0; row < kRows; ++row) {
        const Compute factor = a[row * a_stride + i];
        for (int v = 0; v < kVectors; ++v) sums[row][v] += values[v] * factor;
      }
    }
    for (int row = 0; row < kRows; ++row) {
      for (int v = 0; v < kVectors; ++v) {
        Compute* target = c + row * c_stride + v * kLanes<Compute>;
        store(target, load(target) + sums[row][v]);
      }
    }
  }
}

// Same for columns that are whole vectors, two at a time while there are two.
template <int kRows, typename Compute>
void multiply_rows(const Compute* a, int64_t a_stride, const Compute* b, int64_t b_stride, Compute* c, int64_t c_stride,
                   int64_t depth, int64_t width) {
  int64_t column = 0;
  for (; column + 2 * kLanes<Compute> <= width; column += 2 * kLanes<Compute>) {
    multiply_tile<kRows, 2>(a, a_stride, b + column, b_stride, c + column, c_stride, depth);
  }
  if (column < width) multiply_tile<kRows, 1>(a, a_stride, b + column, b_stride, c + column, c_stride, depth);
}

template <typename Compute>
void multiply(const Compute* a, int64_t a_stride, const Compute* b, int64_t b_stride, Compute* c, int64_t c_stride,
              int64_t rows, int64_t depth, int64_t width) {
  int64_t row = 0;
  for (; row + 4 <= rows; row += 4) {
    multiply_rows<4>(a + row * a_stride, a_stride, b, b_stride, c + row * c_stride, c_stride, depth, width);
  }
  for (; row < rows; ++row) {
    multiply_rows<1>(a + row * a_stride, a_stride, b, b_stride, c + row * c_stride, c_stride, depth, width);
  }
}

// Buffers of one task, in one allocation.
template <typename Compute>
class Scratch {
 public:
  explicit Scratch(int64_t depth)
      : depth_(padded<Compute>(depth)),
        data_(2 * kTaskQueries * depth_ + 2 * kKeys * depth_ + kTaskQueries * (kKeys + 2)) {}

  int64_t depth() const { return depth_; }
  Compute* q() const { return data_.data(); }                               // (queries, depth), scaled
  Compute* o() const { return q() + kTaskQueries * depth_; }                // (queries, depth)
  Compute* k() const { return o() + kTaskQueries * depth_; }                // (depth, keys): transposed
  Compute* v() const { return k() + kKeys * depth_; }                       // (keys, depth)
  Compute* scores() const { return v() + kKeys * depth_; }                  // (queries, keys)
  Compute* maximum() const { return scores() + kTaskQueries * kKeys; }      // (queries,)
  Compute* sum() const { return maximum() + kTaskQueries; }                 // (queries,)

 private:
  const int64_t depth_;
  const Buffer<Compute> data_;
};

// Copies `rows` rows of `depth` elements, converted and multiplied by `factor`, with zeros up to whole vectors.
template <typename T, typename Compute>
void widen_rows(const T* source, int64_t rows, int64_t depth, int64_t stride, Compute factor, Compute* target) {
  for (int64_t row = 0; row < rows; ++row) {
    for_vectors<Compute>(depth, [&](int64_t column, auto lanes) {
      store(target + row * stride + column, load(source + row_offset(row, depth) + column, lanes) * factor);
    });
  }
}

// Same for keys, transposed; missing keys are zero.
template <typename T, typename Compute>
void transpose_keys(const T* source, int64_t keys, int64_t depth, Compute* rows, int64_t stride, Compute* target) {
  widen_rows(source, keys, depth, stride, Compute{1}, rows);
  for (int64_t i = 0; i < depth; ++i) {
    for (int64_t key = 0; key < keys; ++key) target[i * kKeys + key] = rows[key * stride + i];
    for (int64_t key = keys; key < kKeys; ++key) target[i * kKeys + key] = Compute{0};
  }
}

// Replaces a row of scores by probabilities relative to the running maximum; rescales the running sum and output.
template <typename Compute>
void absorb_scores(Compute* scores, int64_t visible, Compute* maximum, Compute* sum, Compute* o, int64_t depth) {
  const Compute lowest = static_cast<Compute>(-__builtin_inf());
  for (int64_t key = visible; key < kKeys; ++key) scores[key] = lowest;
  Compute most = *maximum;
  for (int64_t key = 0; key < visible; ++key) most = scores[key] > most ? scores[key] : most;
  const Compute shift = most > lowest ? most : Compute{0};
  const Vector<Compute> rescale = exp_of_negative(broadcast(*maximum - shift));
  double added = 0.0;
  for (int64_t key = 0; key < kKeys; key += kLanes<Compute>) {
    const Vector<Compute> p = exp_of_negative(load(scores + key) - shift);
    store(scores + key, p);
    added += add_lanes(p);
  }
  *sum = static_cast<Compute>(static_cast<double>(*sum) * static_cast<double>(rescale[0]) + added);
  *maximum = most;
  if (rescale[0] == Compute{1}) return;
  for (int64_t column = 0; column < depth; column += kLanes<Compute>) store(o + column, load(o + column) * rescale);
}

template <typename T>
void run_task(const Forward& f, int64_t task, const Scratch<ComputeFor<T>>& s) {
  using Compute = ComputeFor<T>;
  const int64_t blocks = ceil_divide(f.queries, kTaskQueries);
  const int64_t batch_head = task / blocks;
  const int64_t first = task % blocks * kTaskQueries;
  const int64_t queries = smaller(kTaskQueries, f.queries - first);
  const int64_t kv_head = kv_head_of(batch_head, f.heads, f.kv_heads);
  const int64_t row = batch_head * f.queries + first;
  const T* q = static_cast<const T*>(f.q.data) + row_offset(row, f.depth);
  const T* k = static_cast<const T*>(f.k.data) + row_offset(kv_head * f.keys, f.depth);
  const T* v = static_cast<const T*>(f.v.data) + row_offset(kv_head * f.keys, f.depth);
  widen_rows(q, queries, f.depth, s.depth(), static_cast<Compute>(f.scale), s.q());
  std::memset(s.o(), 0, static_cast<size_t>(kTaskQueries * s.depth()) * sizeof(Compute));
  for (int64_t i = 0; i < queries; ++i) {
    s.maximum()[i] = static_cast<Compute>(-__builtin_inf());
    s.sum()[i] = Compute{0};
  }
  const int64_t end = visible_keys(first + queries - 1, f.queries, f.keys, f.causal);
  for (int64_t key = 0; key < end; key += kKeys) {
    const int64_t keys = smaller(kKeys, f.keys - key);
    transpose_keys(k + row_offset(key, f.depth), keys, f.depth, s.v(), s.depth(), s.k());
    widen_rows(v + row_offset(key, f.depth), keys, f.depth, s.depth(), Compute{1}, s.v());
    std::memset(s.scores(), 0, static_cast<size_t>(queries * kKeys) * sizeof(Compute));
    multiply(s.q(), s.depth(), s.k(), kKeys, s.scores(), kKeys, queries, f.depth, kKeys);
    for (int64_t i = 0; i < queries; ++i) {
      const int64_t visible = visible_keys(first + i, f.queries, f.keys, f.causal) - key;
      absorb_scores(s.scores() + i * kKeys, larger(0, smaller(visible, keys)), s.maximum() + i, s.sum() + i,
                    s.o() + i * s.depth(), s.depth());
    }
    multiply(s.scores(), kKeys, s.v(), s.depth(), s.o(), s.depth(), queries, keys, s.depth());
  }
  T* o = static_cast<T*>(f.o.data) + row_offset(row, f.depth);
  for (int64_t i = 0; i < queries; ++i) {
    const Compute sum = s.sum()[i];
    const Compute reciprocal = sum > Compute{0} || sum != sum ? Compute{1} / sum : Compute{0};
    static_cast<Compute*>(f.lse.data)[row + i] =
        static_cast<Compute>(static_cast<double>(s.maximum()[i]) + __builtin_log(static_cast<double>(sum)));
    for_vectors<Compute>(f.depth, [&](int64_t column, auto lanes) {
      store(o + row_offset(i, f.depth) + column, load(s.o() + i * s.depth() + column) * reciprocal, lanes);
    });
  }
}

}  // namespace

namespace KP_ISA {

void forward(const Forward& f, int64_t begin, int64_t end) {
  with_type(f.q.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const Scratch<ComputeFor<T>> scratch(f.depth);
    for (int64_t task = begin; task < end; ++task) run_task<T>(f, task, scratch);
  });
}

}  // namespace KP_ISA
}  // namespace flash_attention
}  // namespace kernel_pytorch
