// Exchange of one or two numbers between warps that share a row, through shared memory.
#pragma once

#include <cstddef>

#include "kernel_pytorch/cuda/layout.h"
#include "kernel_pytorch/cuda/reduce.cuh"
#include "kernel_pytorch/cuda/shared_memory.cuh"

namespace kernel_pytorch {

constexpr int kClusterWarps = 16;  // per block of a cluster, at most
constexpr int kTurns = 2;

// In an exchange every warp publishes its numbers, awaits those of all warps, and may then read them. Consecutive
// exchanges use different buffers: a warp that has received all numbers knows that all warps have left the previous
// exchange.
template <bool kCluster>
class Meeting;

// Exchange between the warps of a block.
template <>
class Meeting<false> {
 public:
  struct Numbers {
    float2 of_warp[kTurns][kMaxWarps];
  };

  __device__ __forceinline__ explicit Meeting(Numbers& numbers) : numbers_(numbers.of_warp) {}

  __device__ __forceinline__ static int blocks() { return 1; }
  __device__ __forceinline__ static int rank() { return 0; }
  __device__ __forceinline__ static int warps() { return static_cast<int>(blockDim.x) / kWarp; }

  __device__ __forceinline__ void publish(float value) {
    turn_ ^= 1;
    if (threadIdx.x % kWarp == 0) numbers_[turn_][threadIdx.x / kWarp].x = value;
  }
  __device__ __forceinline__ void publish(float2 values) {
    turn_ ^= 1;
    if (threadIdx.x % kWarp == 0) numbers_[turn_][threadIdx.x / kWarp] = values;
  }
  __device__ __forceinline__ void await() { __syncthreads(); }
  __device__ __forceinline__ float one_of(int warp) const { return numbers_[turn_][warp].x; }
  __device__ __forceinline__ float2 two_of(int warp) const { return numbers_[turn_][warp]; }

 private:
  float2 (*numbers_)[kMaxWarps];
  int turn_ = 1;
};

// Exchange between the warps of a cluster (compute capability 9.0 on). Every warp sends its numbers to every block,
// whose mbarrier counts the received bytes. A cluster barrier would also wait for all other writes of a warp, and would
// invalidate the L1 cache.
template <>
class Meeting<true> {
 public:
  struct Numbers {
    float2 of_warp[kTurns][kMostBlocks * kClusterWarps];
    uint64_t arrivals[kTurns];
  };

  __device__ __forceinline__ explicit Meeting(Numbers& numbers) : own_(shared_address(&numbers)) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    const cooperative_groups::cluster_group cluster = cooperative_groups::this_cluster();
    blocks_ = static_cast<int>(cluster.num_blocks());
    rank_ = static_cast<int>(cluster.block_rank());
    if (threadIdx.x == 0) {
      for (int turn = 0; turn < kTurns; ++turn) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(arrivals_of(own_, turn)) : "memory");
      }
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncwarp();
    // No warp may send to a block that has not started; loads need not wait for that.
    asm volatile("barrier.cluster.arrive.aligned;" ::: "memory");
#endif
  }

  __device__ __forceinline__ int blocks() const { return blocks_; }
  __device__ __forceinline__ int rank() const { return rank_; }
  __device__ __forceinline__ int warps() const { return blocks_ * warps_of_block(); }

  __device__ __forceinline__ void publish(float value) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    send(sizeof value, [&](uint32_t target, uint32_t arrivals) {
      asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(target),
                   "f"(value), "r"(arrivals)
                   : "memory");
    });
#endif
  }
  __device__ __forceinline__ void publish(float2 values) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    send(sizeof values, [&](uint32_t target, uint32_t arrivals) {
      asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(target),
                   "f"(values.x), "f"(values.y), "r"(arrivals)
                   : "memory");
    });
#endif
  }

  __device__ __forceinline__ void await() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    for (unsigned complete = 0; complete == 0;) {
      asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                   : "=r"(complete)
                   : "r"(arrivals_of(own_, turn())), "r"(held_ / kTurns % 2)
                   : "memory");
    }
#endif
  }

  __device__ __forceinline__ float one_of(int warp) const {
    float value;
    asm volatile("ld.shared.b32 %0, [%1];" : "=f"(value) : "r"(place_of(own_, warp, turn())) : "memory");
    return value;
  }
  __device__ __forceinline__ float2 two_of(int warp) const {
    float2 values;
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];"
                 : "=f"(values.x), "=f"(values.y)
                 : "r"(place_of(own_, warp, turn()))
                 : "memory");
    return values;
  }

 private:
  __device__ __forceinline__ static int warps_of_block() { return static_cast<int>(blockDim.x) / kWarp; }
  __device__ __forceinline__ static uint32_t place_of(uint32_t numbers, int warp, int turn) {
    return numbers + (turn * kMostBlocks * kClusterWarps + warp) * static_cast<uint32_t>(sizeof(float2));
  }
  __device__ __forceinline__ static uint32_t arrivals_of(uint32_t numbers, int turn) {
    return numbers + static_cast<uint32_t>(offsetof(Numbers, arrivals)) + turn * static_cast<uint32_t>(sizeof(uint64_t));
  }

  __device__ __forceinline__ int turn() const { return static_cast<int>(held_ % kTurns); }

  // Calls `store(address of this warp's numbers in a block, its mbarrier)` in one lane per block.
  template <typename Store>
  __device__ __forceinline__ void send(int bytes, const Store& store) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    if (!all_began_) asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
    all_began_ = true;
    ++held_;
    if (threadIdx.x == 0) {
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(arrivals_of(own_, turn())),
                   "r"(warps() * bytes)
                   : "memory");
    }
    const int lane = threadIdx.x % kWarp, warp = rank_ * warps_of_block() + threadIdx.x / kWarp;
    if (lane >= blocks_) return;
    uint32_t numbers;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(numbers) : "r"(own_), "r"(lane));
    store(place_of(numbers, warp, turn()), arrivals_of(numbers, turn()));
#endif
  }

  uint32_t own_;
  int blocks_ = 1;
  int rank_ = 0;
  unsigned held_ = ~0u;  // number of the latest exchange
  bool all_began_ = false;
};

}  // namespace kernel_pytorch
