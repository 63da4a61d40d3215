// Launching clusters of blocks (compute capability 9.0 on), one for each row.
#pragma once

#include "kernel_pytorch/cuda/launch.cuh"

namespace kernel_pytorch {

// Blocks of a cluster for a row of `vectors`, of which a block takes `of_block`: the fewest that hold it, or 0 if the
// current device has no such cluster. Above eight only data-centre cards of Hopper and Blackwell allow.
inline int cluster_blocks(int64_t vectors, int64_t of_block) {
  const int device = capability();
  const int most = device >= 120 ? 8 : device >= 90 ? 16 : 0;
  for (int blocks = 2; blocks <= most; blocks *= 2) {
    if (vectors <= of_block * blocks) return blocks;
  }
  return 0;
}

template <typename Kernel, typename Parameters>
cudaError_t launch_clusters(Kernel kernel, int64_t rows, int blocks, int threads, cudaStream_t stream,
                            const Parameters& p) {
  if (blocks > 8) {
    const cudaError_t error = cudaFuncSetAttribute(
        reinterpret_cast<const void*>(kernel), cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    if (error != cudaSuccess) return error;
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(rows * blocks));
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
