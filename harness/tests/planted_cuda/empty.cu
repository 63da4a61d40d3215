// A kernel that nobody instantiates is in no machine code.
template <typename T>
__global__ void forgotten_kernel(T* x) {
  x[threadIdx.x] += 1;
}
