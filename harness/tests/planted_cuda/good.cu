// As it should be: wide accesses, no spill, products by the tensor cores of each architecture.
#include <cuda_bf16.h>

#include <cstdint>

#include "width.cuh"

namespace planted {

template <typename T, int N>
__global__ void __launch_bounds__(THREADS)
    scale_kernel(const T* __restrict__ x, T* __restrict__ y, float scale, int64_t packs) {
  const int64_t i = int64_t(blockIdx.x) * THREADS + threadIdx.x;
  if (i >= packs) return;
  auto pack = reinterpret_cast<const Pack<T, N>*>(x)[i];
  for (int k = 0; k < N; ++k) pack.values[k] = T(float(pack.values[k]) * scale);
  reinterpret_cast<Pack<T, N>*>(y)[i] = pack;
}

// The last one is for rows that start at any address, and promises no width.
template __global__ void scale_kernel<float, 4>(const float*, float*, float, int64_t);
template __global__ void scale_kernel<double, 2>(const double*, double*, float, int64_t);
template __global__ void scale_kernel<__nv_bfloat16, 8>(const __nv_bfloat16*, __nv_bfloat16*, float, int64_t);
template __global__ void scale_kernel<__nv_bfloat16, 1>(const __nv_bfloat16*, __nv_bfloat16*, float, int64_t);

extern __shared__ uint4 tile[];

__global__ void __launch_bounds__(128) product_kernel(const __nv_bfloat16* x, float4* y) {
  const unsigned place = __cvta_generic_to_shared(&tile[threadIdx.x]);
  asm volatile("cp.async.cg.shared.global [%0], [%1],\n 16;" ::"r"(place), "l"(x + 8 * threadIdx.x));
  asm volatile("cp.async.wait_all;");
  __syncthreads();
  const uint4 a = tile[threadIdx.x];
  float4 sum = {0, 0, 0, 0};
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, %4, %5, p, 1, 1, 0, 0;\n}"
      : "+f"(sum.x), "+f"(sum.y), "+f"(sum.z), "+f"(sum.w)
      : "l"(uint64_t(place)), "l"(uint64_t(place)));
#else
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32\n"
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%4, %5}, {%0, %1, %2, %3};"
      : "+f"(sum.x), "+f"(sum.y), "+f"(sum.z), "+f"(sum.w)
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w));
#endif
  y[threadIdx.x] = sum;
}

}  // namespace planted
