// Two blocks of 1024 threads leave 32 registers a thread, and each holds 64 numbers until it knows their sum.
__global__ void __launch_bounds__(1024, 2) spilling_kernel(const float* x, float* y) {
  float held[64], sum = 0;
#pragma unroll
  for (int k = 0; k < 64; ++k) held[k] = x[k * 1024 + threadIdx.x];
#pragma unroll
  for (int k = 0; k < 64; ++k) sum += held[k];
#pragma unroll
  for (int k = 0; k < 64; ++k) y[k * 1024 + threadIdx.x] = held[k] - sum;
}
