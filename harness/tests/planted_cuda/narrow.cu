// One number a thread at a time, where 128 bits are promised.
template <typename T>
__global__ void __launch_bounds__(256) narrow_kernel(const T* x, T* y) {
  y[threadIdx.x] = x[threadIdx.x] + T(1);
}

template __global__ void narrow_kernel<float>(const float*, float*);
