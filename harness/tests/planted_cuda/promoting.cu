// A constant without f makes the arithmetic float64.
__global__ void __launch_bounds__(256) promoting_kernel(const float* x, float* y) {
  y[threadIdx.x] = x[threadIdx.x] * 0.1;
}
