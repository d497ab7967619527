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

// Lists from scores, or from bits.

struct BlockListParams {
  const float* scores;          // (batch, heads, query_blocks, key_blocks), or null
  const float* threshold;       // (batch, heads), or null
  const int* counts;            // (batch, heads), or null: so many blocks of each row, and those whose score is NaN
  const unsigned char* forced;  // (batch, heads, key_blocks), or null: active beside those
  const unsigned char* always;  // (key_blocks), or null
  const unsigned char* dense;   // (query_blocks), or null
  const unsigned* active;       // (batch, heads, query_blocks, words), or null: what is active, in place of scores
  short* lists;                 // (list_batch, heads, query_blocks, 1 + key_blocks), or null
  unsigned* bits;               // (list_batch, heads, query_blocks, words), or null: what is active, a bit each
  int list_batch;               // batch, or 1: what is active for any of it
  int batch, heads, query_blocks, key_blocks;
  int count;  // so many blocks with the highest scores, where there is neither a threshold nor counts
};

// What heads lose by the blocks that they leave out, on some of their rows, and how many blocks each computes.

constexpr int kSampleWarps = 4, kSampleThreads = 32 * kSampleWarps;

struct SampleParams {
  Strided q;
  const i64* spread;  // (groups of heads, spread_rows): tokens
  const i64* pools;   // (unlike, pools_of_part): the first tokens of sub-pools among which an unlike row is looked for
  int* tokens;        // (batch, heads, spread_rows + unlike)
  void* rows;         // of q, (batch, heads, spread_rows + unlike, head_dim)
  int heads, head_dim;
  int heads_of_group, spread_rows;
  int unlike, pools_of_part;
};

constexpr int kMostCuts = 12;
// Of a row: squared norms of what it loses at each cut and by the blocks to compare, without and with a tail; and of
// its output.
constexpr int kRowNorms = 2 * (kMostCuts + 1) + 1;
constexpr int kMassThreads = 512;
constexpr int kMostRows = kMassThreads;
constexpr int kChoiceThreads = 64;

// Outputs of rows from single key blocks, as an attention of 128 keys gives them. A head is one of all of the batch.
struct RowParams {
  const void *outs, *last_outs;   // (full blocks, heads, rows, head_dim), and those of a ragged last block
  const float *lses, *last_lses;  // (full blocks, heads, rows), likewise
  i64 out_block_stride, out_head_stride, out_row_stride, last_head_stride, last_row_stride;  // in elements
  Strided q;
  const int* tokens;            // (all heads, rows)
  const float* scores;          // (all heads, query_blocks, key_blocks)
  const unsigned char* always;  // (key_blocks), or null
  const unsigned* compared;     // (all heads, query_blocks, words), or null: active blocks to compare
  const float* center;          // with a tail, as TailParams has them; else null
  const void *key_means, *value_means;
  unsigned char* forced;  // (all heads, key_blocks): blocks that are active at every cut
  float* totals;          // (all heads, rows): the LSE, in units of log2
  float* norms;           // (all heads, rows, kRowNorms)
  int first_head, heads;  // of this launch
  int q_heads, group;     // heads of one entry of the batch, and of one head of K
  int rows, head_dim, q_length, kv_length;
  int key_blocks, mean_rows;
  int counts[kMostCuts];  // of active blocks at each cut, falling
  int cuts;
  float popular;  // blocks whose probability adds up to this over the rows are active at every cut
  float scale;    // of scores, to units of log2
  int padding;
};
// Of each block its probability and that by its mean, its score and its place in their order; of each cut what blocks
// between it and the next add up to; the mean of Q.
constexpr int row_shared_bytes(int channels, int key_blocks) {
  return (4 * key_blocks + (2 * kMostCuts + 1) * channels) * 4;
}

struct CutParams {
  const float* norms;                     // as RowParams has them
  const unsigned char* compared_by_tail;  // (heads), or null
  int* chosen;                            // (heads): of active blocks
  unsigned char* by_tail;                 // (heads)
  float *errors, *compared_errors;        // (heads)
  int heads, rows, unlike;                // the last `unlike` rows are not spread
  int counts[kMostCuts];
  int cuts;
  int has_tail;
  float bound;      // below 0: the first cut is taken
  float tail_cost;  // in blocks
  int padding;
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
