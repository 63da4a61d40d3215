// Dispatch from run-time dtypes to compile-time element types, on the CPU.
#pragma once

#include "kernel_pytorch/cpu/buffer.h"
#include "kernel_pytorch/cpu/vector.h"
#include "kernel_pytorch/dtype.h"

namespace kernel_pytorch {
namespace {

template <typename T>
struct Type {
  using type = T;
};

// Calls `function(Type<T>{})` with the element type of a dtype; does nothing for bool.
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

// Same for the result of an operator on T: its type is T, or float32 if a wider weight promotes it.
template <typename T, typename Function>
inline void with_result_type(DType dtype, const Function& function) {
  if constexpr (sizeof(T) == 2) {
    if (dtype == DType::kFloat32) return function(Type<float>{});
  }
  return function(Type<T>{});
}

// A copy of a tensor in the computation dtype, plus `added`, made once for many rows; the tensor itself if that is the
// same; empty for a missing argument. The tensor must be float64 exactly if the computation dtype is float64.
template <typename Compute>
class Widened {
 public:
  Widened(Input tensor, int64_t size, double added)
      : values_(is_own(tensor, added) ? static_cast<const Compute*>(tensor.data) : nullptr),
        copy_(!tensor || values_ != nullptr ? 0 : size) {
    if (copy_.data() == nullptr) return;
    with_type(tensor.dtype, [&](auto type) {
      using T = typename decltype(type)::type;
      if constexpr (std::is_same_v<ComputeFor<T>, Compute>) {
        const T* source = static_cast<const T*>(tensor.data);
        const Vector<Compute> plus = broadcast(static_cast<Compute>(added));
        for_vectors<Compute>(size, [&](int64_t i, auto lanes) {
          store(copy_.data() + i, load(source + i, lanes) + plus, lanes);
        });
      }
    });
  }

  const Compute* data() const { return values_ != nullptr ? values_ : copy_.data(); }

 private:
  static bool is_own(Input tensor, double added) {
    return added == 0.0 && tensor.dtype == (std::is_same_v<Compute, double> ? DType::kFloat64 : DType::kFloat32);
  }

  const Compute* const values_;
  const Buffer<Compute> copy_;
};

}  // namespace
}  // namespace kernel_pytorch
