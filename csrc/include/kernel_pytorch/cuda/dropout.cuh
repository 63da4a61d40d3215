// Dropout on the device: computes the mask of philox.h where it is used.
#pragma once

#include "kernel_pytorch/philox.h"

namespace kernel_pytorch {

// Same as `Dropout`, with a float32 scale, which kernels need not convert.
struct DeviceDropout {
  const int64_t* seed;  // null without dropout
  uint32_t threshold;
  float scale;
};

inline DeviceDropout on_device(const Dropout& dropout) {
  return {dropout.seed, dropout.threshold, static_cast<float>(dropout.scale)};
}

// Parameters of dropout for the elements of one row.
struct DropoutRow {
  uint64_t seed;
  int64_t counter;  // of the first column
  uint32_t threshold;
  float scale;
  bool drops;
};

// A null seed disables dropout.
__device__ __forceinline__ DropoutRow dropout_row(const DeviceDropout& dropout, int64_t row, int64_t columns) {
  if (dropout.seed == nullptr) return {0, 0, 0, 1.0f, false};
  const auto seed = static_cast<uint64_t>(__ldg(reinterpret_cast<const long long*>(dropout.seed)));
  return {seed, dropout_counter(row, 0, columns), dropout.threshold, dropout.scale, true};
}

__device__ __forceinline__ float drop_by(uint32_t word, const DropoutRow& row, float value) {
  return is_kept(word, row.threshold) ? value * row.scale : 0.0f;
}

// Applies dropout to one element, or to a multiple of four elements from a column that is a multiple of four.
template <int N>
__device__ __forceinline__ void drop(const DropoutRow& row, int64_t column, float (&values)[N]) {
  if constexpr (N == 1) {
    const PhiloxWords words = philox(row.seed, static_cast<uint64_t>(row.counter + column / kPhiloxWords));
    const int place = static_cast<int>(column % kPhiloxWords);
    const uint32_t word = place < 2 ? (place == 0 ? words.word[0] : words.word[1]) : (place == 2 ? words.word[2] : words.word[3]);
    values[0] = drop_by(word, row, values[0]);
  } else {
    static_assert(N % kPhiloxWords == 0);
#pragma unroll
    for (int quad = 0; quad < N / kPhiloxWords; ++quad) {
      const PhiloxWords words = philox(row.seed, static_cast<uint64_t>(row.counter + column / kPhiloxWords + quad));
#pragma unroll
      for (int i = 0; i < kPhiloxWords; ++i) {
        values[quad * kPhiloxWords + i] = drop_by(words.word[i], row, values[quad * kPhiloxWords + i]);
      }
    }
  }
}

}  // namespace kernel_pytorch
