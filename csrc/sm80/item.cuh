// The work of a block of threads of the attention kernel, and the order of its keys.
#pragma once

#include "sm80/params.h"

namespace sm80 {

constexpr int kBlocksPerTile = kListTile / kKeyBlock;
static_assert(kListTile % kKeyBlock == 0, "a block of a list is whole key blocks");

// It lies in shared memory, because the registers are needed for the output.
//
// Keys go up from the first. Where the queries have a tile of keys at their own place, that one comes before: it often
// holds the largest scores, and steps that raise no maximum are shorter.
struct Item {
  const unsigned char *q, *k, *v;
  const float *q_scale, *k_scale, *bias;
  const float *v_tile_scale, *v_token_term;  // where V's key blocks have scales
  i64 mask_offset;
  int bh, kv_bh, query_block;
  int first_key_block, key_blocks;   // that its queries attend to
  int diagonal;                      // the tile of keys at their own place, or -1
  int next_key_block;                // after the one that is worked on, where one thread computes it
  int unlimited_key_blocks;          // those below hold no key that a query may not attend to
  const unsigned short* next_tiles;  // of its block list, or null

  // All keys, given their blocks.
  __device__ __forceinline__ void attend_to_all(bool has_diagonal) {
    diagonal = has_diagonal && query_block * kBlocksPerTile < key_blocks ? query_block : -1;
    first_key_block = diagonal < 0 ? 0 : diagonal * kBlocksPerTile;
    next_tiles = nullptr;
  }

  // Those of a prepared block list: its entries, and the first active one.
  __device__ __forceinline__ void attend_to_list(const unsigned short* tiles, int first_tile) {
    next_tiles = tiles;
    first_key_block = first_key_block_of(first_tile);
  }

  // key_blocks after the last.
  __device__ __forceinline__ int key_block_after(int key_block) const {
    const int next = key_block + 1;
    if (next % kBlocksPerTile != 0 && next < key_blocks) return next;
    return first_key_block_of(tile_after(key_block / kBlocksPerTile));
  }

 private:
  __device__ __forceinline__ int first_key_block_of(int tile) const {
    return tile * kBlocksPerTile < key_blocks ? tile * kBlocksPerTile : key_blocks;
  }
  __device__ __forceinline__ int tile_after(int tile) const {
    if (next_tiles) return next_tiles[tile];
    const int next = tile == diagonal ? 0 : tile + 1;
    return next + (next == diagonal);
  }
};

}  // namespace sm80
