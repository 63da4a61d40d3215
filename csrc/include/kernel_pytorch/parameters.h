// Arguments shared by operators on rows: activation names, parameters with one value per column, dropout.
#pragma once

#include "kernel_pytorch/activation.h"
#include "kernel_pytorch/operator.h"
#include "kernel_pytorch/philox.h"

namespace kernel_pytorch {

// Returns the activation with that name, or raises an error that lists all names.
inline Activation activation_of(const char* operator_name, const std::string& activation) {
  for (int i = 0; i < kActivations; ++i) {
    if (activation == kActivationNames[i]) return static_cast<Activation>(i);
  }
  std::string allowed;
  for (const char* name : kActivationNames) allowed += std::string(allowed.empty() ? "'" : ", '") + name + "'";
  fail(operator_name, ": activation: given '", activation, "'; allowed are ", allowed);
}

// Checks that a parameter has one value per column of x.
inline void check_parameter(const char* operator_name, const char* name, const OptionalTensor& parameter,
                            const Tensor& x) {
  if (!parameter.has_value()) return;
  check_beside(name, *parameter, x);
  check_floating(name, *parameter);
  check(parameter->dim() == 1 && parameter->size(0) == x.size(x.dim() - 1), operator_name, ": ", name, ": shape is ",
        shape(*parameter), "; for x of shape ", shape(x), " it must be (", x.size(x.dim() - 1), ",)");
}

// Converts a parameter to a dtype that the CPU backends accept with `compute`: float64 exactly if `compute` is float64.
inline OptionalTensor parameter_in(const char* name, const OptionalTensor& parameter, DType compute) {
  if (!parameter.has_value()) return parameter;
  const bool taken = compute_type({dtype_of(name, *parameter)}) == compute;
  return as_contiguous(taken ? *parameter : in_type(*parameter, compute));
}

inline Input optional_input(const char* name, const OptionalTensor& tensor) {
  return tensor.has_value() ? input(name, *tensor) : Input{};
}

// Checks that a tensor has the shape of another.
inline void check_like(const char* operator_name, const char* name, const OptionalTensor& tensor, const char* other_name,
                       const Tensor& other) {
  if (!tensor.has_value()) return;
  check_beside(name, *tensor, other);
  check_floating(name, *tensor);
  check(sizes(*tensor) == sizes(other), operator_name, ": ", name, ": shape is ", shape(*tensor), "; it must be that of ",
        other_name, ", ", shape(other));
}

// Dropout of elements of x with probability p; the seed must outlive the result.
inline Dropout dropout_of(const char* operator_name, const char* p_name, double p, const OptionalTensor& seed,
                          const Tensor& x) {
  check(p >= 0.0 && p < 1.0, operator_name, ": ", p_name, ": given ", p, "; it must be at least 0 and below 1");
  if (p == 0.0) return {};
  check(seed.has_value(), operator_name, ": seed: given None; with ", p_name, " ", p,
        " it must be an int64 tensor of shape ()");
  check_beside("seed", *seed, x);
  check(seed->scalar_type() == ScalarType::Long && seed->dim() == 0, operator_name, ": seed: given ",
        dtype_name(*seed), " of shape ", shape(*seed), "; it must be an int64 tensor of shape ()");
  return {static_cast<const int64_t*>(data_of("seed", *seed)), dropout_threshold(p), 1.0 / (1.0 - p)};
}

// Returns the float dtype with that Python name.
inline DType dtype_named(const char* operator_name, const char* name, const std::string& given) {
  if (given == "float16") return DType::kFloat16;
  if (given == "bfloat16") return DType::kBFloat16;
  if (given == "float32") return DType::kFloat32;
  if (given == "float64") return DType::kFloat64;
  fail(operator_name, ": ", name, ": given '", given, "'; allowed are 'float16', 'bfloat16', 'float32', 'float64'");
}

}  // namespace kernel_pytorch
