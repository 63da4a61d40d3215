// Selection of the instruction set of the CPU backend.
//
// Each file `cpu.cpp` is compiled once per instruction set, with KP_ISA as the name of a namespace. Its public
// functions go into that namespace, and everything else into an unnamed namespace, so that an older processor never
// runs a function that was compiled for a newer one. Such files include no header of torch, and no header of the
// standard library that defines functions which the linker could merge.
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

// `KP_BEST(f)` selects the `f` for the processor that executes it.
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

// Best instruction set of this processor, or a lower one set by KERNEL_PYTORCH_CPU_ISA (base, avx2, avx512); determined
// at the first call.
Isa instruction_set();

const char* name_of(Isa isa);

}  // namespace kernel_pytorch
