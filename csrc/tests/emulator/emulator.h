// Emulation of CUDA's threads on a CPU: runs kernels compiled by a C++ compiler on machines without a GPU.
//
// Every thread of a block is a fiber, which runs until it waits for others. Blocks run one after another; the blocks of
// a cluster run in parallel, each on an operating-system thread, so `__shared__` is `thread_local`. The environment
// variable KERNEL_PYTORCH_EMULATED_ORDER selects what CUDA leaves unspecified, the order of threads and blocks:
// "forward", "backward", or "random". Kernels whose results depend on it have a race. Undefined behaviour in CUDA is an
// error here: shuffles with exited threads, deadlocks, misaligned addresses, blocks above their launch bounds.
#pragma once

#include <cstdint>
#include <functional>

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

// Indices of the running thread; set before a thread resumes.
extern thread_local dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulator {

struct Launch {
  dim3 grid, block;
  unsigned cluster = 1;  // blocks along x
  unsigned shared_bytes = 0;
};

// Runs a grid; returns 0 or the number of a CUDA error, whose text describes the failure and its thread.
int run(const Launch& launch, const std::function<void()>& kernel);
const char* error_text(int error);
int last_error();  // returns the error of `run` once, then 0

// Compute capability times ten: KERNEL_PYTORCH_EMULATED_CAPABILITY, by default 90; and the most shared memory that a
// block of such a GPU can use.
int capability();
unsigned most_shared_bytes();

// Threads of a kernel call the following functions.

[[noreturn]] void fail(const char* what);
void check_bounds(int threads);

void wait_for_block();
void wait_for_warp();

// Each lane passes a word of up to 16 bytes, and may read the words of all lanes until its next exchange.
using Word = unsigned char[16];
const Word* exchange(const void* word, unsigned size, uint32_t mask);
int lane();

// Copies `bytes` bytes, and zeros up to 16, to shared memory: at once with forward order, when this thread awaits it
// with backward order, either with random order. Groups are PTX's: `await_copies` leaves the last `open` pending.
void copy_later(uint32_t target, const void* source, int bytes);
void commit_copies();
void await_copies(int open);

void* dynamic_shared();

unsigned blocks_of_cluster();
unsigned rank_in_cluster();
void arrive_at_cluster();
void wait_for_cluster();
// Address in another block of the cluster that corresponds to `own` in this one.
void* shared_of(const void* own, unsigned rank);

// Conversion of addresses in shared memory to PTX's 32-bit numbers, and back; and the number in another block of the
// cluster that corresponds to `own` in this one, for static shared memory.
uint32_t number_of(const void* shared);
void* address_of(uint32_t number);
uint32_t number_in(uint32_t own, unsigned rank);

// Barriers in shared memory that await one arrival and count bytes (PTX: mbarrier).
void make_barrier(uint32_t barrier);
void arrive_and_expect(uint32_t barrier, int bytes);
// Writes bytes to shared memory of any block of the cluster, and counts them at the barrier.
void send(uint32_t target, const void* source, int bytes, uint32_t barrier);
void wait_for_phase(uint32_t barrier, unsigned parity);  // until the phase with that parity is complete

template <typename T>
const T* aligned(const T* address, unsigned bytes = sizeof(T)) {
  if (reinterpret_cast<uintptr_t>(address) % bytes != 0) fail("misaligned address");
  return address;
}

}  // namespace emulator
