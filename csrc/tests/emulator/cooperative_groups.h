// The part of cooperative groups, for clusters, that the kernels use.
#pragma once

#include "emulator.h"

namespace cooperative_groups {

struct cluster_group {
  unsigned num_blocks() const { return ::emulator::blocks_of_cluster(); }
  unsigned block_rank() const { return ::emulator::rank_in_cluster(); }
  void sync() const {
    ::emulator::arrive_at_cluster();
    ::emulator::wait_for_cluster();
  }
  template <typename T>
  T* map_shared_rank(T* own, unsigned rank) const {
    return static_cast<T*>(::emulator::shared_of(own, rank));
  }
};

inline cluster_group this_cluster() { return {}; }

}  // namespace cooperative_groups
