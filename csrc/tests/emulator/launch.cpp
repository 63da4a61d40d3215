#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>

#include "block.h"

namespace emulator {

namespace {

constexpr int kInvalidConfiguration = 9, kLaunchFailure = 719;

thread_local std::string error;
thread_local int code = 0;

enum class Order { kForward, kBackward, kRandom };

Order chosen_order() {
  const char* name = std::getenv("KERNEL_PYTORCH_EMULATED_ORDER");
  if (name == nullptr || std::strcmp(name, "forward") == 0) return Order::kForward;
  return std::strcmp(name, "backward") == 0 ? Order::kBackward : Order::kRandom;
}

}  // namespace

int capability() {
  const char* const set = std::getenv("KERNEL_PYTORCH_EMULATED_CAPABILITY");
  return set == nullptr ? 90 : std::atoi(set);
}

// CUDA C++ Programming Guide, technical specifications per compute capability.
unsigned most_shared_bytes() { return (capability() >= 120 ? 99 : capability() >= 90 ? 227 : 163) * 1024; }

namespace {

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
    cluster.anchors[0] = &anchor;
    run_one(0);
    return;
  }
  // A block may end only after all have started, and its memory must exist until all have ended.
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

}  // namespace

static thread_local std::minstd_rand random;

bool puts_off() {
  const Order order = chosen_order();
  return order == Order::kBackward || (order == Order::kRandom && random() % 2 == 0);
}

std::vector<size_t> in_order(size_t count) {
  const Order order = chosen_order();
  std::vector<size_t> indices(count);
  for (size_t i = 0; i < count; ++i) indices[i] = order == Order::kBackward ? count - 1 - i : i;
  if (order == Order::kRandom) std::shuffle(indices.begin(), indices.end(), random);
  return indices;
}

std::string text(dim3 d) {
  return "(" + std::to_string(d.x) + ", " + std::to_string(d.y) + ", " + std::to_string(d.z) + ")";
}

int run(const Launch& launch, const std::function<void()>& kernel) {
  const dim3 grid = launch.grid, block = launch.block;
  const uint64_t threads = uint64_t{block.x} * block.y * block.z;
  if (threads == 0 || threads > kMostThreads || block.z > 64) return failed(kInvalidConfiguration, "a block of " + text(block));
  const bool fits = grid.x > 0 && grid.y > 0 && grid.z > 0 && grid.x < 1u << 31 && grid.y < 65536 && grid.z < 65536;
  if (!fits) return failed(kInvalidConfiguration, "a grid of " + text(grid));
  if (launch.cluster > 16 || grid.x % launch.cluster) return failed(kInvalidConfiguration, "a cluster that the grid is no multiple of");
  if (launch.shared_bytes > most_shared_bytes()) return failed(kInvalidConfiguration, "too much shared memory");
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

}  // namespace emulator
