// One product on tensor cores: A (16 x 16) times B (16 x 8), copied asynchronously to shared memory.
#include <cstdio>

__device__ void load_matrix(unsigned (&words)[4], const __nv_bfloat16* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(row))));
}

__device__ void load_matrix_transposed(unsigned (&words)[4], const __nv_bfloat16* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(row))));
}

__global__ void multiply(const __nv_bfloat16* a, const __nv_bfloat16* b, float* c) {
  extern __shared__ __align__(16) __nv_bfloat16 shared[];
  const int lane = threadIdx.x;
  const auto target = [&](int i) { return static_cast<uint32_t>(__cvta_generic_to_shared(shared + i)); };
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target(8 * lane)), "l"(a + 8 * lane), "r"(16));
  if (lane < 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target(256 + 8 * lane)), "l"(b + 8 * lane), "r"(16));
  }
  asm volatile("cp.async.commit_group;");
  asm volatile("cp.async.wait_group %0;" ::"n"(0));
  __syncthreads();
  unsigned left[4], right[4];
  load_matrix(left, shared + lane % 16 * 16 + lane / 16 * 8);
  load_matrix_transposed(right, shared + 256 + lane % 16 * 8);
  float sum[4] = {};
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right[0]), "r"(right[1]));
  for (int i = 0; i < 4; ++i) c[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = sum[i];
}

int main() {
  alignas(16) static __nv_bfloat16 a[256], b[128];
  static float c[128];
  for (int i = 0; i < 256; ++i) a[i] = __float2bfloat16_rn(static_cast<float>(i % 23 - 11));
  for (int i = 0; i < 128; ++i) b[i] = __float2bfloat16_rn(static_cast<float>(i % 19 - 9));
  multiply<<<1, 32, 384 * sizeof(__nv_bfloat16)>>>(a, b, c);
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) return std::printf("%s\n", cudaGetErrorString(error)), 1;
  for (int row = 0; row < 16; ++row) {
    for (int column = 0; column < 8; ++column) {
      float sum = 0.0f;
      for (int k = 0; k < 16; ++k) sum += __bfloat162float(a[16 * row + k]) * __bfloat162float(b[8 * k + column]);
      if (c[8 * row + column] != sum) return std::printf("wrong: element %d, %d is %g\n", row, column, c[8 * row + column]), 1;
    }
  }
}
