// What the planted kernels share.
#pragma once

constexpr int THREADS = 256;

template <typename T, int N>
struct alignas(sizeof(T) * N) Pack {
  T values[N];
};
