// Each block of a cluster passes its values to the next block.
#include <cooperative_groups.h>

#include <cstdio>

constexpr int kThreads = 32, kBlocks = 12, kCluster = 4;

__global__ void __launch_bounds__(kThreads) hand_on(int* y) {
  __shared__ int row[kThreads];
  const cooperative_groups::cluster_group cluster = cooperative_groups::this_cluster();
  const unsigned rank = cluster.block_rank(), blocks = cluster.num_blocks();
  row[threadIdx.x] = -1;
  cluster.sync();
  cluster.map_shared_rank(row, (rank + 1) % blocks)[threadIdx.x] = 100 * blockIdx.x + threadIdx.x;
  cluster.sync();  // all is there
  y[blockIdx.x * kThreads + threadIdx.x] = row[kThreads - 1 - threadIdx.x];
  cluster.sync();
}

int main() {
  static int y[kBlocks * kThreads];
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(kBlocks);
  config.blockDim = dim3(kThreads);
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {kCluster, 1, 1};
  config.attrs = &attribute;
  config.numAttrs = 1;
  const cudaError_t error = cudaLaunchKernelEx(&config, hand_on, y);
  if (error != cudaSuccess) return std::printf("%s\n", cudaGetErrorString(error)), 1;
  for (int i = 0; i < kBlocks * kThreads; ++i) {
    const int block = i / kThreads, giver = block / kCluster * kCluster + (block + kCluster - 1) % kCluster;
    if (y[i] != 100 * giver + kThreads - 1 - i % kThreads) return std::printf("wrong: element %d is %d\n", i, y[i]), 1;
  }
}
