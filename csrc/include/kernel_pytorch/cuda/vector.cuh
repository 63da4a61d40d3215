// Loads, stores and conversions of elements, 16 bytes at a time.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

namespace kernel_pytorch {

__device__ __forceinline__ float widen(float value) { return value; }
__device__ __forceinline__ float widen(__half value) { return __half2float(value); }
__device__ __forceinline__ float widen(__nv_bfloat16 value) { return __bfloat162float(value); }

template <typename T>
__device__ __forceinline__ T narrow(float value);
template <>
__device__ __forceinline__ float narrow<float>(float value) {
  return value;
}
template <>
__device__ __forceinline__ __half narrow<__half>(float value) {
  return __float2half_rn(value);
}
template <>
__device__ __forceinline__ __nv_bfloat16 narrow<__nv_bfloat16>(float value) {
  return __float2bfloat16_rn(value);
}

// Number of elements in 16 bytes.
template <typename T>
constexpr int kVectorLength = 16 / sizeof(T);

// Converts two elements at a time, in one instruction for 16-bit dtypes.
__device__ __forceinline__ void narrow_pair(float a, float b, float (&pair)[2]) {
  pair[0] = a;
  pair[1] = b;
}
__device__ __forceinline__ void narrow_pair(float a, float b, __half (&pair)[2]) {
  const __half2 both = __floats2half2_rn(a, b);
  memcpy(pair, &both, sizeof both);
}
__device__ __forceinline__ void narrow_pair(float a, float b, __nv_bfloat16 (&pair)[2]) {
  const __nv_bfloat162 both = __floats2bfloat162_rn(a, b);
  memcpy(pair, &both, sizeof both);
}

template <typename T, int N>
__device__ __forceinline__ void narrow_all(const float (&values)[N], T (&elements)[N]) {
  if constexpr (N % 2 == 0) {
#pragma unroll
    for (int i = 0; i < N; i += 2) {
      T pair[2];
      narrow_pair(values[i], values[i + 1], pair);
      elements[i] = pair[0];
      elements[i + 1] = pair[1];
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) elements[i] = narrow<T>(values[i]);
  }
}

// `N` elements as stored in memory: 16-bit elements take half the registers of floats.
template <typename T, int N>
struct Packed {
  static_assert(N * sizeof(T) % 16 == 0);
  uint4 words[N * sizeof(T) / 16];
};

// Cache policy for data that is read once: evict it last from L2. On an H200 a copy is 4 % faster with this policy than
// with evict-first, and kernels of norms up to 10 %. NVIDIA does not document why.
__device__ __forceinline__ uint64_t once_policy() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  return 0x14f0000000000000;  // result of createpolicy on Hopper and later; a constant keeps loads free of branches
#else
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
#endif
}

// volatile keeps the order of the program: the compiler would move prefetches down to their uses.
__device__ __forceinline__ uint4 load_16_bytes_once(const void* source) {
  uint4 words;
  asm volatile("ld.global.L1::evict_last.L2::cache_hint.v4.b32 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "l"(__cvta_generic_to_global(source)), "l"(once_policy()));
  return words;
}

// Loads from a 16-byte aligned address, for data that is read once.
template <typename T, int N>
__device__ __forceinline__ void load_packed(const T* source, Packed<T, N>& packed) {
#pragma unroll
  for (int i = 0; i < static_cast<int>(N * sizeof(T) / 16); ++i) {
    packed.words[i] = load_16_bytes_once(reinterpret_cast<const uint4*>(source) + i);
  }
}

// Same for data that other threads read too.
template <typename T, int N>
__device__ __forceinline__ void load_kept(const T* source, Packed<T, N>& packed) {
#pragma unroll
  for (int i = 0; i < static_cast<int>(N * sizeof(T) / 16); ++i) {
    packed.words[i] = __ldg(reinterpret_cast<const uint4*>(source) + i);
  }
}

template <typename T, int N>
__device__ __forceinline__ void unpack(const Packed<T, N>& packed, float (&values)[N]) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {  // the upper half of a float: one instruction each
    unsigned words[N / 2];
    memcpy(words, packed.words, sizeof words);
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      values[2 * i] = __uint_as_float(words[i] << 16);
      values[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    }
  } else {
    T elements[N];
    memcpy(elements, packed.words, sizeof elements);
#pragma unroll
    for (int i = 0; i < N; ++i) values[i] = widen(elements[i]);
  }
}

// Elements between load and use: all `N` or none are loaded. They stay as in memory if they fill 16 bytes.
template <typename T, int N>
struct Incoming {
  Packed<T, N> packed;
  __device__ __forceinline__ void load(const T* source) { load_packed(source, packed); }
  __device__ __forceinline__ void read(float (&values)[N]) const { unpack(packed, values); }
};
template <typename T>
struct Incoming<T, 1> {
  T element;
  __device__ __forceinline__ void load(const T* source) { element = *source; }
  __device__ __forceinline__ void read(float (&values)[1]) const { values[0] = widen(element); }
};

// Makes the compiler unpack again: otherwise it keeps the floats of the first unpacking, in twice the registers.
template <typename T, int N, int kVectors>
__device__ __forceinline__ void forget_unpacked(Packed<T, N> (&packed)[kVectors]) {
  if constexpr (sizeof(T) == 2) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
      for (uint4& words : packed[v].words) asm volatile("" : "+r"(words.x), "+r"(words.y), "+r"(words.z), "+r"(words.w));
    }
  }
}

// Returns the same address, but keeps the compiler from moving loads up, where their registers are still in use.
template <typename T>
__device__ __forceinline__ const T* read_now(const T* address) {
  asm volatile("" : "+l"(address));
  return address;
}

template <typename T, int N>
__device__ __forceinline__ void pack(const float (&values)[N], Packed<T, N>& packed) {
  T elements[N];
  narrow_all(values, elements);
  memcpy(packed.words, elements, sizeof elements);
}

// Loads `N` elements from an address aligned to their size, in 16-byte accesses (or in one access, if fewer bytes).
template <typename T, int N>
__device__ __forceinline__ void load_vector(const T* source, float (&values)[N]) {
  constexpr int kBytes = N * sizeof(T);
  if constexpr (kBytes >= 16) {
    Packed<T, N> packed;
    load_kept(source, packed);
    unpack(packed, values);
  } else {
    static_assert(kBytes == 8);
    const uint2 words = __ldg(reinterpret_cast<const uint2*>(source));
    T elements[N];
    memcpy(elements, &words, kBytes);
#pragma unroll
    for (int i = 0; i < N; ++i) values[i] = widen(elements[i]);
  }
}

// Stores 16 bytes to global memory in one instruction; the compiler would split some stores. Data written once is
// evicted from the caches first.
__device__ __forceinline__ void store_16_bytes(void* target, uint4 words) {
  asm volatile("st.global.cs.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(target)), "r"(words.x),
               "r"(words.y), "r"(words.z), "r"(words.w)
               : "memory");
}

template <typename T, int N>
__device__ __forceinline__ void store_packed(T* target, const Packed<T, N>& packed) {
#pragma unroll
  for (int i = 0; i < static_cast<int>(N * sizeof(T) / 16); ++i) {
    store_16_bytes(reinterpret_cast<uint4*>(target) + i, packed.words[i]);
  }
}

// Stores `N` elements to an address in global memory that is aligned to their size.
template <typename T, int N>
__device__ __forceinline__ void store_vector(T* target, const float (&values)[N]) {
  if constexpr (N * sizeof(T) >= 16) {
    Packed<T, N> packed;
    pack(values, packed);
    store_packed(target, packed);
  } else {
    static_assert(N * sizeof(T) == 8);
    T elements[N];
    narrow_all(values, elements);
    uint2 words;
    memcpy(&words, elements, sizeof words);
    *reinterpret_cast<uint2*>(target) = words;
  }
}

// Loads the first `count` of `N` elements and sets the others to zero; `store_elements` writes only the first `count`.
// A complete vector must be aligned.
template <typename T, int N>
__device__ __forceinline__ void load_elements(const T* source, int count, float (&values)[N]) {
  if constexpr (N * sizeof(T) >= 8) {
    if (count >= N) return load_vector<T, N>(source, values);
  }
#pragma unroll
  for (int i = 0; i < N; ++i) values[i] = i < count ? widen(source[i]) : 0.0f;
}

// Same for several addresses: starts all loads before the first result is used.
template <typename T, int N, int kSources, typename... Values>
__device__ __forceinline__ void load_all(int count, const T* const (&sources)[kSources], Values&... values) {
  static_assert(sizeof...(Values) == kSources);
  int source = 0;
  if constexpr (N * sizeof(T) >= 16) {
    if (count >= N) {
      Packed<T, N> packed[kSources];
#pragma unroll
      for (int i = 0; i < kSources; ++i) load_packed(sources[i], packed[i]);
      (unpack(packed[source++], values), ...);
      return;
    }
  }
  (load_elements<T, N>(sources[source++], count, values), ...);
}

template <typename T, int N>
__device__ __forceinline__ void store_elements(T* target, int count, const float (&values)[N]) {
  if constexpr (N * sizeof(T) >= 8) {
    if (count >= N) return store_vector<T, N>(target, values);
  }
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if (i < count) target[i] = narrow<T>(values[i]);
  }
}

}  // namespace kernel_pytorch
