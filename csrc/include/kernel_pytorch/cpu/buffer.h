// Scratch memory of the CPU code. A failed allocation raises an exception with the number of bytes.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kernel_pytorch {

// Raises the error of PyTorch's CPU allocator. Not inline: files that include this are compiled for several instruction
// sets, and the linker would keep one of the copies for all processors.
[[noreturn]] void fail_to_allocate(int64_t bytes);

namespace {

// Buffer of `size` uninitialized elements; allocates nothing for size 0.
template <typename T>
class Buffer {
 public:
  explicit Buffer(int64_t size) {
    if (size <= 0) return;
    int64_t bytes = 0;
    if (__builtin_mul_overflow(size, static_cast<int64_t>(sizeof(T)), &bytes)) bytes = INT64_MAX;
    data_ = static_cast<T*>(__builtin_malloc(static_cast<size_t>(bytes)));
    if (data_ == nullptr) fail_to_allocate(bytes);
  }
  ~Buffer() { __builtin_free(data_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  T* data() const { return data_; }

 private:
  T* data_ = nullptr;
};

}  // namespace
}  // namespace kernel_pytorch
