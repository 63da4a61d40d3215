// RMSNorm without a weight in three versions: the kernels of the tutorial docs/guide/tutorial-cuda.md.
#include <cmath>
#include <cstdint>
#include <cstdio>

constexpr int kThreads = 128;
constexpr float kEps = 1e-6f;

// --8<-- [start:naive]
__global__ void forward_naive(const float* x, float* y, float* rstd, int rows, int columns) {
  const int row = blockIdx.x * blockDim.x + threadIdx.x;
  if (row >= rows) return;
  const int64_t offset = static_cast<int64_t>(row) * columns;
  float sum = 0.0f;
  for (int column = 0; column < columns; ++column) sum += x[offset + column] * x[offset + column];
  rstd[row] = rsqrtf(sum / columns + kEps);
  for (int column = 0; column < columns; ++column) y[offset + column] = x[offset + column] * rstd[row];
}
// --8<-- [end:naive]

// --8<-- [start:reduce]
__device__ float reduce_block(float value, float* scratch) {
  for (int mask = 16; mask > 0; mask /= 2) value += __shfl_xor_sync(0xffffffffu, value, mask);
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = value;  // one number per warp
  __syncthreads();
  value = 0.0f;
  for (int warp = 0; warp < blockDim.x / 32; ++warp) value += scratch[warp];
  return value;
}
// --8<-- [end:reduce]

// --8<-- [start:block]
__global__ void __launch_bounds__(kThreads) forward_block(const float* x, float* y, float* rstd, int columns) {
  __shared__ float scratch[kThreads / 32];
  const int64_t row = blockIdx.x, offset = row * columns;
  float sum = 0.0f;
  for (int column = threadIdx.x; column < columns; column += kThreads) {
    sum += x[offset + column] * x[offset + column];
  }
  const float scale = rsqrtf(reduce_block(sum, scratch) / columns + kEps);
  if (threadIdx.x == 0) rstd[row] = scale;
  for (int column = threadIdx.x; column < columns; column += kThreads) {
    y[offset + column] = x[offset + column] * scale;
  }
}
// --8<-- [end:block]

// --8<-- [start:vector]
template <int kVectors>  // 16-byte vectors per thread
__global__ void __launch_bounds__(kThreads) forward_vector(const float* x, float* y, float* rstd, int columns) {
  __shared__ float scratch[kThreads / 32];
  const int64_t row = blockIdx.x, offset = row * columns;
  float4 values[kVectors];
  float sum = 0.0f;
#pragma unroll  // makes indices constant, so that `values` stays in registers
  for (int v = 0; v < kVectors; ++v) {
    const int column = 4 * (v * kThreads + threadIdx.x);
    values[v] = float4{0.0f, 0.0f, 0.0f, 0.0f};
    if (column < columns) values[v] = __ldg(reinterpret_cast<const float4*>(x + offset + column));
    const float4 h = values[v];
    sum += h.x * h.x + h.y * h.y + h.z * h.z + h.w * h.w;
  }
  const float scale = rsqrtf(reduce_block(sum, scratch) / columns + kEps);
  if (threadIdx.x == 0) rstd[row] = scale;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int column = 4 * (v * kThreads + threadIdx.x);
    const float4 h = values[v];
    const float4 scaled = {h.x * scale, h.y * scale, h.z * scale, h.w * scale};
    if (column < columns) *reinterpret_cast<float4*>(y + offset + column) = scaled;
  }
}
// --8<-- [end:vector]

// Checks the results of a kernel against float64, then overwrites them with NaN for the next kernel.
static bool is_right(const char* name, const float* x, float* y, float* rstd, int rows, int columns) {
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) return std::printf("%s: %s\n", name, cudaGetErrorString(error)), false;
  for (int row = 0; row < rows; ++row) {
    double sum = 0.0;
    for (int i = 0; i < columns; ++i) sum += static_cast<double>(x[row * columns + i]) * x[row * columns + i];
    const double expected = 1.0 / std::sqrt(sum / columns + kEps);
    if (!(std::fabs(rstd[row] / expected - 1.0) < 1e-5)) return std::printf("wrong: %s, rstd of row %d\n", name, row), false;
    for (int i = 0; i < columns; ++i) {
      const double off = y[row * columns + i] - x[row * columns + i] * expected;
      if (!(std::fabs(off) < 1e-5)) return std::printf("wrong: %s, row %d, column %d\n", name, row, i), false;
      y[row * columns + i] = NAN;
    }
    rstd[row] = NAN;
  }
  if (y[rows * columns] != -1.0f) return std::printf("wrong: %s wrote behind its last row\n", name), false;
  return true;
}

int main() {
  constexpr int kRows = 3, kMost = 1028;
  alignas(16) static float x[kRows * kMost + 1], y[kRows * kMost + 1];
  static float rstd[kRows];
  for (int i = 0; i < kRows * kMost + 1; ++i) x[i] = static_cast<float>(i * 37 % 101 - 50) / 16.0f;
  for (const int columns : {1, 5, 127, 128, 129, 4, 512, kMost}) {
    y[kRows * columns] = -1.0f;
    forward_naive<<<1, kThreads>>>(x, y, rstd, kRows, columns);
    if (!is_right("naive", x, y, rstd, kRows, columns)) return 1;
    forward_block<<<kRows, kThreads>>>(x, y, rstd, columns);
    if (!is_right("block", x, y, rstd, kRows, columns)) return 1;
    if (columns % 4 != 0) continue;  // rows consist of whole vectors
    forward_vector<3><<<kRows, kThreads>>>(x, y, rstd, columns);
    if (!is_right("vector", x, y, rstd, kRows, columns)) return 1;
  }
}
