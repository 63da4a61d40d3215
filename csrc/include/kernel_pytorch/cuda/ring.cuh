// Ring buffer in shared memory that prefetches the vectors of the next rows (cp.async, compute capability 8.0 on). Each
// thread reads only what it has copied itself, so no block barrier is needed.
#pragma once

#include <utility>

#include "kernel_pytorch/cuda/async_copy.cuh"
#include "kernel_pytorch/cuda/vector.cuh"
#include "kernel_pytorch/index.h"

namespace kernel_pytorch {

// Address of one vector of a thread. Its 16-byte words are interleaved with those of other threads, so that a warp's
// copy is contiguous in global and shared memory. `kThreads` is blockDim.x, or 0 if that is known only at run time.
template <int kThreads>
class RingSlot {
 public:
  __device__ __forceinline__ explicit RingSlot(uint32_t first) : first_(first) {}

  __device__ __forceinline__ static uint32_t word_bytes() {
    return (kThreads > 0 ? static_cast<unsigned>(kThreads) : blockDim.x) * 16;
  }

  // Starts the copy of `N` elements from global memory to word `word` and the following ones.
  template <typename T, int N>
  __device__ __forceinline__ void ask(int word, const T* source) const {
#pragma unroll
    for (int i = 0; i < static_cast<int>(N * sizeof(T) / 16); ++i) {
      copy_16_bytes_once(at(word + i), reinterpret_cast<const uint4*>(source) + i);
    }
  }

  template <typename T, int N>
  __device__ __forceinline__ void read(int word, Packed<T, N>& packed) const {
#pragma unroll
    for (int i = 0; i < static_cast<int>(N * sizeof(T) / 16); ++i) packed.words[i] = load_shared_16_bytes(at(word + i));
  }

  template <typename T, int N>
  __device__ __forceinline__ void read(int word, float (&values)[N]) const {
    Packed<T, N> packed;
    read<T, N>(word, packed);
    unpack(packed, values);
  }

  template <typename T, int N>
  __device__ __forceinline__ void write(int word, const Packed<T, N>& packed) const {
#pragma unroll
    for (int i = 0; i < static_cast<int>(N * sizeof(T) / 16); ++i) store_shared_16_bytes(at(word + i), packed.words[i]);
  }

 private:
  // The maximum keeps the sum in a register without changing it. Otherwise the copy instruction adds the uniform part
  // of the address, which ptxas 13.0 compiles to an illegal instruction if the copy has a cache policy.
  __device__ __forceinline__ uint32_t at(int word) const {
    const uint32_t sum = first_ + word * word_bytes();
    return kThreads > 0 || word == 0 ? sum : static_cast<uint32_t>(max(static_cast<int>(sum), 0));
  }

  uint32_t first_;
};

template <int kValue>
struct Index {
  static constexpr int value = kValue;
};

template <typename Function, int... kIndices>
__device__ __forceinline__ void for_each_index(std::integer_sequence<int, kIndices...>, const Function& function) {
  (function(Index<kIndices>{}), ...);
}

// Alignment of a ring in bytes of shared memory: a warp's copy that starts in the middle of a line of banks would take
// two passes.
constexpr int kRingAlignment = 128;

// Number of later rows that are read before the slots of the current row are released: one if the ring holds more than
// two rows. The exchange between their warps then overlaps with the rest of the current row.
template <int kSlots, int kVectors>
constexpr int kRowsAhead = kSlots > 2 * kVectors ? 1 : 0;

// Bytes of shared memory of a block's ring.
constexpr int ring_bytes(int slots, int words, int threads) { return slots * words * threads * 16; }

// `kSlots` slots for rows of `kVectors` vectors per thread: a slot is refilled as soon as it is free.
// `copy(slot, row, v)` starts the copy of vector v of a row.
template <int kVectors, int kSlots, int kWords, int kThreads = 0>
class RowRing {
  static_assert(kSlots >= kVectors);

 public:
  using Slot = RingSlot<kThreads>;

  // For rows `row`, row + step, ... below `rows`. Each of several rows of a block has a separate part of `shared`.
  template <typename Copy>
  __device__ __forceinline__ RowRing(uint4* shared, int row, int step, int rows, const Copy& copy)
      : begin_(shared_address(shared) + threadIdx.y * kSlots * slot_bytes() + threadIdx.x * 16),
        oldest_(begin_),
        row_(row),
        step_(step),
        rows_(rows) {
    uint32_t at = begin_;
    for_each_index(std::make_integer_sequence<int, kSlots>{}, [&](auto i) {
      ask<decltype(i)::value>(at, copy);
      at = after(at);
    });
  }

  // Calls `read(slot, v)` for each vector of the oldest row, or the `kAhead`th after it, when its copy has completed.
  template <int kAhead = 0, typename Read>
  __device__ __forceinline__ void receive(const Read& read) const {
    static_assert(kSlots >= (kAhead + 1) * kVectors);
    uint32_t at = wrapped(oldest_ + kAhead * kVectors * slot_bytes());
    for_each_index(kEach, [&](auto v) {
      await_copies<kSlots - 1 - kAhead * kVectors - decltype(v)::value>();
      read(Slot(at), v.value);
      at = after(at);
    });
  }

  // Calls `read(slot, v)` again for each vector of that row.
  template <int kAhead = 0, typename Read>
  __device__ __forceinline__ void walk(const Read& read) const {
    uint32_t at = wrapped(oldest_ + kAhead * kVectors * slot_bytes());
    for_each_index(kEach, [&](auto v) {
      read(Slot(at), v.value);
      at = after(at);
    });
  }

  // Reads each vector of the oldest row for the last time, and refills its slot.
  template <typename Read, typename Copy>
  __device__ __forceinline__ void leave(const Read& read, const Copy& copy) {
    for_each_index(kEach, [&](auto v) {
      read(Slot(oldest_), v.value);
      ask<kSlots + decltype(v)::value>(oldest_, copy);
      oldest_ = after(oldest_);
    });
    row_ += step_;
  }

 private:
  static constexpr std::make_integer_sequence<int, kVectors> kEach = {};

  __device__ __forceinline__ static uint32_t slot_bytes() { return kWords * Slot::word_bytes(); }
  __device__ __forceinline__ uint32_t end() const { return begin_ + kSlots * slot_bytes(); }
  __device__ __forceinline__ uint32_t after(uint32_t at) const {
    at += slot_bytes();
    return at == end() ? begin_ : at;
  }
  __device__ __forceinline__ uint32_t wrapped(uint32_t at) const { return at < end() ? at : at - kSlots * slot_bytes(); }

  // Starts the copy of the `kVector`th vector, counted from the oldest row.
  template <int kVector, typename Copy>
  __device__ __forceinline__ void ask(uint32_t slot, const Copy& copy) const {
    const int row = row_ + kVector / kVectors * step_;
    if (row < rows_) copy(Slot(slot), row, kVector % kVectors);
    commit_copies();
  }

  uint32_t begin_;
  uint32_t oldest_;  // slot of the first vector of the oldest row
  int row_;          // index of the oldest row
  int step_;
  int rows_;
};

}  // namespace kernel_pytorch
