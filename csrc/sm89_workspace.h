// How one call of the sm89 family divides its scratch memory and its work. Reads no pointers and no strides.
#pragma once

#include <algorithm>
#include <cstdint>

#include "attention_call.h"
#include "sm89_params.h"

namespace sm89 {

constexpr int64_t kDeltaBytes = int64_t(256) << 20;  // of smooth Q's correction at a time

inline int64_t blocks_of(int64_t value, int64_t block) { return (value + block - 1) / block; }
inline int padded_head_dim(const AttentionCall& call) { return call.head_dim <= 64 ? 64 : call.head_dim <= 128 ? 128 : 256; }

struct Workspace {
  int64_t q_slices, kv_slices, query_blocks, key_blocks, chunks, works;
  int64_t bias_rows;  // of the key bias: work items of a launch (4-bit), or batch * q_heads (8-bit with a mask)
  // Offsets in bytes.
  int64_t q_tiles, k_tiles, v_tiles, q_scale, k_scale, k_mean, v_mean, v_scale, q_mean, lse_shift, partials, bias;
  int64_t bytes = 0;

  Workspace(const AttentionCall& call, int v_bytes) {
    const int64_t channels = padded_head_dim(call);
    q_slices = call.batch * call.q_heads;
    kv_slices = call.batch * call.kv_heads;
    query_blocks = blocks_of(call.q_length, kQueryBlock);
    key_blocks = blocks_of(call.kv_length, kKeyBlock);
    chunks = blocks_of(call.kv_length, kStatisticsTokens);
    works = q_slices * query_blocks;
    const int64_t row_bytes = key_blocks * kKeyBlock * 4;
    bias_rows = call.mask.element == kNone ? 0 : q_slices;
    if (call.bits == 4) bias_rows = std::clamp<int64_t>(kDeltaBytes / row_bytes, 1, works);
    q_tiles = add(works * query_tile_bytes(static_cast<int>(channels), call.bits));
    k_tiles = add(kv_slices * key_blocks * key_tile_bytes(static_cast<int>(channels), call.bits));
    v_tiles = add(kv_slices * key_blocks * value_tile_bytes(static_cast<int>(channels), v_bytes));
    q_scale = add(works * kQueryGroups * 4);
    k_scale = add(kv_slices * key_blocks * kKeyGroups * 4);
    k_mean = add(kv_slices * channels * 4);
    v_mean = add(kv_slices * channels * 4);
    v_scale = add(kv_slices * channels * 4);
    q_mean = add(call.bits == 4 ? works * channels * 4 : 0);
    lse_shift = add(call.lse ? q_slices * call.q_length * 4 : 0);
    partials = add(2 * kv_slices * chunks * kStatistics * channels * 4);
    bias = add(bias_rows * row_bytes);
    add(key_tile_bytes(static_cast<int>(channels), 8));  // the attention kernel copies one key block too many
  }

 private:
  int64_t add(int64_t size) {
    const int64_t offset = bytes;
    bytes += blocks_of(size, 256) * 256;
    return offset;
  }
};

}  // namespace sm89
