// From dtypes at run time to element types at compile time, on the CPU.
#pragma once

#include "kernel_pytorch/cpu/vector.h"
#include "kernel_pytorch/dtype.h"

namespace kernel_pytorch {
namespace {

template <typename T>
struct Type {
  using type = T;
};

// `function(Type<T>{})` for the element type of a dtype; nothing for bool.
template <typename Function>
inline void with_type(DType dtype, const Function& function) {
  switch (dtype) {
    case DType::kFloat16:
      return function(Type<Float16>{});
    case DType::kBFloat16:
      return function(Type<BFloat16>{});
    case DType::kFloat32:
      return function(Type<float>{});
    case DType::kFloat64:
      return function(Type<double>{});
    case DType::kBool:
      return;
  }
}

// The same for the result of T, which has its type, or float32 where a wider weight makes it so.
template <typename T, typename Function>
inline void with_result_type(DType dtype, const Function& function) {
  if constexpr (sizeof(T) == 2) {
    if (dtype == DType::kFloat32) return function(Type<float>{});
  }
  return function(Type<T>{});
}

// A copy of a tensor, widened, plus `added`, made once for many rows; the tensor itself where that is the same. Empty of
// an argument that is not there. A tensor is float64 where that is what is computed in, and nowhere else.
template <typename Compute>
class Widened {
 public:
  Widened(Input tensor, int64_t size, double added) {
    if (!tensor) return;
    constexpr DType kOwn = std::is_same_v<Compute, double> ? DType::kFloat64 : DType::kFloat32;
    if (tensor.dtype == kOwn && added == 0.0) {
      values_ = static_cast<const Compute*>(tensor.data);
      return;
    }
    copy_ = static_cast<Compute*>(__builtin_malloc(static_cast<size_t>(size) * sizeof(Compute)));
    with_type(tensor.dtype, [&](auto type) {
      using T = typename decltype(type)::type;
      if constexpr (std::is_same_v<ComputeFor<T>, Compute>) {
        const T* source = static_cast<const T*>(tensor.data);
        const Vector<Compute> plus = broadcast(static_cast<Compute>(added));
        for_vectors<Compute>(size, [&](int64_t i, auto lanes) {
          store(copy_ + i, load(source + i, lanes) + plus, lanes);
        });
      }
    });
    values_ = copy_;
  }
  ~Widened() { __builtin_free(copy_); }
  Widened(const Widened&) = delete;
  Widened& operator=(const Widened&) = delete;

  const Compute* data() const { return values_; }

 private:
  const Compute* values_ = nullptr;
  Compute* copy_ = nullptr;
};

}  // namespace
}  // namespace kernel_pytorch
