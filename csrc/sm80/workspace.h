// How one call of the sm80 family divides its scratch memory and its work. Reads no strides.
#pragma once

#include <algorithm>
#include <cstdint>

#include "attention_call.h"
#include "common/launch_builder.h"
#include "sm80/kernels.h"
#include "sm80/params.h"

namespace sm80 {

struct Workspace {
  int64_t q_bh, kv_bh;  // batch * q_heads, batch * kv_heads
  int64_t query_blocks, key_blocks, chunks, works;
  int64_t bias_rows;  // of the key bias: work items of a launch (4-bit), or batch * q_heads (8-bit with a mask)
  driver::Extent statistics_grid;
  // Offsets in bytes.
  int64_t q_tiles, k_tiles, v_tiles, q_scale, k_scale, k_mean, v_mean, v_scale, v_tile_scale, v_token_term, q_mean,
      lse_shift, partials, bias, shown_of_chunks, shown, rotated;
  ListSpace lists;
  int64_t bytes;

  // Throws std::invalid_argument when a grid of the call would be too large.
  Workspace(const CallSignature& call, PvProduct product, int v_bytes) {
    const int channels = padded_head_dim(call.head_dim);
    q_bh = call.batch * call.q_heads;
    kv_bh = call.batch * call.kv_heads;
    query_blocks = ceil_div(call.q_length, kQueryBlock);
    key_blocks = ceil_div(call.kv_length, kKeyBlock);
    chunks = ceil_div(call.kv_length, kStatisticsTokens);
    works = q_bh * query_blocks;
    const int tensors = has_v_scale(product) ? 2 : 1;  // with statistics: K, and V where it is scaled
    statistics_grid = grid(kv_bh, chunks, tensors);
    grid(works + 2 * kv_bh * key_blocks);  // of the quantization
    const int64_t row_bytes = key_blocks * kKeyBlock * 4;
    bias_rows = call.has_mask() ? q_bh : 0;
    if (call.mode == k4b) bias_rows = std::clamp<int64_t>(kDeltaBytes / row_bytes, 1, works);
    Arena arena;
    q_tiles = arena.add(works * query_tile_bytes(channels, score_bits(call.mode)));
    k_tiles = arena.add(kv_bh * key_blocks * key_tile_bytes(channels, score_bits(call.mode)));
    v_tiles = arena.add(kv_bh * key_blocks * value_tile_bytes(channels, v_bytes));
    q_scale = arena.add(works * query_scales(score_bits(call.mode)) * 4);
    k_scale = arena.add(kv_bh * key_blocks * kKeyGroups * 4);
    k_mean = arena.add(kv_bh * channels * 4);
    v_mean = arena.add((tensors - 1) * kv_bh * channels * 4);
    v_scale = arena.add((tensors - 1) * kv_bh * channels * 4);
    const int64_t scaled_blocks = product == PvProduct::int8 ? kv_bh * key_blocks : 0;
    v_tile_scale = arena.add(scaled_blocks * 4);
    v_token_term = arena.add(scaled_blocks * kKeyBlock * 4);
    q_mean = arena.add(call.mode == k4b ? works * channels * 4 : 0);
    lse_shift = arena.add(call.has_lse ? q_bh * call.q_length * 4 : 0);
    partials = arena.add(tensors * kv_bh * chunks * kStatistics * channels * 4);
    bias = arena.add(bias_rows * row_bytes);
    lists = ListSpace(call, 0, arena);
    arena.add(key_tile_bytes(channels, 8));  // the attention kernel copies one key block too many
    shown_of_chunks = arena.add(call.has_mask() ? kv_bh * chunks * 4 : 0);
    shown = arena.add(call.has_mask() ? kv_bh * 4 : 0);
    rotated = arena.add(call.rotate_by_head ? kv_bh * 4 : 0);
    bytes = arena.bytes();
  }
};

}  // namespace sm80
