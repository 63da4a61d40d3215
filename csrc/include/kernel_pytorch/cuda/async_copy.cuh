// Copies from global to shared memory that pass by the registers (cp.async, compute capability 8.0 on).
#pragma once

#include "kernel_pytorch/cuda/shared_memory.cuh"
#include "kernel_pytorch/cuda/vector.cuh"

namespace kernel_pytorch {

// 16 bytes, or zeros where there is nothing to copy; `source` must be an address that exists either way.
__device__ __forceinline__ void copy_16_bytes(void* target, const void* source, bool there) {
  const int size = there ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(target)), "l"(source), "r"(size)
               : "memory");
}

// 16 bytes that are read once (vector.cuh), to an address of shared memory.
__device__ __forceinline__ void copy_16_bytes_once(uint32_t target, const void* source) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(target),
               "l"(__cvta_generic_to_global(source)), "l"(once_policy())
               : "memory");
}

// The same, or zeros where there is nothing to copy; then nothing need be at `source`.
__device__ __forceinline__ void copy_16_bytes_once(uint32_t target, const void* source, bool there) {
  const int size = there ? 16 : 0;
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(target),
               "l"(__cvta_generic_to_global(source)), "r"(size), "l"(once_policy())
               : "memory");
}

// What this thread has asked for since the last call is one group.
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Until all groups of this thread but the `kOpen` last ones are there.
template <int kOpen>
__device__ __forceinline__ void await_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kOpen) : "memory");
}

}  // namespace kernel_pytorch
