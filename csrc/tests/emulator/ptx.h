// Implementations of the PTX instructions that the kernels use: `asm("add.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b))`
// is compiled to `emulator::ptx::add_f32(c, a, b)`.
#pragma once

#include "cuda_bf16.h"
#include "cuda_fp16.h"

namespace emulator {
namespace ptx {

inline float flushed(float x) { return fabsf(x) < 0x1p-126f ? copysignf(0.0f, x) : x; }
inline void ex2_approx_ftz_f32(float& y, float x) { y = flushed(exp2f(flushed(x))); }
inline void rcp_approx_ftz_f32(float& y, float x) { y = flushed(1.0f / flushed(x)); }

inline void st_global_cs_v4_b32(uint64_t address, unsigned x, unsigned y, unsigned z, unsigned w) {
  *const_cast<uint4*>(aligned(reinterpret_cast<const uint4*>(address))) = {x, y, z, w};
}

inline void createpolicy_fractional_L2_evict_last_b64(uint64_t& policy) { policy = 0; }
inline void ld_global_L1_evict_last_L2_cache_hint_v4_b32(unsigned& x, unsigned& y, unsigned& z, unsigned& w,
                                                         uint64_t address, uint64_t) {
  const uint4 words = *aligned(reinterpret_cast<const uint4*>(address));
  x = words.x, y = words.y, z = words.z, w = words.w;
}

inline void barrier_cluster_arrive_aligned() { arrive_at_cluster(); }
inline void barrier_cluster_wait_aligned() { wait_for_cluster(); }

inline void mapa_shared_cluster_u32(uint32_t& number, uint32_t own, unsigned rank) { number = number_in(own, rank); }
inline void mbarrier_init_shared_cta_b64(uint32_t barrier) { make_barrier(barrier); }
inline void fence_mbarrier_init_release_cluster() {}
inline void mbarrier_arrive_expect_tx_shared_cta_b64(uint32_t barrier, int bytes) { arrive_and_expect(barrier, bytes); }
inline void mbarrier_try_wait_parity_shared_cta_b64(unsigned& complete, uint32_t barrier, unsigned parity) {
  wait_for_phase(barrier, parity);
  complete = 1;
}
inline void st_async_weak_shared_cluster_mbarrier_complete_tx_bytes_f32(uint32_t target, float x, uint32_t barrier) {
  send(target, &x, sizeof x, barrier);
}
inline void st_async_weak_shared_cluster_mbarrier_complete_tx_bytes_v2_f32(uint32_t target, float x, float y,
                                                                           uint32_t barrier) {
  const float values[] = {x, y};
  send(target, values, sizeof values, barrier);
}

template <typename T>
T& in_shared(uint32_t number) {
  return *const_cast<T*>(aligned(static_cast<const T*>(address_of(number))));
}
inline void ld_shared_b32(float& x, uint32_t number) { x = in_shared<float>(number); }
inline void ld_shared_v2_b32(float& x, float& y, uint32_t number) {
  const float2 values = in_shared<float2>(number);
  x = values.x, y = values.y;
}
inline void ld_shared_v4_b32(unsigned& x, unsigned& y, unsigned& z, unsigned& w, uint32_t number) {
  const uint4 words = in_shared<uint4>(number);
  x = words.x, y = words.y, z = words.z, w = words.w;
}
inline void st_shared_b32(uint32_t number, float x) { in_shared<float>(number) = x; }
inline void st_shared_v4_b32(uint32_t number, unsigned x, unsigned y, unsigned z, unsigned w) {
  in_shared<uint4>(number) = {x, y, z, w};
}

inline void cp_async_cg_shared_global(uint32_t target, const void* source, int bytes) {
  copy_later(target, aligned(static_cast<const char*>(source), 16), bytes);
}
inline void cp_async_cg_shared_global_L2_cache_hint(uint32_t target, uint64_t source, int bytes, uint64_t) {
  cp_async_cg_shared_global(target, reinterpret_cast<const void*>(source), bytes);
}
inline void cp_async_cg_shared_global_L2_cache_hint(uint32_t target, uint64_t source, uint64_t) {
  cp_async_cg_shared_global(target, reinterpret_cast<const void*>(source), 16);
}
inline void cp_async_commit_group() { commit_copies(); }
inline void cp_async_wait_group(int open) { await_copies(open); }

// Matrix i of four: lane 8i + r passes the address of row r; lane l receives columns 2 (l % 4) and 2 (l % 4) + 1 of row
// l / 4, or, transposed, these rows of column l / 4.
inline void load_matrices(unsigned (&matrices)[4], uint32_t row, bool transposed) {
  const Word* const rows = exchange(&row, sizeof row, ~0u);
  for (int i = 0; i < 4; ++i) {
    uint16_t pair[2];
    for (int j = 0; j < 2; ++j) {
      const int line = transposed ? lane() % 4 * 2 + j : lane() / 4, column = transposed ? lane() / 4 : lane() % 4 * 2 + j;
      uint32_t number;
      memcpy(&number, rows[8 * i + line], sizeof number);
      pair[j] = aligned(static_cast<const uint16_t*>(address_of(number)), 16)[column];
    }
    memcpy(&matrices[i], pair, sizeof pair);
  }
}
inline void ldmatrix_sync_aligned_m8n8_x4_shared_b16(unsigned& a, unsigned& b, unsigned& c, unsigned& d, uint32_t row) {
  unsigned matrices[4];
  load_matrices(matrices, row, false);
  a = matrices[0], b = matrices[1], c = matrices[2], d = matrices[3];
}
inline void ldmatrix_sync_aligned_m8n8_x4_trans_shared_b16(unsigned& a, unsigned& b, unsigned& c, unsigned& d,
                                                           uint32_t row) {
  unsigned matrices[4];
  load_matrices(matrices, row, true);
  a = matrices[0], b = matrices[1], c = matrices[2], d = matrices[3];
}

// C (16 x 8) += A (16 x 16) B (16 x 8), in the fragments of the PTX ISA's "Matrix Fragments for mma.m16n8k16".
template <typename T>
void multiply_add(float* const (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  float left[2][16], right[2][16];  // rows g and g + 8 of A, columns 2t and 2t + 1 of B
  const auto widened = [](unsigned word, int half) { return T{static_cast<uint16_t>(word >> 16 * half)}.widened(); };
  Word own[2];
  memcpy(own[0], a, sizeof a);
  memcpy(own[1], b, sizeof b);
  const int g = lane() / 4, t = lane() % 4;
  const Word* words = exchange(own[0], sizeof a, ~0u);
  for (int k = 0; k < 16; ++k) {
    unsigned of_lane[4];
    memcpy(of_lane, words[4 * g + k % 8 / 2], sizeof of_lane);
    for (int half = 0; half < 2; ++half) left[half][k] = widened(of_lane[k / 8 * 2 + half], k % 2);
  }
  words = exchange(own[1], sizeof b, ~0u);
  for (int k = 0; k < 16; ++k) {
    for (int column = 0; column < 2; ++column) {
      unsigned of_lane[2];
      memcpy(of_lane, words[4 * (2 * t + column) + k % 8 / 2], sizeof of_lane);
      right[column][k] = widened(of_lane[k / 8], k % 2);
    }
  }
  for (int half = 0; half < 2; ++half) {
    for (int column = 0; column < 2; ++column) {
      double sum = *c[2 * half + column];
      for (int k = 0; k < 16; ++k) sum += static_cast<double>(left[half][k]) * right[column][k];
      *c[2 * half + column] = static_cast<float>(sum);
    }
  }
}
inline void mma_sync_aligned_m16n8k16_row_col_f32_f16_f16_f32(float& c0, float& c1, float& c2, float& c3, unsigned a0,
                                                              unsigned a1, unsigned a2, unsigned a3, unsigned b0,
                                                              unsigned b1) {
  multiply_add<__half>({&c0, &c1, &c2, &c3}, {a0, a1, a2, a3}, {b0, b1});
}
inline void mma_sync_aligned_m16n8k16_row_col_f32_bf16_bf16_f32(float& c0, float& c1, float& c2, float& c3, unsigned a0,
                                                                unsigned a1, unsigned a2, unsigned a3, unsigned b0,
                                                                unsigned b1) {
  multiply_add<__nv_bfloat16>({&c0, &c1, &c2, &c3}, {a0, a1, a2, a3}, {b0, b1});
}

}  // namespace ptx
}  // namespace emulator
