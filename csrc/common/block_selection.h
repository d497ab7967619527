// Selection of key blocks: means of 16 tokens of Q and K (sub-pools), scores of blocks from them, and lists from
// scores. Plain data, no CUDA headers: launch code and kernels include it.
#pragma once

#include "common/tile_lists.h"
#include "common/views.h"

namespace common {

constexpr int kPoolTokens = 16;
constexpr int kPoolsOfBlock = kListTile / kPoolTokens;

// Means of tokens.

constexpr int kPoolThreads = 256;
constexpr int kCenterTokens = 64;  // spread over K: their mean is taken from all sub-pools

struct PoolParams {
  Strided tokens;
  float* center;  // (batch * heads, channels), or null: nothing is taken
  void* pools;    // bf16 (batch * heads, pool_rows, channels): zeros behind the last sub-pool and the last channel
  int heads, length, head_dim, channels;
  int pool_rows;
  float factor;  // of the means
};

// Scores of blocks.

constexpr int kScoreWarps = 4;
constexpr int kScoreThreads = 32 * kScoreWarps;
constexpr int kScoreKeys = 64;  // sub-pools of K that a step takes
constexpr int kScoreStages = 2;
constexpr int kScoreBlocksOfSm = 3;  // thread blocks that a multiprocessor can hold at head_dim 64 and 128
// Tiles of 16 sub-pools of Q that a warp owns. At head_dim 256 shared memory holds no more.
constexpr int score_row_tiles(int channels) { return channels <= 128 ? 2 : 1; }
constexpr int score_rows(int channels) { return kScoreWarps * 16 * score_row_tiles(channels); }
constexpr int score_shared_bytes(int channels) {
  return (score_rows(channels) + kScoreStages * kScoreKeys) * channels * 2;
}
// What a thread block keeps of a step: of each row the exponentials' sum over each key block, in bf16.
constexpr i64 score_step_bytes(int channels) { return i64(score_rows(channels)) * (kScoreKeys / kPoolsOfBlock) * 2; }

struct BlockScoreParams {
  const void *query_pools, *key_pools;  // as PoolParams has them; query's are in units of log2, with the softmax scale
  void* sums;                           // of each thread block: key_steps * score_step_bytes
  float* scores;                        // (batch * q_heads, query_blocks, key_blocks)
  int q_heads, kv_heads, q_length, kv_length;
  int query_rows, key_rows;  // pool_rows of both
  int query_blocks, key_blocks;
  int works;  // of score_rows sub-pools of Q
};

// Lists from scores.

struct BlockListParams {
  const float* scores;          // (batch, heads, query_blocks, key_blocks)
  const float* threshold;       // (batch, heads), or null
  const unsigned char* always;  // (key_blocks), or null
  const unsigned char* dense;   // (query_blocks), or null
  short* lists;                 // (list_batch, heads, query_blocks, 1 + key_blocks)
  int list_batch;               // batch, or 1: what is active for any of it
  int batch, heads, query_blocks, key_blocks;
  int count;  // so many blocks with the highest scores, where there is no threshold
};

}  // namespace common
