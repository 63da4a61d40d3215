// What does not compile at all.
__global__ void broken_kernel(float* x) { x[threadIdx.x] = 1.0f }
