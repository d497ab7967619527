// The order in which a work tile visits its key tiles.
#pragma once

#include "sm90/params.h"
#include "sm90/tile_scheduler.cuh"

namespace sm90 {

// Indexed by how many tiles are left. The last tile comes first, because the ragged or causal one needs masking, which
// is best done outside the consumers' loop. In self-attention the tile on the diagonal follows: it often holds the
// largest scores, and a block far below the running maximum can be skipped. The others come from the last to the first.
template <class Traits>
class KeyOrder {
  // The tiles of one block of a block mask stay together, so that block lists keep this order.
  static constexpr int kTogether = Traits::kBlockN < kListTile ? kListTile / Traits::kBlockN : 1;

 public:
  __device__ __forceinline__ KeyOrder(const AttentionParams& params, const WorkTile& tile)
      : last_((tile.key_tiles - 1) / kTogether), diagonal_(last_ - 1) {
    constexpr int kKeys = kTogether * Traits::kBlockN;
    if (!Traits::kCausal && params.q_length == params.kv_length)
      diagonal_ = min(diagonal_, (tile.first_row + Traits::kBlockM / 2) / kKeys);
  }

  __device__ __forceinline__ int operator[](int left) const {
    const int place = left / kTogether + 1;
    if (Traits::kCausal || place > last_) return left;
    const int group = place == last_ ? diagonal_ : place - (place <= diagonal_);
    return group * kTogether + left % kTogether;
  }

 private:
  int last_, diagonal_;  // groups of kTogether tiles
};

}  // namespace sm90
