// Attention without the matrix of scores in memory: what the operator hands to whoever computes it.
//
//     s[i, j] = scale * sum over d of q[i, d] k[j, d]            -inf where query i does not see key j
//     o[i] = sum over j of exp(s[i, j] - lse[i]) v[j],            lse[i] = log(sum over j of exp(s[i, j]))
//
// Dao et al., "FlashAttention", 2022, https://arxiv.org/abs/2205.14135; "FlashAttention-2", 2023,
// https://arxiv.org/abs/2307.08691. Keys come a block at a time; the sum and the output so far are rescaled whenever the
// maximum grows.
//
// All tensors are contiguous: q and o `(batch, heads, queries, depth)`, k and v `(batch, kv_heads, keys, depth)`, lse
// `(batch, heads, queries)` in float32, or float64 if q is. Query head h reads head h / (heads / kv_heads) of k and v.
// Where it is causal, the last query sees the last key: query i sees keys up to i + keys - queries. A query that sees no
// key has output 0 and lse -inf.
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

// How many keys query `query` sees: the first so many.
KP_HOST_DEVICE constexpr int64_t visible_keys(int64_t query, int64_t queries, int64_t keys, bool causal) {
  return causal ? larger(0, smaller(keys, query + 1 + keys - queries)) : keys;
}

// Which head of k and v belongs to a head of q, both counted through the batch.
KP_HOST_DEVICE constexpr int64_t kv_head_of(int64_t batch_head, int64_t heads, int64_t kv_heads) {
  return batch_head / heads * kv_heads + batch_head % heads / (heads / kv_heads);
}

// What CUDA kernels take: heads are a grid's second dimension, of one batch or of several that go together.
constexpr int64_t kMostDepth = 256;
constexpr int64_t kMostHeads = 65535;

// Queries of a task of the twin.
constexpr int64_t kTaskQueries = 32;

// The twin: tasks `begin` to `end` of `batch * heads * ceil(queries / kTaskQueries)`.
KP_DECLARE_FOR_EACH_ISA(void forward(const Forward&, int64_t begin, int64_t end))

// CUDA: 0 or CUDA's error code. `rung` is a number of kernels/, 0 for the best for shape and architecture.
int launch_forward(const Forward&, int64_t rung, void* stream);

}  // namespace flash_attention
}  // namespace kernel_pytorch
