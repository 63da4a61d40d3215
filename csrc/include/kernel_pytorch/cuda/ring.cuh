// Vectors of rows on their way from global to shared memory, those of the next rows among them (cp.async, compute capability
// 8.0 on). A thread reads what it has asked for itself, so that no barrier stands between.
#pragma once

#include <utility>

#include "kernel_pytorch/cuda/async_copy.cuh"
#include "kernel_pytorch/cuda/vector.cuh"
#include "kernel_pytorch/index.h"

namespace kernel_pytorch {

// Where a thread's part of one vector lies: words of 16 bytes, neighbours of other threads between them.
class RingSlot {
 public:
  __device__ __forceinline__ explicit RingSlot(uint4* first) : first_(first) {}

  // `N` elements from global memory, to word `word` and those after it.
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
    for (int i = 0; i < static_cast<int>(N * sizeof(T) / 16); ++i) packed.words[i] = *at(word + i);
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
    for (int i = 0; i < static_cast<int>(N * sizeof(T) / 16); ++i) *at(word + i) = packed.words[i];
  }

 private:
  __device__ __forceinline__ uint4* at(int word) const { return first_ + word * blockDim.x; }

  uint4* first_;
};

template <int kValue>
struct Index {
  static constexpr int value = kValue;
};

template <typename Function, int... kIndices>
__device__ __forceinline__ void for_each_index(std::integer_sequence<int, kIndices...>, const Function& function) {
  (function(Index<kIndices>{}), ...);
}

// Rows whose vectors are looked at before those of the one that is finished are left: one, where there is room for more than
// two. What its threads have to tell each other is on its way meanwhile.
template <int kSlots, int kVectors>
constexpr int kRowsAhead = kSlots > 2 * kVectors ? 1 : 0;

// Bytes of shared memory that a block's ring has.
constexpr int ring_bytes(int slots, int words, int threads) { return slots * words * threads * 16; }

// `kSlots` vectors, of `kVectors` that a thread has of each of its rows: a slot is asked for anew as soon as it is free.
// `copy(slot, offset, v)` asks for vector v of a row, whose first element is at `offset`.
template <int kVectors, int kSlots, int kWords>
class RowRing {
  static_assert(kSlots >= kVectors);

 public:
  // For rows `row`, row + step, ... below `rows`. Where a block has several rows at a time, each has its part of `shared`.
  template <typename Copy>
  __device__ __forceinline__ RowRing(uint4* shared, int64_t row, int64_t step, int64_t rows, int columns, const Copy& copy)
      : own_(shared + threadIdx.y * kSlots * kWords * blockDim.x + threadIdx.x),
        rows_(row < rows ? static_cast<int>(quotient(rows - row + step - 1, step)) : 0),
        offset_(row_offset(row, columns)),
        offset_step_(row_offset(step, columns)) {
#pragma unroll
    for (int i = 0; i < kSlots; ++i) ask(copy);
  }

  // `read(slot, v)` for every vector of the oldest row, or of the `kAhead`th after it, as they come in.
  template <int kAhead = 0, typename Read>
  __device__ __forceinline__ void receive(const Read& read) const {
    static_assert(kSlots >= (kAhead + 1) * kVectors);
    int at = first_of(kAhead);
    for_each_index(kEach, [&](auto v) {
      await_copies<kSlots - 1 - kAhead * kVectors - decltype(v)::value>();
      read(slot(at), v.value);
      at = after(at);
    });
  }

  // Every vector of the oldest row again.
  template <typename Read>
  __device__ __forceinline__ void walk(const Read& read) const {
    int at = first_of(0);
    for_each_index(kEach, [&](auto v) {
      read(slot(at), v.value);
      at = after(at);
    });
  }

  // For the last time.
  template <typename Read, typename Copy>
  __device__ __forceinline__ void leave(const Read& read, const Copy& copy) {
    for_each_index(kEach, [&](auto v) {
      read(slot(oldest_), v.value);
      oldest_ = after(oldest_);
      ask(copy);
    });
  }

 private:
  static constexpr std::make_integer_sequence<int, kVectors> kEach = {};

  __device__ __forceinline__ static int after(int slot) { return slot + 1 == kSlots ? 0 : slot + 1; }
  // Slot of the first vector of the row that is so many after the oldest.
  __device__ __forceinline__ int first_of(int ahead) const {
    const int at = oldest_ + ahead * kVectors;
    return at >= kSlots ? at - kSlots : at;
  }
  __device__ __forceinline__ RingSlot slot(int index) const { return RingSlot(own_ + index * kWords * blockDim.x); }

  template <typename Copy>
  __device__ __forceinline__ void ask(const Copy& copy) {
    if (rows_ > 0) copy(slot(next_), offset_, vector_);
    commit_copies();
    next_ = after(next_);
    if (++vector_ < kVectors) return;
    vector_ = 0;
    --rows_;
    offset_ += offset_step_;
  }

  uint4* own_;
  int rows_;        // to be asked for still
  int64_t offset_;  // of the next one
  int64_t offset_step_;
  int vector_ = 0;  // of it, and
  int next_ = 0;    // where to
  int oldest_ = 0;  // slot of the first vector of the oldest row
};

}  // namespace kernel_pytorch
