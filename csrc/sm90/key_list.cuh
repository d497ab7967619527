// The key tiles of a work tile in a block-list kernel, the last key first: the active blocks of its block of queries in
// tiles of the kernel.
#pragma once

#include "sm90/tile_scheduler.cuh"

namespace sm90 {

constexpr int kNoWork = -1;  // in place of a work tile's index: there are no more

template <class Traits>
class KeyList {
  static_assert(Traits::kBlockM == kListTile, "a work tile is what a list is for");
  static_assert(kListTile % Traits::kBlockN == 0, "a tile of a list is whole tiles of the kernel");
  static constexpr int kPerEntry = kListTile / Traits::kBlockN;

 public:
  __device__ __forceinline__ KeyList(const AttentionParams& params, const WorkTile& tile) {
    const PreparedLists& lists = params.lists;
    const int batch = tile.head / params.q_heads, head = tile.head - batch * params.q_heads;
    const i64 list = batch * lists.batch_lists + head * lists.head_lists + tile.first_row / kListTile;
    entries_ = lists.entries + list * lists.key_tiles;
    size_ = lists.counts[list] * kPerEntry;
    if (size_ == 0) return;
    // Tiles of the kernel behind the last key.
    const int tiles = (params.kv_length + Traits::kBlockN - 1) / Traits::kBlockN;
    if constexpr (kPerEntry > 1) missing_ = max(0, (entries_[0] + 1) * kPerEntry - tiles);
    size_ -= missing_;
  }

  __device__ __forceinline__ int size() const { return size_; }
  __device__ __forceinline__ int operator[](int i) const {
    const unsigned place = kPerEntry > 1 ? i + missing_ : i;
    return entries_[place / kPerEntry] * kPerEntry + kPerEntry - 1 - place % kPerEntry;
  }

 private:
  const unsigned short* entries_;
  int size_, missing_ = 0;
};

}  // namespace sm90
