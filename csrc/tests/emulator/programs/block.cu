// Each block reverses its part of an array, and sums it with shuffles.
#include <cstdio>

constexpr int kThreads = 64, kBlocks = 3;

__global__ void __launch_bounds__(kThreads) turn(const float* x, float* y, float* sums) {
  __shared__ float row[kThreads];
  const int first = blockIdx.x * blockDim.x;
  row[threadIdx.x] = x[first + threadIdx.x];
  __syncthreads();  // all is there
  const float value = row[kThreads - 1 - threadIdx.x];
  y[first + threadIdx.x] = value;
  float sum = value;
  for (int mask = 16; mask > 0; mask /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, mask);
  if (threadIdx.x % 32 == 0) sums[(first + threadIdx.x) / 32] = sum;
}

int main() {
  static float x[kBlocks * kThreads], y[kBlocks * kThreads], sums[kBlocks * kThreads / 32];
  for (int i = 0; i < kBlocks * kThreads; ++i) x[i] = static_cast<float>(i + 1);
  turn<<<kBlocks, kThreads>>>(x, y, sums);
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) return std::printf("%s\n", cudaGetErrorString(error)), 1;
  for (int i = 0; i < kBlocks * kThreads; ++i) {
    const int mirrored = i / kThreads * kThreads + kThreads - 1 - i % kThreads;
    if (y[i] != x[mirrored]) return std::printf("wrong: element %d is %g\n", i, y[i]), 1;
  }
  for (int warp = 0; warp < kBlocks * kThreads / 32; ++warp) {
    float sum = 0.0f;
    for (int i = 0; i < 32; ++i) sum += y[32 * warp + i];
    if (sums[warp] != sum) return std::printf("wrong: sum %d is %g\n", warp, sums[warp]), 1;
  }
}
