// Interface of the operators to torch, through its stable ABI alone: no ATen, no pybind.
//
// One binary supports every torch from 2.10 on, so nothing here is newer than 2.10.
#pragma once

// With this macro, checks in PyTorch's headers have constant messages, without iostreams: see `append`.
#define STRIP_ERROR_MESSAGES

#include <torch/headeronly/util/shim_utils.h>

// Handles failed calls of PyTorch. PyTorch's own macro reports only the text of the call and the path of its header.
#undef TORCH_ERROR_CODE_CHECK
#define TORCH_ERROR_CODE_CHECK(call) { ::kernel_pytorch::check_torch((call), #call); }

namespace kernel_pytorch {
// Raises RuntimeError unless the code is success; with PyTorch's message if this version of PyTorch keeps it.
void check_torch(int32_t code, const char* call);
}  // namespace kernel_pytorch

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <atomic>
#include <cstdio>
#include <exception>
#include <initializer_list>
#include <optional>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "kernel_pytorch/dtype.h"
#include "kernel_pytorch/index.h"

namespace kernel_pytorch {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

// A shape as part of a message. It is formatted only when the message is.
struct Shape {
  const Tensor& tensor;
};

inline Shape shape(const Tensor& tensor) { return {tensor}; }

// Appends text, a number or a shape to a message. iostreams are avoided: in a library that contains its own copy of
// libstdc++ they share locales with PyTorch's copy, and crash.
template <typename Part>
void append(std::string& message, const Part& part) {
  if constexpr (std::is_floating_point_v<Part>) {
    char digits[32];
    std::snprintf(digits, sizeof(digits), "%g", static_cast<double>(part));
    message += digits;
  } else if constexpr (std::is_arithmetic_v<Part>) {
    message += std::to_string(part);
  } else {
    message += part;
  }
}

inline void append(std::string& message, const Shape& shape) {
  const int64_t dimensions = shape.tensor.dim();
  message += "(";
  for (int64_t i = 0; i < dimensions; ++i) {
    if (i > 0) message += ", ";
    append(message, shape.tensor.size(i));
  }
  message += dimensions == 1 ? ",)" : ")";
}

// Raises RuntimeError with these parts as its message.
template <typename... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::string message;
  (append(message, parts), ...);
  throw std::runtime_error(message);
}

// Raises the error of `fail` unless the condition holds. Only a failed check builds the message.
template <typename... Parts>
void check(bool condition, const Parts&... parts) {
  if (!condition) fail(parts...);
}

inline std::vector<int64_t> sizes(const Tensor& tensor) {
  std::vector<int64_t> found;
  for (int64_t i = 0; i < tensor.dim(); ++i) found.push_back(tensor.size(i));
  return found;
}

// Name of a dtype as torch prints it, for the dtypes that users commonly pass.
inline const char* dtype_name(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::Half:
      return "torch.float16";
    case ScalarType::BFloat16:
      return "torch.bfloat16";
    case ScalarType::Float:
      return "torch.float32";
    case ScalarType::Double:
      return "torch.float64";
    case ScalarType::Bool:
      return "torch.bool";
    case ScalarType::Byte:
      return "torch.uint8";
    case ScalarType::Int:
      return "torch.int32";
    case ScalarType::Long:
      return "torch.int64";
    case ScalarType::ComplexFloat:
      return "torch.complex64";
    default:
      return "another one";
  }
}

// Returns the dtype of an argument, or raises an error that names the argument.
inline DType dtype_of(const char* name, const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::Half:
      return DType::kFloat16;
    case ScalarType::BFloat16:
      return DType::kBFloat16;
    case ScalarType::Float:
      return DType::kFloat32;
    case ScalarType::Double:
      check(!tensor.is_cuda(), name, ": dtype is torch.float64; on CUDA allowed are float16, bfloat16 and float32");
      return DType::kFloat64;
    case ScalarType::Bool:
      return DType::kBool;
    default:
      fail(name, ": dtype is ", dtype_name(tensor), "; allowed are float16, bfloat16, float32 and float64");
  }
}

inline ScalarType scalar_type(DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
      return ScalarType::Half;
    case DType::kBFloat16:
      return ScalarType::BFloat16;
    case DType::kFloat32:
      return ScalarType::Float;
    case DType::kFloat64:
      return ScalarType::Double;
    case DType::kBool:
      return ScalarType::Bool;
  }
  return ScalarType::Undefined;
}

// Same as torch.promote_types, for float dtypes.
inline DType promote(DType a, DType b) {
  if (a == b) return a;
  if (a == DType::kFloat64 || b == DType::kFloat64) return DType::kFloat64;
  return DType::kFloat32;  // also for float16 with bfloat16
}

inline bool is_floating(DType dtype) { return dtype != DType::kBool; }

// The computation dtype: float64 if any tensor is float64, else float32.
inline DType compute_type(std::initializer_list<DType> dtypes) {
  for (const DType dtype : dtypes) {
    if (dtype == DType::kFloat64) return dtype;
  }
  return DType::kFloat32;
}

// Returns the data pointer of an argument. A null pointer means that the argument was not given, so a tensor whose
// storage was freed, as sharded training does between uses, is an error.
inline const void* data_of(const char* name, const Tensor& tensor) {
  const void* data = tensor.const_data_ptr();
  check(data != nullptr || tensor.numel() == 0, name, ": shape is ", shape(tensor),
        ", but its storage holds nothing; it was freed (resize_(0)), and must be filled before");
  return data;
}

inline Input input(const char* name, const Tensor& tensor) { return {data_of(name, tensor), dtype_of(name, tensor)}; }

inline Output output(const Tensor& tensor) { return {tensor.mutable_data_ptr(), dtype_of("result", tensor)}; }

inline Tensor as_contiguous(const Tensor& tensor) {
  return tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor);
}

inline OptionalTensor as_contiguous(const OptionalTensor& tensor) {
  return tensor.has_value() ? OptionalTensor(as_contiguous(*tensor)) : std::nullopt;
}

// Raises PyTorch's message, or one with the same beginning if this version of PyTorch does not keep the message.
[[noreturn]] void fail_to_allocate(int64_t bytes, bool cuda);

// Allocates a contiguous tensor on the device of `like`. Bypasses the dispatcher, which would dominate the time of a
// small operator.
inline Tensor empty(const Tensor& like, const std::vector<int64_t>& size, DType dtype) {
  std::vector<int64_t> strides(size.size());
  int64_t stride = 1;
  for (size_t i = size.size(); i-- > 0;) {
    strides[i] = stride;
    stride *= larger(size[i], 1);
  }
  int32_t device_type = 0, device_index = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device_type));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(like.get(), &device_index));
  AtenTensorHandle found = nullptr;
  const int32_t code =
      aoti_torch_empty_strided(static_cast<int64_t>(size.size()), size.data(), strides.data(),
                               static_cast<int32_t>(scalar_type(dtype)), device_type, device_index, &found);
  if (code != TORCH_SUCCESS) fail_to_allocate(stride * size_of(dtype), like.is_cuda());
  return Tensor(found);
}

inline Tensor in_type(const Tensor& tensor, DType dtype) {
  return dtype_of("", tensor) == dtype ? tensor : torch::stable::to(tensor, scalar_type(dtype));
}

// Checks that apply to every tensor that is passed together with x.
inline void check_beside(const char* name, const Tensor& tensor, const Tensor& x) {
  check(tensor.is_cuda() == x.is_cuda() && tensor.get_device() == x.get_device(), name,
        ": must be on the device of x");
}

inline void check_floating(const char* name, const Tensor& tensor) {
  check(is_floating(dtype_of(name, tensor)), name, ": dtype is torch.bool; allowed are float dtypes");
}

// Size of a tensor viewed as rows of its last dimension.
struct Rows {
  int64_t rows;
  int64_t columns;
};

inline Rows rows_of(const char* name, const Tensor& tensor) {
  check(tensor.dim() > 0, name, ": shape is (); it needs at least one dimension");
  const int64_t columns = tensor.size(tensor.dim() - 1);
  check(columns > 0, name, ": shape is ", shape(tensor), "; the last dimension must not be empty");
  return {tensor.numel() / columns, columns};
}

// Largest number of columns for CUDA kernels: they count columns in 32 bits, and step beyond the end once.
constexpr int64_t kMostCudaColumns = (int64_t{1} << 31) - 4096;

// Largest number of rows for CUDA kernels: the limit of a grid's first dimension.
constexpr int64_t kMostCudaRows = (int64_t{1} << 31) - 1;

inline void check_cuda_size(const char* operator_name, const char* name, const Tensor& tensor, Rows rows) {
  if (!tensor.is_cuda()) return;
  check(rows.columns <= kMostCudaColumns, operator_name, ": ", name, ": shape is ", shape(tensor),
        "; on CUDA the last dimension may be at most ", kMostCudaColumns);
  check(rows.rows <= kMostCudaRows, operator_name, ": ", name, ": shape is ", shape(tensor), "; on CUDA at most ",
        kMostCudaRows, " rows are allowed, the product of all dimensions but the last");
}

// Number of elements below which starting another thread does not pay off.
constexpr int64_t kGrain = 32768;

// Calls `function(begin, end)` on ranges of rows in parallel. If a call throws, the exception is rethrown after all
// calls have finished: no exception may leave a function that another thread runs.
template <typename Function>
void for_rows(int64_t rows, int64_t columns, const Function& function) {
  if (rows == 0) return;
  std::atomic_flag failed = ATOMIC_FLAG_INIT;
  std::exception_ptr failure;
  torch::stable::parallel_for(0, rows, larger(1, kGrain / larger(columns, 1)), [&](int64_t begin, int64_t end) {
    try {
      function(begin, end);
    } catch (...) {
      if (!failed.test_and_set()) failure = std::current_exception();
    }
  });
  if (failure) std::rethrow_exception(failure);
}

// Same as `for_rows`, on ranges of tiles (index.h).
template <typename Function>
void for_tiles(int64_t rows, int64_t columns, int64_t width, const Function& function) {
  if (rows > 0 && columns > 0) for_rows(tiles_of(rows, columns, width), smaller(columns, width), function);
}

// Makes the device of a tensor current, and provides CUDA's current stream of that device.
class __attribute__((visibility("hidden"))) OnDeviceOf {
 public:
  explicit OnDeviceOf(const Tensor& tensor);
  void* stream() const { return stream_; }

 private:
  torch::stable::accelerator::DeviceGuard guard_;
  void* stream_ = nullptr;
};

// Number of the kernel file that this thread has selected with `choose_rung`; 0, the default, lets the launcher choose.
int64_t rung();

// Raises an error with operator and shape unless CUDA's error code is success. The launcher has cleared CUDA's last
// error, so that later calls do not report it again.
void check_launch(int error, const char* name, const Tensor& x);

// Calls `launch(stream)` on the device of x; `launch` returns CUDA's error code. It is a generic lambda, so that a
// library without CUDA needs no launcher.
template <typename Launch>
void on_cuda([[maybe_unused]] const char* name, [[maybe_unused]] const Tensor& x,
             [[maybe_unused]] const Launch& launch) {
#if defined(KP_WITH_CUDA)
  const OnDeviceOf device(x);
  check_launch(launch(device.stream()), name, x);
#else
  fail(name, ": this library was built without CUDA; install kernel-pytorch-cuda-ops where nvcc is found");
#endif
}

// `KP_IMPLEMENT(library) { library.impl(...); }` registers the same functions for CPU and CUDA.
#define KP_IMPLEMENT(LIBRARY)                                                            \
  static void implement(torch::stable::detail::StableLibrary&);                          \
  STABLE_TORCH_LIBRARY_IMPL(kernel_pytorch_cuda, CPU, library) { implement(library); }   \
  STABLE_TORCH_LIBRARY_IMPL(kernel_pytorch_cuda, CUDA, library) { implement(library); }  \
  static void implement(torch::stable::detail::StableLibrary& LIBRARY)

}  // namespace kernel_pytorch
