#include "emulator.h"

#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <csetjmp>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

thread_local dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulator {

namespace {

constexpr int kWarp = 32;
constexpr unsigned kMostThreads = 1024;
constexpr size_t kStackBytes = 128 * 1024;
constexpr unsigned kMostSharedBytes = 227 * 1024;
constexpr uint32_t kSharedNumber = 1024;  // of the first byte of shared memory
constexpr auto kPatience = std::chrono::seconds(60);

constexpr int kInvalidConfiguration = 9, kLaunchFailure = 719;

// AddressSanitizer follows swapcontext, which costs a system call, and no long jumps.
#if defined(__SANITIZE_ADDRESS__)
constexpr bool kJumps = false;
#else
constexpr bool kJumps = true;
#endif

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

struct Fiber {
  ucontext_t context;
  jmp_buf state;
  bool begun = false;  // at its end it waits for the next block
  bool done = false;
  const unsigned* generation = nullptr;  // what it waits for to change
  unsigned seen = 0;
  unsigned cluster_seen = 0;
};

// What the blocks of a cluster have in common.
struct Cluster {
  std::mutex mutex;
  std::condition_variable changed;
  unsigned blocks = 1;
  unsigned expected = 0;
  unsigned arrived = 0;
  unsigned generation = 0;
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
  bool failed = false;
  char* dynamic = nullptr;
};

thread_local Block* current = nullptr;
thread_local char anchor = 0;
thread_local std::string error;
thread_local int code = 0;

// Stacks and shared memory of an operating-system thread, kept for its next block.
class Memory {
 public:
  explicit Memory(size_t bytes) : bytes_(bytes) {
    address_ = static_cast<char*>(
        mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (address_ == MAP_FAILED) throw std::bad_alloc();
  }
  ~Memory() { munmap(address_, bytes_); }
  Memory(const Memory&) = delete;
  char* get() const { return address_; }

 private:
  size_t bytes_;
  char* address_;
};

Fiber& running() { return current->fibers[current->running]; }

Warp& own_warp() { return current->warps[current->running / kWarp]; }

void to_scheduler() {
  if constexpr (kJumps) {
    if (_setjmp(running().state) == 0) _longjmp(current->scheduler_state, 1);
  } else {
    swapcontext(&running().context, &current->scheduler);
  }
}

void wait_until_changed(const unsigned& generation, unsigned seen) {
  while (generation == seen) {
    running().generation = &generation;
    running().seen = seen;
    to_scheduler();
  }
}

void release_if_complete(Barrier& barrier, unsigned live) {
  if (barrier.arrived == 0 || barrier.arrived < live) return;
  barrier.arrived = 0;
  ++barrier.generation;
}

void wait_at(Barrier& barrier, unsigned live) {
  const unsigned seen = barrier.generation;
  ++barrier.arrived;
  release_if_complete(barrier, live);
  wait_until_changed(barrier.generation, seen);
}

void leave_cluster() {
  Cluster& cluster = *current->cluster;
  if (cluster.blocks == 1) return;
  const std::lock_guard<std::mutex> lock(cluster.mutex);
  --cluster.expected;
  if (cluster.arrived == 0 || cluster.arrived < cluster.expected) return;
  cluster.arrived = 0;
  ++cluster.generation;
  cluster.changed.notify_all();
}

// A thread that has left is waited for no longer.
void leave() {
  leave_cluster();
  Warp& warp = own_warp();
  warp.lanes &= ~(1u << lane());
  release_if_complete(warp.barrier, --warp.live);
  release_if_complete(current->barrier, --current->live);
  running().done = true;
}

void begin() {
  for (;;) {
    (*current->kernel)();
    leave();
    to_scheduler();
  }
}

void start(Block& block, Fiber& fiber, char* stack) {
  fiber.begun = true;
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = stack;
  fiber.context.uc_stack.ss_size = kStackBytes;
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, begin, 0);
  swapcontext(&block.scheduler, &fiber.context);
}

void resume(Block& block, size_t index, char* stacks) {
  Fiber& fiber = block.fibers[index];
  block.running = index;
  const dim3 size = block.launch->block;
  const auto number = static_cast<unsigned>(index);
  threadIdx = {number % size.x, number / size.x % size.y, number / (size.x * size.y)};
  if constexpr (kJumps) {
    if (_setjmp(block.scheduler_state) == 0) {
      if (fiber.begun) _longjmp(fiber.state, 1);
      start(block, fiber, stacks + index * kStackBytes);
    }
  } else if (fiber.begun) {
    swapcontext(&block.scheduler, &fiber.context);
  } else {
    start(block, fiber, stacks + index * kStackBytes);
  }
}

void fail_all(Block& block, const std::string& what) {
  block.failed = true;
  const std::lock_guard<std::mutex> lock(block.cluster->mutex);
  if (!block.cluster->failed) block.cluster->what = what;
  block.cluster->failed = true;
  block.cluster->changed.notify_all();
}

// Nobody of the block can go on by itself: whether the other blocks of its cluster let it.
bool wait_for_other_blocks(Block& block) {
  Cluster& cluster = *block.cluster;
  const auto end = block.fibers.begin() + static_cast<std::ptrdiff_t>(block.threads);
  const bool some = std::any_of(block.fibers.begin(), end, [&](const Fiber& fiber) {
    return !fiber.done && fiber.generation == &block.cluster_generation;
  });
  if (!some) return false;
  std::unique_lock<std::mutex> lock(cluster.mutex);
  cluster.changed.wait_for(lock, kPatience,
                           [&] { return cluster.failed || cluster.generation != block.cluster_generation; });
  if (cluster.failed) block.failed = true;
  const bool moved = cluster.failed || cluster.generation != block.cluster_generation;
  block.cluster_generation = cluster.generation;
  return moved;
}

enum class Order { kForward, kBackward, kRandom };

Order chosen_order() {
  const char* name = std::getenv("KERNEL_PYTORCH_EMULATED_ORDER");
  if (name == nullptr || std::strcmp(name, "forward") == 0) return Order::kForward;
  return std::strcmp(name, "backward") == 0 ? Order::kBackward : Order::kRandom;
}

std::vector<size_t> in_order(size_t count) {
  static thread_local std::minstd_rand random;
  const Order order = chosen_order();
  std::vector<size_t> indices(count);
  for (size_t i = 0; i < count; ++i) indices[i] = order == Order::kBackward ? count - 1 - i : i;
  if (order == Order::kRandom) std::shuffle(indices.begin(), indices.end(), random);
  return indices;
}

// Every thread of a block, to its end.
void run_block(Block& block, dim3 index) {
  thread_local const Memory stacks(kMostThreads * kStackBytes);
  thread_local const Memory dynamic(kMostSharedBytes);
  const dim3 size = block.launch->block;
  const size_t threads = block.threads = size_t{size.x} * size.y * size.z;
  for (size_t i = 0; i < threads; ++i) {
    Fiber& fiber = block.fibers[i];
    fiber.done = false;
    fiber.generation = nullptr;
  }
  block.warps = std::vector<Warp>((threads + kWarp - 1) / kWarp);
  for (size_t i = 0; i < threads; ++i) {
    ++block.warps[i / kWarp].live;
    block.warps[i / kWarp].lanes |= 1u << i % kWarp;
  }
  block.live = static_cast<unsigned>(threads);
  block.dynamic = dynamic.get();
  std::memset(block.dynamic, 0xff, block.launch->shared_bytes);  // NaNs: nothing may be read that was not written
  current = &block;
  blockIdx = index;
  blockDim = size;
  gridDim = block.launch->grid;
  const std::vector<size_t> order = in_order(threads);
  while (block.live > 0 && !block.failed) {
    bool moved = false;
    for (const size_t i : order) {
      Fiber& fiber = block.fibers[i];
      if (fiber.done || (fiber.generation != nullptr && *fiber.generation == fiber.seen)) continue;
      fiber.generation = nullptr;
      moved = true;
      resume(block, i, stacks.get());
      if (block.failed) break;
    }
    if (!moved && !wait_for_other_blocks(block)) fail_all(block, "its threads wait for each other for ever");
  }
  if (block.failed) {
    for (Fiber& fiber : block.fibers) fiber.begun = false;  // what is in the middle of a kernel is given up
  }
  current = nullptr;
}

void run_cluster(const Launch& launch, const std::function<void()>& kernel, dim3 first, Cluster& cluster) {
  cluster.blocks = launch.cluster;
  cluster.expected = launch.cluster * launch.block.x * launch.block.y * launch.block.z;
  cluster.anchors.assign(launch.cluster, nullptr);
  const auto run_one = [&](unsigned rank) {
    static thread_local std::vector<Fiber> fibers(kMostThreads);
    Block block{&launch, &kernel, &cluster, rank, fibers};
    run_block(block, {first.x + rank, first.y, first.z});
  };
  if (launch.cluster == 1) {
    run_one(0);
    return;
  }
  // A block ends when all have begun, and its memory is there until all have ended.
  unsigned begun = 0, ended = 0;
  const auto meet = [&](unsigned& count) {
    std::unique_lock<std::mutex> lock(cluster.mutex);
    ++count;
    cluster.changed.notify_all();
    cluster.changed.wait(lock, [&] { return count == launch.cluster; });
  };
  std::vector<std::thread> threads;
  for (unsigned rank = 0; rank < launch.cluster; ++rank) {
    threads.emplace_back([&, rank] {
      cluster.anchors[rank] = &anchor;
      meet(begun);
      run_one(rank);
      meet(ended);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

int failed(int number, const std::string& what) {
  error = what;
  return code = number;
}

std::string text(dim3 d) {
  return "(" + std::to_string(d.x) + ", " + std::to_string(d.y) + ", " + std::to_string(d.z) + ")";
}

}  // namespace

int run(const Launch& launch, const std::function<void()>& kernel) {
  const dim3 grid = launch.grid, block = launch.block;
  const uint64_t threads = uint64_t{block.x} * block.y * block.z;
  if (threads == 0 || threads > kMostThreads || block.z > 64) return failed(kInvalidConfiguration, "a block of " + text(block));
  const bool fits = grid.x > 0 && grid.y > 0 && grid.z > 0 && grid.x < 1u << 31 && grid.y < 65536 && grid.z < 65536;
  if (!fits) return failed(kInvalidConfiguration, "a grid of " + text(grid));
  if (launch.cluster > 16 || grid.x % launch.cluster) return failed(kInvalidConfiguration, "a cluster that the grid is no multiple of");
  if (launch.shared_bytes > kMostSharedBytes) return failed(kInvalidConfiguration, "too much shared memory");
  const size_t clusters = size_t{grid.x} / launch.cluster * grid.y * grid.z;
  const unsigned across = grid.x / launch.cluster;
  for (const size_t i : in_order(clusters)) {
    const auto number = static_cast<unsigned>(i);
    Cluster cluster;
    run_cluster(launch, kernel, {number % across * launch.cluster, number / across % grid.y, number / (across * grid.y)},
                cluster);
    if (cluster.failed) return failed(kLaunchFailure, cluster.what);
  }
  return 0;
}

const char* error_text(int number) {
  switch (number) {
    case 0:
      return "no error";
    case 1:
      return "invalid argument";
    case 801:
      return "operation not supported";
    default:
      return error.c_str();
  }
}

int last_error() {
  const int number = code;
  code = 0;
  return number;
}

void fail(const char* what) {
  const std::string where = " by thread " + text(threadIdx) + " of block " + text(blockIdx);
  fail_all(*current, what + where);
  to_scheduler();
  std::abort();  // nobody goes on after that
}

void check_bounds(int threads) {
  if (blockDim.x * blockDim.y * blockDim.z > static_cast<unsigned>(threads)) fail("more threads than the launch bounds allow");
}

int lane() { return static_cast<int>(current->running % kWarp); }

void wait_for_block() { wait_at(current->barrier, current->live); }

void wait_for_warp() { wait_at(own_warp().barrier, own_warp().live); }

const Word* exchange(const void* word, unsigned size, uint32_t mask) {
  Warp& warp = own_warp();
  const unsigned turn = warp.barrier.generation % 2;
  if (warp.barrier.arrived == 0) warp.given[turn] = 0;
  warp.given[turn] |= 1u << lane();
  std::memcpy(warp.words[turn][lane()], word, size);
  wait_at(warp.barrier, warp.live);
  const size_t threads = current->threads, first = current->running / kWarp * kWarp;
  const uint32_t there = threads - first >= kWarp ? ~0u : (1u << (threads - first)) - 1;
  if ((mask & there & ~warp.given[turn]) != 0) fail("a shuffle with threads that have left");
  return warp.words[turn];
}

void* dynamic_shared() { return current->dynamic; }

unsigned blocks_of_cluster() { return current->cluster->blocks; }

unsigned rank_in_cluster() { return current->rank; }

void arrive_at_cluster() {
  Cluster& cluster = *current->cluster;
  const std::lock_guard<std::mutex> lock(cluster.mutex);
  running().cluster_seen = cluster.generation;
  if (++cluster.arrived < cluster.expected) return;
  cluster.arrived = 0;
  ++cluster.generation;
  cluster.changed.notify_all();
}

void wait_for_cluster() {
  {
    const std::lock_guard<std::mutex> lock(current->cluster->mutex);
    current->cluster_generation = current->cluster->generation;
  }
  wait_until_changed(current->cluster_generation, running().cluster_seen);
}

void* shared_of(const void* own, unsigned rank) {
  if (rank >= current->cluster->blocks) fail("an address of a block that the cluster does not have");
  return current->cluster->anchors[rank] + (static_cast<const char*>(own) - &anchor);
}

uint32_t number_of(const void* shared) {
  const auto offset = static_cast<uint64_t>(static_cast<const char*>(shared) - current->dynamic);
  if (offset >= current->launch->shared_bytes) fail("an address outside of the dynamic shared memory");
  return kSharedNumber + static_cast<uint32_t>(offset);
}

void* address_of(uint32_t number) { return current->dynamic + (number - kSharedNumber); }

}  // namespace emulator
