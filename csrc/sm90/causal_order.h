// How many heads of a dense causal call take turns, for a grid of so many blocks: CausalOrder (params.h) says what a
// group is, and tile_scheduler.cuh walks it. The K and V of a small group stay in L2, but every group may leave blocks
// idle in its last round.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/grid.h"
#include "sm90/params.h"

namespace sm90 {

inline CausalOrder causal_order(const Chunk& chunk, int64_t blocks) {
  constexpr int64_t kRounds = 6;  // that a group takes, so that what its last one leaves idle is little
  const int64_t fewest = ceil_div(blocks, chunk.tiles);
  const int64_t wanted = ceil_div(kRounds * blocks, chunk.tiles);
  const int64_t groups = std::clamp<int64_t>(chunk.heads / fewest, 1, ceil_div(chunk.heads, wanted));
  const int64_t heads = ceil_div(chunk.heads, groups), places = round_up(heads * chunk.tiles, blocks);
  return {static_cast<int>(heads), static_cast<int>(places), static_cast<int>(ceil_div(chunk.heads, heads))};
}

}  // namespace sm90
