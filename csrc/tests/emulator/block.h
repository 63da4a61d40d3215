// State of the threads of a block and the blocks of a cluster, managed by emulator.cpp and launch.cpp.
#pragma once

#include <ucontext.h>

#include <condition_variable>
#include <csetjmp>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "emulator.h"

namespace emulator {

constexpr int kWarp = 32;
constexpr unsigned kMostThreads = 1024;
constexpr unsigned kMostSharedBytes = 227 * 1024;

// `generation` is incremented when all threads that have not exited have arrived.
struct Barrier {
  unsigned arrived = 0;
  unsigned generation = 0;
};

struct Warp {
  Barrier barrier;
  unsigned live = 0;
  uint32_t lanes = 0;           // that have not exited
  uint32_t given[2] = {};       // lanes that passed a word, in this and the previous exchange
  alignas(16) Word words[2][kWarp];
};

// A pending copy from global to shared memory.
struct Copy {
  uint32_t target;
  const void* source;
  int bytes;
};

struct Fiber {
  ucontext_t context;
  jmp_buf state;
  bool begun = false;  // when a block ends, its fiber waits for the next block
  bool done = false;
  const unsigned* generation = nullptr;  // counter whose change it waits for
  unsigned seen = 0;
  unsigned cluster_seen = 0;
  std::deque<std::vector<Copy>> copies = {{}};  // by group; the last group is not committed yet
};

// State that the blocks of a cluster share.
struct Cluster {
  std::mutex mutex;
  std::condition_variable changed;
  unsigned blocks = 1;
  unsigned expected = 0;
  unsigned arrived = 0;
  unsigned generation = 0;
  unsigned phases = 0;  // number of phases that all barriers in shared memory have completed
  bool failed = false;
  std::string what;
  std::vector<char*> anchors;  // addresses of `anchor` on the blocks' threads
};

struct Block {
  const Launch* launch;
  const std::function<void()>* kernel;
  Cluster* cluster;
  unsigned rank;
  std::vector<Fiber>& fibers;
  size_t threads = 0;
  std::vector<Warp> warps = {};
  Barrier barrier = {};
  unsigned live = 0;
  size_t running = 0;
  ucontext_t scheduler = {};
  jmp_buf scheduler_state = {};
  unsigned cluster_generation = 0;  // latest value that this block has seen
  unsigned cluster_phases = 0;
  bool failed = false;
  char* dynamic = nullptr;
};

extern thread_local char anchor;  // thread-local variables have the same distance from it on every thread

// Runs all threads of a block to their ends.
void run_block(Block& block, dim3 index);

// All numbers below `count`, in the order that KERNEL_PYTORCH_EMULATED_ORDER selects.
std::vector<size_t> in_order(size_t count);

// Whether the next copy is deferred until a thread awaits it.
bool puts_off();

std::string text(dim3 d);

}  // namespace emulator
