// Access to shared memory by 32-bit address. The address stays in a register; from a pointer the compiler would
// recompute it from the block's rank in its cluster at every access.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace kernel_pytorch {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Keeps an address in a register: the compiler cannot recompute the result of a shuffle. All lanes of a warp must call
// it.
__device__ __forceinline__ uint32_t held_address(uint32_t address) { return __shfl_xor_sync(0xffffffffu, address, 0); }

__device__ __forceinline__ float load_shared_float(uint32_t address) {
  float value;
  asm volatile("ld.shared.b32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
  return value;
}

__device__ __forceinline__ void store_shared_float(uint32_t address, float value) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
}

__device__ __forceinline__ uint4 load_shared_16_bytes(uint32_t address) {
  uint4 words;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "r"(address)
               : "memory");
  return words;
}

__device__ __forceinline__ void store_shared_16_bytes(uint32_t address, uint4 words) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(words.x), "r"(words.y), "r"(words.z),
               "r"(words.w)
               : "memory");
}

}  // namespace kernel_pytorch
