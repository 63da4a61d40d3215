// CPU backend of the rotary position embedding.

#include "kernel_pytorch/cpu/rotary.h"
#include "rotary_embedding.h"

namespace kernel_pytorch {
namespace rotary_embedding {

namespace {

// Rotates the heads of one token of q or k; `known` says whether its position is a row of the tables.
template <typename T, typename Compute>
void rotate_token(const Side& side, const Arguments& a, const Angles<Compute>& angles, bool known, int64_t token) {
  const int64_t rotated = 2 * a.rotation.pairs;
  const Vector<Compute> nan = broadcast(static_cast<Compute>(__builtin_nan("")));
  for (int64_t head = 0; head < side.heads; ++head) {
    const T* x = static_cast<const T*>(side.x.data) + head_offset(side.strides, token, head);
    T* y = static_cast<T*>(side.y.data) + row_offset(token * side.heads + head, a.columns);
    if (known) {
      angles.rotate(rotated, [&](int64_t column, auto lanes) { return load(x + column, lanes); }, y);
    } else {
      for_vectors<Compute>(rotated, [&](int64_t column, auto lanes) { store(y + column, nan, lanes); });
    }
    if (rotated < a.columns) std::memcpy(y + rotated, x + rotated, static_cast<size_t>(a.columns - rotated) * sizeof(T));
  }
}

template <typename T>
void rotate_tokens(const Arguments& a, int64_t begin, int64_t end) {
  Angles<ComputeFor<T>> angles(a.rotation);
  for (int64_t token = begin; token < end; ++token) {
    const int64_t row = table_row(a.positions, a.rotation.rows, token);
    if (row >= 0) angles.move_to(row);
    for (const Side& side : a.sides) rotate_token<T>(side, a, angles, row >= 0, token);
  }
}

}  // namespace

namespace KP_ISA {

void rotate(const Arguments& a, int64_t begin, int64_t end) {
  with_type(a.sides[0].x.dtype, [&](auto x) { rotate_tokens<typename decltype(x)::type>(a, begin, end); });
}

}  // namespace KP_ISA
}  // namespace rotary_embedding
}  // namespace kernel_pytorch
