// Which instruction set the twin runs on.
//
// A file `cpu.cpp` is compiled once for every instruction set, with KP_ISA the name of a namespace; what it defines for
// others goes there, and everything else into an unnamed namespace, so that no function compiled for a newer processor
// is ever the one that an older one runs. Such files include no header of torch and none of the standard library that
// defines functions the linker could merge.
#pragma once

// `KP_DECLARE_FOR_EACH_ISA(void f(int))` declares `base::f`, `avx2::f`, ...
#define KP_DECLARE_IN_BASE(...) namespace base { __VA_ARGS__; }
#if defined(__x86_64__)
#define KP_DECLARE_FOR_EACH_ISA(...) \
  KP_DECLARE_IN_BASE(__VA_ARGS__)    \
  namespace avx2 { __VA_ARGS__; }    \
  namespace avx512 { __VA_ARGS__; }
#else
#define KP_DECLARE_FOR_EACH_ISA(...) KP_DECLARE_IN_BASE(__VA_ARGS__)
#endif

// `KP_BEST(f)` is the `f` for the processor that runs this.
#if defined(__x86_64__)
#define KP_BEST(FUNCTION)                                                      \
  (::kernel_pytorch::instruction_set() == ::kernel_pytorch::Isa::kAvx512  ? avx512::FUNCTION \
   : ::kernel_pytorch::instruction_set() == ::kernel_pytorch::Isa::kAvx2 ? avx2::FUNCTION   \
                                                                         : base::FUNCTION)
#else
#define KP_BEST(FUNCTION) (base::FUNCTION)
#endif

namespace kernel_pytorch {

enum class Isa { kBase, kAvx2, kAvx512 };

// The best that this processor has, or what KERNEL_PYTORCH_CPU_ISA (base, avx2, avx512) asks for below that; decided at
// the first call.
Isa instruction_set();

const char* name_of(Isa isa);

}  // namespace kernel_pytorch
