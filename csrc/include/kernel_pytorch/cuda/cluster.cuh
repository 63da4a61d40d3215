// Launches of thread block clusters (compute capability 9.0 on).
#pragma once

#include "kernel_pytorch/cuda/launch.cuh"

namespace kernel_pytorch {

// Largest cluster size on the current device. More than eight blocks need a data-center GPU of Hopper or Blackwell.
inline int most_blocks() {
  const int device = capability();
  return device >= 120 ? 8 : device >= 90 ? 16 : 0;
}

// Launches clusters with `shared_bytes` of dynamic shared memory per block.
template <typename Kernel, typename Parameters>
cudaError_t launch_clusters(Kernel kernel, int64_t clusters, int blocks, int threads, int shared_bytes,
                            cudaStream_t stream, const Parameters& p) {
  if (!fits_grid(clusters * blocks)) return cudaErrorInvalidValue;
  const auto* const function = reinterpret_cast<const void*>(kernel);
  cudaError_t error = cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  if (error == cudaSuccess && blocks > 8) {
    error = cudaFuncSetAttribute(function, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  }
  if (error != cudaSuccess) return error;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(clusters * blocks));
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.stream = stream;
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(blocks), 1, 1};
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, p);
}

}  // namespace kernel_pytorch
