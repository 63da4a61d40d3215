// In place of kernel_pytorch/cpu/isa.h where kernels run in place of the twin, which is declared and not there.
#pragma once

#include <cstdlib>

#define KP_DECLARE_FOR_EACH_ISA(...) \
  namespace base {                   \
  inline __VA_ARGS__ { abort(); }    \
  }
#define KP_BEST(FUNCTION) (base::FUNCTION)
