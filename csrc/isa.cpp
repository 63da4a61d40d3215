#include "kernel_pytorch/cpu/isa.h"

#include <cstdlib>
#include <cstring>
#include <initializer_list>

namespace kernel_pytorch {

namespace {

Isa supported() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl")) {
    return Isa::kAvx512;
  }
  // Every processor with AVX2 also converts float16, but not every compiler supports the query for that.
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return Isa::kAvx2;
#endif
  return Isa::kBase;
}

Isa choose() {
  const Isa best = supported();
  const char* wanted = std::getenv("KERNEL_PYTORCH_CPU_ISA");
  if (wanted == nullptr) return best;
  for (const Isa isa : {Isa::kBase, Isa::kAvx2, Isa::kAvx512}) {
    if (std::strcmp(wanted, name_of(isa)) == 0 && isa <= best) return isa;
  }
  return best;
}

}  // namespace

Isa instruction_set() {
  static const Isa chosen = choose();
  return chosen;
}

const char* name_of(Isa isa) {
  return isa == Isa::kAvx512 ? "avx512" : isa == Isa::kAvx2 ? "avx2" : "base";
}

}  // namespace kernel_pytorch
