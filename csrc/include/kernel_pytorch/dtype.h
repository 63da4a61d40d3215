// Dtypes of the kernels, independent of torch: code that works on rows receives pointers and these dtypes.
#pragma once

#include <cstdint>

namespace kernel_pytorch {

enum class DType : uint8_t { kFloat16, kBFloat16, kFloat32, kFloat64, kBool };

// A missing argument has a null data pointer.
struct Input {
  const void* data = nullptr;
  DType dtype = DType::kFloat32;
  explicit operator bool() const { return data != nullptr; }
};

struct Output {
  void* data = nullptr;
  DType dtype = DType::kFloat32;
  explicit operator bool() const { return data != nullptr; }
  operator Input() const { return {data, dtype}; }
};

constexpr int64_t size_of(DType dtype) {
  return dtype == DType::kFloat64 ? 8 : dtype == DType::kFloat32 ? 4 : dtype == DType::kBool ? 1 : 2;
}

}  // namespace kernel_pytorch
