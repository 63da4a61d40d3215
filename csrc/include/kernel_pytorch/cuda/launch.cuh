// Dispatch from run-time dtypes to compiled kernels, and queries of the device for launchers.
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

// Calls `function(Type<T>{})` with the CUDA type of a dtype; returns cudaErrorInvalidValue if no kernel has that type.
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

// Number of resident threads of a large GPU (132 multiprocessors): with fewer, threads need not process several items.
constexpr int kManyThreads = 132 * 2048;

// Compute capability of the current device, times ten.
inline int capability() {
  int device = 0, major = 0, minor = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  return 10 * major + minor;
}

// Returns a launch's error and clears it from CUDA's record.
inline cudaError_t launched() { return cudaGetLastError(); }

// Whether a block can use `bytes` of dynamic shared memory in addition to the kernel's static shared memory.
template <typename Kernel>
bool has_shared(Kernel kernel, int bytes) {
  int device = 0, most = 0;
  cudaFuncAttributes attributes = {};
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel)) != cudaSuccess) return false;
  return bytes + static_cast<int64_t>(attributes.sharedSizeBytes) <= most;
}

// Opts in to more than 48 KiB of shared memory, `bytes` dynamic and at most 16 KiB static, where that is required.
template <typename Kernel>
cudaError_t allow_shared(Kernel kernel, int bytes) {
  if (bytes <= 32 * 1024) return cudaSuccess;
  return cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
}

// A grid's first dimension is at most 2^31 - 1.
inline bool fits_grid(int64_t blocks) { return blocks < (int64_t{1} << 31); }

}  // namespace kernel_pytorch
