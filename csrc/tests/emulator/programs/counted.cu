// Blocks of a cluster send numbers to each other, and wait for the number of bytes.
#include <cooperative_groups.h>

#include <cstdio>

constexpr int kThreads = 32, kBlocks = 8, kCluster = 4, kRounds = 5;

struct Shared {
  float numbers[2][kCluster * kThreads];
  uint64_t arrivals[2];
};

__device__ uint32_t number_of(const void* address) { return static_cast<uint32_t>(__cvta_generic_to_shared(address)); }

__device__ uint32_t in_block(uint32_t own, unsigned rank) {
  uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(own), "r"(rank));
  return there;
}

__global__ void __launch_bounds__(kThreads) sum_all(float* y) {
  __shared__ Shared shared;
  const cooperative_groups::cluster_group cluster = cooperative_groups::this_cluster();
  const unsigned rank = cluster.block_rank(), blocks = cluster.num_blocks();
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; ++i) {
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(number_of(&shared.arrivals[i])) : "memory");
    }
  }
  cluster.sync();
  float own = 1.0f + blockIdx.x * kThreads + threadIdx.x;
  for (unsigned round = 0; round < kRounds; ++round) {
    const uint32_t arrivals = number_of(&shared.arrivals[round % 2]);
    const uint32_t place = number_of(&shared.numbers[round % 2][rank * kThreads + threadIdx.x]);
    if (threadIdx.x == 0) {
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(arrivals), "r"(kCluster * kThreads * 4)
                   : "memory");
    }
    for (unsigned block = 0; block < blocks; ++block) {
      asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(
                       in_block(place, block)),
                   "f"(own), "r"(in_block(arrivals, block))
                   : "memory");
    }
    for (unsigned complete = 0; complete == 0;) {
      asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                   : "=r"(complete)
                   : "r"(arrivals), "r"(round / 2 % 2)
                   : "memory");
    }
    own = 0.0f;
    for (const float number : shared.numbers[round % 2]) own += number / (kCluster * kThreads);
  }
  y[blockIdx.x * kThreads + threadIdx.x] = own;
}

int main() {
  static float y[kBlocks * kThreads];
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(kBlocks);
  config.blockDim = dim3(kThreads);
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {kCluster, 1, 1};
  config.attrs = &attribute;
  config.numAttrs = 1;
  const cudaError_t error = cudaLaunchKernelEx(&config, sum_all, y);
  if (error != cudaSuccess) return std::printf("%s\n", cudaGetErrorString(error)), 1;
  constexpr int kOfCluster = kCluster * kThreads;
  for (int i = 0; i < kBlocks * kThreads; ++i) {
    const float mean = i / kOfCluster * kOfCluster + (kOfCluster + 1) / 2.0f;
    if (y[i] != mean) return std::printf("wrong: element %d is %f\n", i, y[i]), 1;
  }
}
