// A product of float32 in tf32, which nobody allowed.
__global__ void __launch_bounds__(32) rounding_kernel(const unsigned* x, float4* y) {
  const unsigned a = x[threadIdx.x];
  float4 sum = {0, 0, 0, 0};
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %4, %4, %4}, {%4, %4}, {%0, %1, %2, %3};"
      : "+f"(sum.x), "+f"(sum.y), "+f"(sum.z), "+f"(sum.w)
      : "r"(a));
  y[threadIdx.x] = sum;
}
