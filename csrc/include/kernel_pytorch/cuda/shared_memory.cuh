// Shared memory by the addresses that instructions take: held in a register, where a pointer would be made anew from the
// block's place in its cluster at every access.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace kernel_pytorch {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
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
