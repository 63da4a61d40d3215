// The first one declares 80 KB of shared memory, and code alone can have 48. The second one is all right.
__global__ void __launch_bounds__(256) hoarding_kernel(float* x) {
  __shared__ float hoard[20000];
  hoard[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  x[threadIdx.x] = hoard[threadIdx.x ^ 1];
}

__global__ void unbounded_kernel(float* x) { x[threadIdx.x] += 1; }
