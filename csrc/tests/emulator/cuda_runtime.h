// The part of CUDA's runtime that the kernels and their launchers use.
#pragma once

#include <cmath>
#include <cstdlib>
#include <cstring>

#include "emulator.h"

#define __global__ static
#define __device__
#define __host__
#define __forceinline__ inline
#define __shared__ static thread_local
#define __align__(BYTES) __attribute__((aligned(BYTES)))
#define __launch_bounds__(...)

struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }

// -- threads ----------------------------------------------------------------------------------------------------------

inline void __syncthreads() { ::emulator::wait_for_block(); }
inline void __syncwarp() { ::emulator::wait_for_warp(); }

template <typename T>
T __shfl_sync(unsigned mask, T value, int source) {
  memcpy(&value, ::emulator::exchange(&value, sizeof value, mask)[source & 31], sizeof value);
  return value;
}

template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int lanes) {
  return __shfl_sync(mask, value, ::emulator::lane() ^ lanes);
}

// -- memory -----------------------------------------------------------------------------------------------------------

template <typename T>
T __ldg(const T* address) {
  return *::emulator::aligned(address);
}
template <typename T>
T __ldcs(const T* address) {
  return *::emulator::aligned(address);
}
inline float __uint_as_float(unsigned bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}
inline uint64_t __cvta_generic_to_global(const void* address) { return reinterpret_cast<uint64_t>(address); }
inline uint64_t __cvta_generic_to_shared(const void* address) { return ::emulator::number_of(address); }

// -- arithmetic -------------------------------------------------------------------------------------------------------

inline int max(int a, int b) { return a > b ? a : b; }

// volatile keeps the compiler from contracting these operations with others.
inline float __fadd_rn(float a, float b) {
  volatile float sum = a + b;
  return sum;
}
inline float __fmul_rn(float a, float b) {
  volatile float product = a * b;
  return product;
}
inline float __frcp_rn(float x) { return 1.0f / x; }
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>(uint64_t{a} * b >> 32); }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }

// -- the host's side --------------------------------------------------------------------------------------------------

using cudaStream_t = void*;
enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorLaunchFailure = 719,
  cudaErrorNotSupported = 801,
};
inline const char* cudaGetErrorString(cudaError_t error) { return ::emulator::error_text(error); }
inline cudaError_t cudaGetLastError() { return static_cast<cudaError_t>(::emulator::last_error()); }

enum cudaDeviceAttr {
  cudaDevAttrComputeCapabilityMajor,
  cudaDevAttrComputeCapabilityMinor,
  cudaDevAttrMaxSharedMemoryPerBlockOptin,
};
inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  const int capability = ::emulator::capability();
  if (attribute == cudaDevAttrMaxSharedMemoryPerBlockOptin) {
    *value = static_cast<int>(::emulator::most_shared_bytes());
  } else {
    *value = attribute == cudaDevAttrComputeCapabilityMajor ? capability / 10 : capability % 10;
  }
  return cudaSuccess;
}

enum cudaFuncAttribute { cudaFuncAttributeNonPortableClusterSizeAllowed, cudaFuncAttributeMaxDynamicSharedMemorySize };
inline cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }

// The emulator does not know a kernel's static shared memory: this is more than any of these kernels has.
struct cudaFuncAttributes {
  size_t sharedSizeBytes = 9 * 1024;
};
inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, const void*) { return cudaSuccess; }

enum cudaLaunchAttributeID { cudaLaunchAttributeClusterDimension };
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  struct {
    struct {
      unsigned x, y, z;
    } clusterDim;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes = 0;
  cudaStream_t stream = nullptr;
  cudaLaunchAttribute* attrs = nullptr;
  unsigned numAttrs = 0;
};
template <typename... Parameters, typename... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...), Arguments&&... arguments) {
  ::emulator::Launch launch{config->gridDim, config->blockDim, 1, static_cast<unsigned>(config->dynamicSmemBytes)};
  for (unsigned i = 0; i < config->numAttrs; ++i) launch.cluster = config->attrs[i].val.clusterDim.x;
  return static_cast<cudaError_t>(::emulator::run(launch, [&] { kernel(arguments...); }));
}

namespace emulator {

// Translation of `kernel<<<grid, block, shared_bytes, stream>>>(...)`.
template <typename Kernel>
void launch(const Kernel& kernel, dim3 grid, dim3 block, size_t shared_bytes = 0, cudaStream_t = nullptr) {
  run({grid, block, 1, static_cast<unsigned>(shared_bytes)}, kernel);
}

}  // namespace emulator
