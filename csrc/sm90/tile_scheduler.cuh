// Which work tile a block takes next: the query rows of one head that a block takes at a time, heads outermost so that
// K and V stay in L2. Dense causal calls have an order of their own (CausalOrder).
#pragma once

#include "sm90/kernel_traits.h"
#include "sm90/params.h"

namespace sm90 {

// Whether the call is causal. Block-list kernels are told: what it changes lies outside of their loop.
template <class Traits>
__device__ __forceinline__ bool is_causal(const AttentionParams& params) {
  if constexpr (Traits::kBlockList)
    return params.lists.causal;
  else
    return Traits::kCausal;
}

struct WorkTile {
  // head counts over batch * q_heads, kv_head over batch * kv_heads
  int batch, head, kv_head, first_row, key_tiles, delta_row;
  int key_end = 0;  // where a padding mask ends the keys, or 0: of kernels whose producer says it

  template <class Traits>
  static __device__ __forceinline__ WorkTile decode(const AttentionParams& params, int index) {
    WorkTile tile;
    const int tiles = params.chunk.tiles;
    const int local_head = index / tiles;
    const bool causal = is_causal<Traits>(params);
    const int local_tile = causal ? tiles - 1 - index % tiles : index % tiles;  // the longest first
    tile.delta_row = local_head * tiles + local_tile;
    tile.head = params.chunk.first_head + local_head;
    tile.batch = tile.head / params.q_heads;
    tile.kv_head =
        tile.batch * params.kv_heads + (tile.head - tile.batch * params.q_heads) / (params.q_heads / params.kv_heads);
    tile.first_row = (params.chunk.first_tile + local_tile) * Traits::kBlockM;
    int keys = causal ? min(params.kv_length, tile.first_row + Traits::kBlockM) : params.kv_length;
    if constexpr (Traits::kKeyEndFromPrologue) {
      const int end = params.prepared[tile.kv_head].keys.end;
      if (end != 0) keys = min(keys, end);  // with a mask that hides all keys none is skipped
    }
    tile.key_tiles = (keys + Traits::kBlockN - 1) / Traits::kBlockN;
    return tile;
  }

  template <class Traits>
  __device__ __forceinline__ void end_keys_at(int end) {
    key_end = end;
    if (end != 0) key_tiles = (end + Traits::kBlockN - 1) / Traits::kBlockN;
  }
};

// The work tile at a place of a dense causal call's order. The last places of a group have none: their tile is too
// large.
struct CausalPlace {
  int head, tile;
  __device__ __forceinline__ CausalPlace(const AttentionParams& params, int place) {
    const CausalOrder& order = params.causal;
    const int group = place / order.places, turn = place - group * order.places, first = group * order.heads;
    const int turns = min(order.heads, params.chunk.heads - first);
    tile = turn / turns;
    head = first + turn - tile * turns;
  }
};

// A block of a dense kernel has one place in each round of the grid.
template <class Traits>
__device__ __forceinline__ int places_of_work(const AttentionParams& params) {
  return Traits::kCausal ? params.causal.groups * params.causal.places : params.chunk.heads * params.chunk.tiles;
}
template <class Traits>
__device__ __forceinline__ int next_place(const AttentionParams& params, int place) {
  const int blocks = gridDim.x;
  if constexpr (Traits::kCausal) {
    do place += 2 * (blocks - place % blocks) - 1;  // every other round is in reverse
    while (place < places_of_work<Traits>(params) && CausalPlace(params, place).tile >= params.chunk.tiles);
    return place;
  } else {
    return place + blocks;
  }
}
template <class Traits>
__device__ __forceinline__ WorkTile work_tile_at(const AttentionParams& params, int place) {
  int index = place;
  if constexpr (Traits::kCausal) {
    const CausalPlace causal(params, place);
    index = causal.head * params.chunk.tiles + causal.tile;
  }
  return WorkTile::decode<Traits>(params, index);
}

}  // namespace sm90
