// How one call of the sm90 family divides its scratch memory and its work. Reads no strides.
#pragma once

#include <algorithm>
#include <cstdint>

#include "attention_call.h"
#include "common/launch_builder.h"
#include "sm90/params.h"
#include "sm90/tiles.h"

namespace sm90 {

struct Workspace {
  int64_t q_bh, kv_bh;  // batch * q_heads, batch * kv_heads
  int64_t query_tiles, k_blocks, v_blocks;
  int64_t columns, row_bytes;  // of a row of quantized Q or K, and the bytes from one to the next
  int64_t key_row_bytes, v_rows, q_scale_rows;
  int64_t k_scale_blocks;
  Chunk chunk;  // the largest part of the work that one attention launch does
  // Offsets in bytes.
  int64_t q_int8, k_int8, v_fp8, q_scale, k_scale, k_mean, v_mean, v_scale, v_inverse, lse_shift, q_mean, delta_s,
      prepared, choices;
  ListSpace lists;
  int64_t bytes;

  // Throws std::invalid_argument when a grid of the call would be too large.
  explicit Workspace(const CallSignature& call) {
    q_bh = call.batch * call.q_heads;
    kv_bh = call.batch * call.kv_heads;
    const bool precise = call.mode == kPrecise;  // V is read where it is
    query_tiles = ceil_div(call.q_length, kBlockM);
    k_blocks = ceil_div(call.kv_length, kScaleBlock);
    v_blocks = precise ? 0 : ceil_div(call.kv_length, kVTokens);
    columns = call.rotate ? padded_head_dim(call.head_dim) : call.head_dim;
    row_bytes = round_up(columns, 16);
    key_row_bytes = round_up(call.kv_length, 16);
    v_rows = round_up(call.head_dim, kVChannels);
    q_scale_rows = precise ? round_up(call.q_length, kPreciseRows) : query_tiles * kBlockM;
    // Whole tiles of 128 and of 192 keys.
    static_assert(kTileN * 3 == kWideTileN * 2, "their least common multiple is three of the smaller");
    k_scale_blocks = round_up(k_blocks, kTileN * 3 / kScaleBlock);
    grid(query_tiles * q_bh + (k_blocks + v_blocks) * kv_bh);  // the largest of the call
    chunk = {0, static_cast<int>(q_bh), 0, static_cast<int>(query_tiles)};
    if (call.mode == k4b) {
      const int64_t rows = std::clamp<int64_t>(kDeltaBytes / (4 * call.kv_length), 1, kMaxGridYZ * kDeltaTiles);
      if (rows >= query_tiles) {
        chunk.heads = static_cast<int>(std::min({q_bh, rows / query_tiles, kMaxGridYZ}));
      } else {
        chunk.heads = 1;
        chunk.tiles = static_cast<int>(rows);
      }
    }
    Arena arena;
    q_int8 = arena.add(q_bh * call.q_length * row_bytes);
    k_int8 = arena.add(kv_bh * call.kv_length * row_bytes);
    v_fp8 = arena.add(precise ? 0 : kv_bh * v_rows * key_row_bytes);
    q_scale = arena.add(q_bh * q_scale_rows * 4);
    k_scale = arena.add(kv_bh * k_scale_blocks * kScalesPerBlock * 4);
    k_mean = arena.add(kv_bh * call.head_dim * 4);
    const int64_t v_channels = precise ? 0 : kv_bh * call.head_dim;
    v_mean = arena.add(v_channels * 4);
    v_scale = arena.add(v_channels * 4);
    v_inverse = arena.add(v_channels * 4);
    lse_shift = arena.add(call.has_lse ? q_bh * call.q_length * 4 : 0);
    q_mean = arena.add(call.mode == k4b ? q_bh * query_tiles * call.head_dim * 4 : 0);
    delta_s = arena.add(call.mode == k4b ? int64_t(chunk.heads) * chunk.tiles * call.kv_length * 4 : 0);
    prepared = arena.add(kv_bh * int64_t(sizeof(Prepared)));
    const int64_t launches = ceil_div(q_bh, chunk.heads) * ceil_div(query_tiles, chunk.tiles);
    lists = ListSpace(call, launches, arena);
    choices = arena.add(call.rotate || call.has_mask() ? kv_bh * int64_t(sizeof(HeadChoices)) : 0);
    bytes = arena.bytes();
  }
};

}  // namespace sm90
