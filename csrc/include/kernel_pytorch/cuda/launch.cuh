// From dtypes at run time to kernels at compile time, and what a launcher asks the card.
#pragma once

#include <cuda_runtime.h>

#include "kernel_pytorch/cuda/vector.cuh"
#include "kernel_pytorch/dtype.h"
#include "kernel_pytorch/index.h"

namespace kernel_pytorch {

template <typename T>
struct Type {
  using type = T;
};

// `function(Type<T>{})` for the CUDA type of a dtype; cudaErrorInvalidValue for one that no kernel is compiled for.
template <typename Function>
cudaError_t with_type(DType dtype, const Function& function) {
  switch (dtype) {
    case DType::kFloat16:
      return function(Type<__half>{});
    case DType::kBFloat16:
      return function(Type<__nv_bfloat16>{});
    case DType::kFloat32:
      return function(Type<float>{});
    default:
      return cudaErrorInvalidValue;
  }
}

// Threads that a large card (132 multiprocessors) holds at a time: with fewer, a thread need not do several things.
constexpr int kManyThreads = 132 * 2048;

// Compute capability of the current device, times ten.
inline int capability() {
  int device = 0, major = 0, minor = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  return 10 * major + minor;
}

// A launch's error, taken off CUDA's record.
inline cudaError_t launched() { return cudaGetLastError(); }

// Whether a block may ask for so many bytes of shared memory beside those that the kernel declares.
template <typename Kernel>
bool has_shared(Kernel kernel, int bytes) {
  int device = 0, most = 0;
  cudaFuncAttributes attributes = {};
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel)) != cudaSuccess) return false;
  return bytes + static_cast<int64_t>(attributes.sharedSizeBytes) <= most;
}

// Lets a kernel that declares at most 16 KiB of shared memory have so many bytes more: above 48 KiB together it must be told.
template <typename Kernel>
cudaError_t allow_shared(Kernel kernel, int bytes) {
  if (bytes <= 32 * 1024) return cudaSuccess;
  return cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
}

// A grid's first dimension ends at 2^31 - 1.
inline bool fits_grid(int64_t blocks) { return blocks < (int64_t{1} << 31); }

}  // namespace kernel_pytorch
