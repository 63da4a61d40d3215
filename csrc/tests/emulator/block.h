// What emulator.cpp keeps of the threads of a block and of the blocks of a cluster, and launch.cpp fills in.
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

// `generation` grows when everybody who is still there has arrived.
struct Barrier {
  unsigned arrived = 0;
  unsigned generation = 0;
};

struct Warp {
  Barrier barrier;
  unsigned live = 0;
  uint32_t lanes = 0;           // those that are still there
  uint32_t given[2] = {};       // lanes that gave a word, in this exchange and the one before
  alignas(16) Word words[2][kWarp];
};

// From global to shared memory, on its way.
struct Copy {
  uint32_t target;
  const void* source;
  int bytes;
};

struct Fiber {
  ucontext_t context;
  jmp_buf state;
  bool begun = false;  // at its end it waits for the next block
  bool done = false;
  const unsigned* generation = nullptr;  // what it waits for to change
  unsigned seen = 0;
  unsigned cluster_seen = 0;
  std::deque<std::vector<Copy>> copies = {{}};  // by group; the last is not committed yet
};

// What the blocks of a cluster have in common.
struct Cluster {
  std::mutex mutex;
  std::condition_variable changed;
  unsigned blocks = 1;
  unsigned expected = 0;
  unsigned arrived = 0;
  unsigned generation = 0;
  unsigned phases = 0;  // that barriers in shared memory have completed, of all of them
  bool failed = false;
  std::string what;
  std::vector<char*> anchors;  // of the blocks' thread-local memory
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
  unsigned cluster_generation = 0;  // as this block last saw it
  unsigned cluster_phases = 0;
  bool failed = false;
  char* dynamic = nullptr;
};

extern thread_local char anchor;  // thread-local memory lies at the same distance from it on every thread

// Every thread of a block, to its end.
void run_block(Block& block, dim3 index);

// All numbers below `count`, in the order that was chosen for what has none.
std::vector<size_t> in_order(size_t count);

// Whether the next copy waits until somebody awaits it.
bool puts_off();

std::string text(dim3 d);

}  // namespace emulator
