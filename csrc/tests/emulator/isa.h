// Replaces kernel_pytorch/cpu/isa.h when kernels run instead of the CPU backend, whose functions are only declared.
#pragma once

#include <cstdlib>

#define KP_DECLARE_FOR_EACH_ISA(...) \
  namespace base {                   \
  inline __VA_ARGS__ { abort(); }    \
  }
#define KP_BEST(FUNCTION) (base::FUNCTION)
