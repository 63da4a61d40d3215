// Asynchronous copies from global to shared memory that bypass the registers (cp.async, compute capability 8.0 on).
#pragma once

#include "kernel_pytorch/cuda/shared_memory.cuh"
#include "kernel_pytorch/cuda/vector.cuh"

namespace kernel_pytorch {

// Copies 16 bytes, or writes zeros if `there` is false; `source` must be a valid address either way.
__device__ __forceinline__ void copy_16_bytes(void* target, const void* source, bool there) {
  const int size = there ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(target)), "l"(source), "r"(size)
               : "memory");
}

// Copies 16 bytes that are read once (vector.cuh) to an address of shared memory.
__device__ __forceinline__ void copy_16_bytes_once(uint32_t target, const void* source) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(target),
               "l"(__cvta_generic_to_global(source)), "l"(once_policy())
               : "memory");
}

// Same, but writes zeros if `there` is false; `source` need not be readable then.
__device__ __forceinline__ void copy_16_bytes_once(uint32_t target, const void* source, bool there) {
  const int size = there ? 16 : 0;
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(target),
               "l"(__cvta_generic_to_global(source)), "r"(size), "l"(once_policy())
               : "memory");
}

// Commits all copies that this thread has started since the last call as one group.
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits for all groups of this thread except the latest `kOpen`.
template <int kOpen>
__device__ __forceinline__ void await_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kOpen) : "memory");
}

}  // namespace kernel_pytorch
