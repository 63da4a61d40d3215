// Attention without the matrix of scores in memory: the parameters that operators pass to the CPU and CUDA backends.
//
//     s[i, j] = scale * sum over d of q[i, d] k[j, d]            -inf if key j is masked for query i
//     o[i] = sum over j of exp(s[i, j] - lse[i]) v[j],            lse[i] = log(sum over j of exp(s[i, j]))
//
// Dao et al., "FlashAttention", 2022, https://arxiv.org/abs/2205.14135; "FlashAttention-2", 2023,
// https://arxiv.org/abs/2307.08691. Keys are processed in blocks; a new maximum rescales the sum and the output so far.
//
// All tensors are contiguous: q and o `(batch, heads, queries, depth)`, k and v `(batch, kv_heads, keys, depth)`, lse
// `(batch, heads, queries)` in float32, or float64 if q is. Query head h reads head h / (heads / kv_heads) of k and v.
// If causal, the last query sees the last key: query i sees keys up to i + keys - queries. A query that sees no key has
// output 0 and lse -inf.
#pragma once

#include "kernel_pytorch/cpu/isa.h"
#include "kernel_pytorch/dtype.h"
#include "kernel_pytorch/index.h"

namespace kernel_pytorch {
namespace flash_attention {

struct Forward {
  Input q;
  Input k;
  Input v;
  Output o;
  Output lse;
  int64_t batch;
  int64_t heads;
  int64_t kv_heads;
  int64_t queries;
  int64_t keys;
  int64_t depth;
  double scale;
  bool causal;
};

// Number of keys that query `query` sees, from the first one on.
KP_HOST_DEVICE constexpr int64_t visible_keys(int64_t query, int64_t queries, int64_t keys, bool causal) {
  return causal ? larger(0, smaller(keys, query + 1 + keys - queries)) : keys;
}

// Index of the head of k and v that belongs to a head of q, both counted through the batch.
KP_HOST_DEVICE constexpr int64_t kv_head_of(int64_t batch_head, int64_t heads, int64_t kv_heads) {
  return batch_head / heads * kv_heads + batch_head % heads / (heads / kv_heads);
}

// Limits of the CUDA kernels: heads are a grid's second dimension, from one batch or several.
constexpr int64_t kMostDepth = 256;
constexpr int64_t kMostHeads = 65535;

// Number of queries per task of the CPU backend.
constexpr int64_t kTaskQueries = 32;

// CPU backend: tasks `begin` to `end` of `batch * heads * ceil(queries / kTaskQueries)`.
KP_DECLARE_FOR_EACH_ISA(void forward(const Forward&, int64_t begin, int64_t end))

// CUDA backend: returns 0 or CUDA's error code. `rung` is a file number in kernels/, 0 for the best for shape and GPU.
int launch_forward(const Forward&, int64_t rung, void* stream);

}  // namespace flash_attention
}  // namespace kernel_pytorch
