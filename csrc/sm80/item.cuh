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

// A warp's part of the item: 16-row tiles, of each of which a lane has two rows. It is passed by reference: of copies
// of its members the compiler makes another order of instructions.
struct WarpQueries {
  Item& item;
  int lane, first_tile;

  // The first of this lane's two rows.
  __device__ __forceinline__ int first_query(int tile) const {
    return item.query_block * kQueryBlock + (first_tile + tile) * 16 + lane / 4;
  }
};

// The item that this block of threads takes of a launch.
template <int kHeadDim, int kBits, class Pv>
__device__ __forceinline__ Item item_of_block(const AttentionParams& p) {
  // Causal: the longest items first.
  const i64 index = p.causal ? p.works - 1 - blockIdx.x : blockIdx.x;
  const i64 work = p.first_work + index;
  const Sizes& sizes = p.sizes;
  Item item;
  item.bh = static_cast<int>(work / sizes.query_blocks);
  item.query_block = static_cast<int>(work - i64(item.bh) * sizes.query_blocks);
  const int batch = item.bh / sizes.q_heads, head = item.bh - batch * sizes.q_heads;
  item.kv_bh = batch * sizes.kv_heads + head / (sizes.q_heads / sizes.kv_heads);
  const i64 first_tile = i64(item.kv_bh) * sizes.key_blocks;
  item.q = p.q_tiles + work * query_tile_bytes(kHeadDim, kBits);
  item.q_scale = p.q_scale + work * query_scales(kBits);
  item.k = p.k_tiles + first_tile * key_tile_bytes(kHeadDim, kBits);
  item.k_scale = p.k_scale + first_tile * kKeyGroups;
  item.v = p.v_tiles + first_tile * value_tile_bytes(kHeadDim, Pv::kVBytes);
  if constexpr (Pv::kOfKeyBlock) {
    item.v_tile_scale = p.v_tile_scale + first_tile;
    item.v_token_term = p.v_token_term + first_tile * kKeyBlock;
  }
  item.bias = p.bias + batch * p.bias_batch_stride + head * p.bias_head_stride + index * p.bias_work_stride;
  item.mask_offset = batch * p.mask.batch_stride + head * p.mask.head_stride;
  const int keys = p.causal ? min((item.query_block + 1) * kQueryBlock, sizes.kv_length) : sizes.kv_length;
  item.key_blocks = (keys + kKeyBlock - 1) / kKeyBlock;
  const int keys_of_all = p.causal ? min(item.query_block * kQueryBlock + 1, sizes.kv_length) : sizes.kv_length;
  item.unlimited_key_blocks = keys_of_all / kKeyBlock;
  const bool has_diagonal = p.causal || sizes.q_length == sizes.kv_length;
  item.attend_to_all(has_diagonal);
  if (p.lists.entries) {
    const i64 list = batch * p.lists.batch_lists + head * p.lists.head_lists + item.query_block;
    item.attend_to_list(p.lists.entries + list * p.lists.key_tiles, p.lists.counts[list]);
  }
  return item;
}

}  // namespace sm80
