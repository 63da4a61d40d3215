// Parameters of the flash attention kernels.
#pragma once

#include <cstdint>

namespace kernel_pytorch {
namespace flash_attention {

template <typename T>
struct Pointers {
  const T* q;
  const T* k;
  const T* v;
  T* o;
  float* lse;
  int64_t heads;
  int64_t kv_heads;
  int64_t queries;
  int64_t keys;
  int depth;
  float scale;
  bool causal;
};

}  // namespace flash_attention
}  // namespace kernel_pytorch
