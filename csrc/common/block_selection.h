// Selection of key blocks: means of 16 tokens of Q and K (sub-pools), scores of blocks from them, lists from scores,
// and a tail of pooled keys and values for the blocks that are in no list. Plain data, no CUDA headers: launch code and
// kernels include it. `padding` is named and 0, so that a kernel's parameters are the same bytes on every platform.
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
  int padding;
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

// Means of the tokens of each key block, from those of its sub-pools.
struct BlockMeanParams {
  const void* pools;  // as PoolParams has them
  void* means;        // bf16 (batch * heads, mean_rows * copies, channels): zeros behind the last block
  int length, channels;
  int pool_rows, mean_rows;
  int copies;  // of each mean, one behind the other
  int padding;
};

// The tail.

constexpr int kTailWarps = 4;
constexpr int kTailThreads = 32 * kTailWarps;
constexpr int kTailPools = 16 * kTailWarps;              // sub-pools of Q that a thread block owns
constexpr int kTailBlocks = kTailPools / kPoolsOfBlock;  // and the blocks that they are
constexpr int kTailQueries = kTailPools * kPoolTokens;
constexpr int tail_keys(int channels) { return channels <= 128 ? 64 : 32; }  // block means that a step takes
constexpr int kTailMultiple = 64;                                            // of the rows of block means
// Q's sub-pools and a step of block means, where the numerators take their place afterwards.
constexpr int tail_tile_bytes(int channels) {
  const int operands = (kTailPools + 2 * tail_keys(channels)) * channels * 2, numerators = kTailPools * channels * 4;
  return operands > numerators ? operands : numerators;
}
// Behind them of each query its share of the score that all keys have in common, of each sub-pool the maximum and the
// denominator, and of each query block a bit for each key block.
constexpr int tail_shared_bytes(int channels, int key_blocks) {
  return tail_tile_bytes(channels) + (kTailQueries + 2 * kTailPools + kTailBlocks * bitmap_words(key_blocks)) * 4;
}

struct TailParams {
  Strided q, out;                       // out is corrected in place
  float* lse;                           // (batch, q_heads, q_length), too
  const float* center;                  // what was taken from K's means
  const void *key_means, *value_means;  // as BlockMeanParams has them
  const short* lists;                   // as PrepareListsParams has them
  i64 list_batch_stride, list_head_stride;
  int q_heads, kv_heads, q_length, kv_length, head_dim;
  int mean_rows, query_blocks, key_blocks;
  float factor;  // of scores, to units of log2
  int padding;
};

}  // namespace common
