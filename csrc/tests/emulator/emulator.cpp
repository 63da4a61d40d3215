#include "emulator.h"

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <new>

#include "block.h"

thread_local dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulator {

thread_local char anchor = 0;

namespace {

constexpr size_t kStackBytes = 128 * 1024;
constexpr uint32_t kSharedNumber = 1024;  // number of the first byte of dynamic shared memory
constexpr uint32_t kStatic = 1u << 31;    // marks numbers of static shared memory: the block's rank, then the position
constexpr int kPlaceBits = 27;
constexpr std::ptrdiff_t kAnchorPlace = std::ptrdiff_t{1} << (kPlaceBits - 1);
constexpr auto kPatience = std::chrono::seconds(60);

// AddressSanitizer supports swapcontext, which costs a system call, but no long jumps.
#if defined(__SANITIZE_ADDRESS__)
constexpr bool kJumps = false;
#else
constexpr bool kJumps = true;
#endif

thread_local Block* current = nullptr;

// Stacks and shared memory of an operating-system thread, reused for its next block.
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

// Layout of the 8 bytes of a barrier.
struct CountedBytes {
  int bytes;     // expected but not received; negative if received before they are expected
  uint16_t arrived;
  uint16_t phase;
};

CountedBytes& counted(uint32_t barrier) {
  return *const_cast<CountedBytes*>(aligned(static_cast<const CountedBytes*>(address_of(barrier)), 8));
}

// The caller holds the lock of the cluster.
void count(CountedBytes& barrier, int bytes) {
  Cluster& cluster = *current->cluster;
  barrier.bytes += bytes;
  if (barrier.arrived == 0 || barrier.bytes != 0) return;
  barrier.arrived = 0;
  ++barrier.phase;
  current->cluster_phases = ++cluster.phases;
  cluster.changed.notify_all();
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

void make(const Copy& copy) {
  char words[16] = {};
  memcpy(words, copy.source, static_cast<size_t>(copy.bytes));
  memcpy(const_cast<char*>(aligned(static_cast<const char*>(address_of(copy.target)), 16)), words, sizeof words);
}

// Removes a thread that has exited from all barriers.
void leave() {
  running().copies = {{}};
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

// Called when no thread of the block can continue: returns whether another block of the cluster has changed that.
bool wait_for_other_blocks(Block& block) {
  Cluster& cluster = *block.cluster;
  const auto end = block.fibers.begin() + static_cast<std::ptrdiff_t>(block.threads);
  const bool some = std::any_of(block.fibers.begin(), end, [&](const Fiber& fiber) {
    return !fiber.done && (fiber.generation == &block.cluster_generation || fiber.generation == &block.cluster_phases);
  });
  if (!some) return false;
  std::unique_lock<std::mutex> lock(cluster.mutex);
  const auto changed = [&] {
    return cluster.failed || cluster.generation != block.cluster_generation || cluster.phases != block.cluster_phases;
  };
  const bool moved = cluster.changed.wait_for(lock, kPatience, changed);
  if (cluster.failed) block.failed = true;
  block.cluster_generation = cluster.generation;
  block.cluster_phases = cluster.phases;
  return moved;
}

}  // namespace

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
  std::memset(block.dynamic, 0xff, block.launch->shared_bytes);  // NaNs, to detect reads of memory that was not written
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
    for (Fiber& fiber : block.fibers) fiber.begun = false;  // abandons fibers in the middle of a kernel
  }
  current = nullptr;
}

void fail(const char* what) {
  const std::string where = " by thread " + text(threadIdx) + " of block " + text(blockIdx);
  fail_all(*current, what + where);
  to_scheduler();
  std::abort();  // not reached: the scheduler resumes no thread after a failure
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

void copy_later(uint32_t target, const void* source, int bytes) {
  const Copy copy = {target, source, bytes};
  if (puts_off()) {
    running().copies.back().push_back(copy);
  } else {
    make(copy);
  }
}

void commit_copies() { running().copies.emplace_back(); }

void await_copies(int open) {
  auto& groups = running().copies;
  while (groups.size() > static_cast<size_t>(open) + 1) {
    for (const Copy& copy : groups.front()) make(copy);
    groups.pop_front();
  }
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
  if (offset < current->launch->shared_bytes) return kSharedNumber + static_cast<uint32_t>(offset);
  if (offset < kMostSharedBytes) fail("an address outside of the dynamic shared memory");
  const std::ptrdiff_t place = static_cast<const char*>(shared) - &anchor + kAnchorPlace;
  if (place < 0 || place >= 2 * kAnchorPlace) fail("an address outside of the shared memory");
  return number_in(kStatic | static_cast<uint32_t>(place), current->rank);
}

void* address_of(uint32_t number) {
  if ((number & kStatic) == 0) return current->dynamic + (number - kSharedNumber);
  const std::ptrdiff_t place = number & ((1u << kPlaceBits) - 1);
  return current->cluster->anchors[(number & ~kStatic) >> kPlaceBits] + (place - kAnchorPlace);
}

uint32_t number_in(uint32_t own, unsigned rank) {
  if (rank >= current->cluster->blocks) fail("an address of a block that the cluster does not have");
  if ((own & kStatic) == 0) fail("dynamic shared memory of another block");
  return kStatic | rank << kPlaceBits | (own & ((1u << kPlaceBits) - 1));
}

void make_barrier(uint32_t barrier) { counted(barrier) = {}; }

void arrive_and_expect(uint32_t barrier, int bytes) {
  CountedBytes& own = counted(barrier);
  if (own.arrived > 0) fail("more arrivals at a barrier than it awaits");
  const std::lock_guard<std::mutex> lock(current->cluster->mutex);
  own.arrived = 1;
  count(own, bytes);
}

void send(uint32_t target, const void* source, int bytes, uint32_t barrier) {
  const char* const place = aligned(static_cast<const char*>(address_of(target)), static_cast<unsigned>(bytes));
  CountedBytes& there = counted(barrier);
  const std::lock_guard<std::mutex> lock(current->cluster->mutex);
  memcpy(const_cast<char*>(place), source, static_cast<size_t>(bytes));
  count(there, -bytes);
}

void wait_for_phase(uint32_t barrier, unsigned parity) {
  const CountedBytes& own = counted(barrier);
  for (;;) {
    unsigned seen = 0;
    {
      const std::lock_guard<std::mutex> lock(current->cluster->mutex);
      if (own.phase % 2 != parity) return;
      current->cluster_phases = seen = current->cluster->phases;
    }
    wait_until_changed(current->cluster_phases, seen);
  }
}

}  // namespace emulator
