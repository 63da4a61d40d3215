// Names of the activations, for host and device code, CPU and CUDA.
#pragma once

#include <cstdint>

namespace kernel_pytorch {

enum class Activation : uint8_t {
  kGelu,
  kGeluTanh,
  kSilu,
  kRelu,
  kReluSquared,
  kQuickGelu,
  kTanh,
  kSigmoid,
  kIdentity,
};

// The names in the order of the enumeration.
constexpr const char* kActivationNames[] = {
    "gelu", "gelu_tanh", "silu", "relu", "relu_squared", "quick_gelu", "tanh", "sigmoid", "identity",
};
constexpr int kActivations = sizeof(kActivationNames) / sizeof(kActivationNames[0]);

template <Activation A>
struct ActivationConstant {
  static constexpr Activation value = A;
};

// Calls `function(ActivationConstant<A>{})` for an activation that is known at run time.
template <typename Function>
inline auto with_activation(Activation activation, const Function& function) {
  switch (activation) {
    case Activation::kGelu:
      return function(ActivationConstant<Activation::kGelu>{});
    case Activation::kGeluTanh:
      return function(ActivationConstant<Activation::kGeluTanh>{});
    case Activation::kSilu:
      return function(ActivationConstant<Activation::kSilu>{});
    case Activation::kRelu:
      return function(ActivationConstant<Activation::kRelu>{});
    case Activation::kReluSquared:
      return function(ActivationConstant<Activation::kReluSquared>{});
    case Activation::kQuickGelu:
      return function(ActivationConstant<Activation::kQuickGelu>{});
    case Activation::kTanh:
      return function(ActivationConstant<Activation::kTanh>{});
    case Activation::kSigmoid:
      return function(ActivationConstant<Activation::kSigmoid>{});
    default:
      return function(ActivationConstant<Activation::kIdentity>{});
  }
}

// Same as `with_activation`, for the activations that gated units use.
template <typename Function>
inline auto with_gate(Activation activation, const Function& function) {
  switch (activation) {
    case Activation::kSilu:
      return function(ActivationConstant<Activation::kSilu>{});
    case Activation::kGelu:
      return function(ActivationConstant<Activation::kGelu>{});
    case Activation::kGeluTanh:
      return function(ActivationConstant<Activation::kGeluTanh>{});
    default:
      return function(ActivationConstant<Activation::kRelu>{});
  }
}

}  // namespace kernel_pytorch
