// Threads copy rows from global memory through shared memory, and prefetch the next row.
#include <cstdio>

constexpr int kThreads = 64, kRows = 7;

__device__ void copy(uint4* target, const uint4* source) {
  const auto shared = static_cast<uint32_t>(__cvta_generic_to_shared(target));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(source), "r"(16) : "memory");
  asm volatile("cp.async.commit_group;" ::: "memory");
}

__global__ void __launch_bounds__(kThreads) hand_through(const uint4* x, uint4* y) {
  extern __shared__ uint4 shared[];
  uint4(*const slots)[kThreads] = reinterpret_cast<uint4(*)[kThreads]>(shared);
  copy(&slots[0][threadIdx.x], x + threadIdx.x);
  for (int row = 0; row < kRows; ++row) {
    const int next = row + 1 < kRows ? row + 1 : row;
    copy(&slots[(row + 1) % 2][threadIdx.x], x + next * kThreads + threadIdx.x);
    asm volatile("cp.async.wait_group %0;" ::"n"(1) : "memory");
    y[row * kThreads + threadIdx.x] = slots[row % 2][threadIdx.x];
  }
}

int main() {
  static uint4 x[kRows * kThreads], y[kRows * kThreads];
  for (unsigned i = 0; i < kRows * kThreads; ++i) x[i] = {i + 1, 2 * i, 3 * i, 4 * i};
  hand_through<<<1, kThreads, 2 * kThreads * sizeof(uint4)>>>(x, y);
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) return std::printf("%s\n", cudaGetErrorString(error)), 1;
  for (unsigned i = 0; i < kRows * kThreads; ++i) {
    if (y[i].x != x[i].x || y[i].w != x[i].w) return std::printf("wrong: word %u is %u\n", i, y[i].x), 1;
  }
}
