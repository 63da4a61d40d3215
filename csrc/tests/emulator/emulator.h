// CUDA's threads on a CPU: kernels compiled by a C++ compiler and run where there is no card.
//
// Every thread of a block is a fiber; one runs until it waits for others. Blocks run one after another, those of a cluster
// side by side, each on a thread of the operating system, so that `__shared__` is `thread_local`. What CUDA leaves open,
// the order of threads and blocks, KERNEL_PYTORCH_EMULATED_ORDER chooses: "forward", "backward", or "random". Kernels
// whose results depend on it have a race. What CUDA forbids is an error here: a shuffle with a thread that has left,
// threads that wait for each other, addresses that are not aligned, blocks above their launch bounds.
#pragma once

#include <cstdint>
#include <functional>

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

// Where a thread is; set before it goes on.
extern thread_local dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulator {

struct Launch {
  dim3 grid, block;
  unsigned cluster = 1;  // blocks along x
  unsigned shared_bytes = 0;
};

// Run a grid: 0, or the number of CUDA's error. Its text says what went wrong in which thread.
int run(const Launch& launch, const std::function<void()>& kernel);
const char* error_text(int error);
int last_error();  // of `run`, once

// Compute capability times ten: KERNEL_PYTORCH_EMULATED_CAPABILITY, 90 if it is not set. And the shared memory that a block
// of such a card may ask for.
int capability();
unsigned most_shared_bytes();

// What follows is called by threads of a kernel.

[[noreturn]] void fail(const char* what);
void check_bounds(int threads);

void wait_for_block();
void wait_for_warp();

// Every lane gives a word of up to 16 bytes and may then look at those of all lanes; until its next exchange.
using Word = unsigned char[16];
const Word* exchange(const void* word, unsigned size, uint32_t mask);
int lane();

// A copy of `bytes` bytes and of zeros up to 16, to shared memory: made at once, or only when this thread awaits it, as the
// order of threads is forward or backward, or at random. The groups of PTX: `await_copies` leaves the `open` last ones.
void copy_later(uint32_t target, const void* source, int bytes);
void commit_copies();
void await_copies(int open);

void* dynamic_shared();

unsigned blocks_of_cluster();
unsigned rank_in_cluster();
void arrive_at_cluster();
void wait_for_cluster();
// The address that is to another block of the cluster what `own` is to this one.
void* shared_of(const void* own, unsigned rank);

// Shared memory as the 32-bit numbers that PTX knows it by, and back; and the number that is to another block of the cluster
// what `own` is to this one, of what is not dynamic.
uint32_t number_of(const void* shared);
void* address_of(uint32_t number);
uint32_t number_in(uint32_t own, unsigned rank);

// Barriers in shared memory that count bytes beside arrivals, of which they await one (PTX: mbarrier).
void make_barrier(uint32_t barrier);
void arrive_and_expect(uint32_t barrier, int bytes);
// Bytes for shared memory of any block of the cluster, which count at the barrier.
void send(uint32_t target, const void* source, int bytes, uint32_t barrier);
void wait_for_phase(uint32_t barrier, unsigned parity);  // until the phase of that parity is complete

template <typename T>
const T* aligned(const T* address, unsigned bytes = sizeof(T)) {
  if (reinterpret_cast<uintptr_t>(address) % bytes != 0) fail("misaligned address");
  return address;
}

}  // namespace emulator
