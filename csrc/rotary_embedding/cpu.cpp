// The CPU twin of the rotary position embedding.

#include "kernel_pytorch/cpu/rotary.h"
#include "rotary_embedding.h"

namespace kernel_pytorch {
namespace rotary_embedding {

namespace {

template <typename T>
void rotate_tokens(const Arguments& a, int64_t begin, int64_t end) {
  using Compute = ComputeFor<T>;
  Angles<Compute> angles(a.rotation);
  const int64_t rotated = 2 * a.rotation.pairs;
  for (int64_t token = begin; token < end; ++token) {
    angles.move_to(token);
    for (int64_t head = 0; head < a.heads; ++head) {
      const T* x = static_cast<const T*>(a.x.data) + head_offset(a.strides, token, head);
      T* y = static_cast<T*>(a.y.data) + row_offset(token * a.heads + head, a.columns);
      angles.rotate(rotated, [&](int64_t column, auto lanes) { return load(x + column, lanes); }, y);
      if (rotated < a.columns) std::memcpy(y + rotated, x + rotated, static_cast<size_t>(a.columns - rotated) * sizeof(T));
    }
  }
}

}  // namespace

namespace KP_ISA {

void rotate(const Arguments& a, int64_t begin, int64_t end) {
  with_type(a.x.dtype, [&](auto x) { rotate_tokens<typename decltype(x)::type>(a, begin, end); });
}

}  // namespace KP_ISA
}  // namespace rotary_embedding
}  // namespace kernel_pytorch
