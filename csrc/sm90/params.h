// What the launch code and the kernels of the sm90 family agree on. Plain data, no CUDA headers: both sides include it.
#pragma once

#include "common/rotates.h"
#include "common/tensor_map.h"
#include "common/tile_lists.h"
#include "common/views.h"

namespace sm90 {

using namespace common;
using u64 = unsigned long long;

constexpr int kVTokens = 128;   // tokens that one block of the V pass transposes
constexpr int kVChannels = 32;  // channels of V^T whose rows are permuted among themselves

// Threads of a block.
constexpr int kStatisticsThreads = 256, kQuantizeThreads = 256;
constexpr int kDeltaThreads = 128;    // one key each
constexpr int kDeltaTiles = 16;       // query tiles of a block of the smooth-Q correction: they share one reading of K
constexpr int kMaxClusterBlocks = 8;  // that share a head

// The one pass over K and V: a block holds one or two units of 32 KB of a head. One gives each thread eight loads; with
// two, three blocks fit a multiprocessor.
constexpr int kUnitLoads = 8, kMostUnits = 2;
constexpr int kUnitBytes = kQuantizeThreads * kUnitLoads * 16;
// Tokens of a unit, in 16 bits.
constexpr int unit_tokens(int padded_head_dim) { return kUnitBytes / 2 / padded_head_dim; }

// The part of the work that one launch of the attention kernel does: heads x query tiles.
struct Chunk {
  int first_head, heads;  // of batch * q_heads
  int first_tile, tiles;  // query tiles of each of these heads
};

// The order of a dense causal call's work tiles, which differ in length. The heads of a group take turns, its longest
// work tiles first. So a round, in which every block of the grid takes one, has work tiles of about one length, and
// every other round is in reverse: who had a longer one gets a shorter one. Groups are small, so that L2 holds their K
// and V, and begin with a round, whose places all have a work tile in the first group.
struct CausalOrder {
  int heads;   // of a group
  int places;  // of a group, in whole rounds: the last ones have no work tile
  int groups;
};

// How many blocks of the one pass are over with a head's K and V.
struct alignas(8) BlocksOver {
  int k, v;
};
// What a mask for all queries and heads leaves of a head's keys.
struct alignas(8) KeysLeft {
  int end;        // behind the last one that it does not hide
  int unchanged;  // how many it leaves as they are
};
// What attention kernels read of a head: of kernels that run beside the one pass each part at once.
struct Prepared {
  BlocksOver blocks;
  KeysLeft keys;
};

// What the statistics say of a head, in calls that choose the rotation of each and in those whose mask may hide keys.
struct alignas(8) HeadChoices {
  int shown;  // keys that a mask for all queries and heads does not hide; 0 where it hides all (common/hidden_keys.cuh)
  int rotation;  // of RotationOfHead
};
enum RotationOfHead { kUndecided = 0, kNotRotated = 1, kRotated = 2 };

// `padding` is named and 0, so that a kernel's parameters are the same bytes on every platform.
struct AttentionParams {
  TensorMap q_map, k_map, v_map;  // (head_dim, q_length, batch * q_heads) and so on, bytes
  const float* q_scale;    // (batch * q_heads, q_scale_rows): of int8 Q, with softmax scale and log2(e) folded in
  const float* k_scale;    // (batch * kv_heads, k_scale_blocks, 4); negative where the mask changes a key of the block
  const float* v_scale;    // (batch * kv_heads, head_dim)
  const float* v_mean;     // likewise; zeros without smooth V
  const float* lse_shift;  // (batch * q_heads, q_length): q . mean(K) * scale, or null
  const float* delta_s;    // (tiles of the chunk, kv_length) in units of log2, or null: smooth Q
  Mask mask;
  Strided out;
  float* lse;      // (batch * q_heads, q_length) or null
  int* nonfinite;  // set to 1 when a value of out is NaN or infinite, or null
  Chunk chunk;
  int q_scale_rows, k_scale_blocks;  // q_length and key blocks of 64, padded so that every tile reads whole
  int q_heads, kv_heads, q_length, kv_length, head_dim;
  int element;                 // of out
  PreparedLists lists;         // of listed kernels alone
  const HeadChoices* choices;  // (batch * kv_heads): of kernels that rotate Q alone
  const int* dead;  // whether the lists leave out a tile, where that decides which of two kernels runs; or null
  float scale;      // softmax scale, for kernels that quantize Q
  CausalOrder causal;
  const Prepared* prepared;  // (batch * kv_heads)
  int prepared_blocks;       // of K and of V, when a head is prepared
  int padding;
  int more_padding[10];
};
static_assert(sizeof(AttentionParams) == 704, "the padding fills the alignment of TensorMap");

struct StatisticsParams {
  Strided k, v;
  float *k_mean, *v_mean, *v_scale, *v_inverse;  // (batch * kv_heads, head_dim)
  Prepared* prepared;                            // (batch * kv_heads)
  int kv_heads, kv_length, head_dim;
  float head_room;  // how many times as large V may be elsewhere
  int smooth_v;
  int cluster_blocks;  // that share a head
};

// Of kernels that choose the rotation of a head, or whose mask may hide keys. These have parameters of their own, so
// that others stay what they are.
struct ChoosingStatisticsParams : StatisticsParams {
  HeadChoices* choices;
  Mask mask;  // whose hidden keys do not count
  Strided q;  // of which a sample decides
  int q_heads, q_length;
  int score_bits;
  Rotates rotates;
  int* rotated_heads;  // (batch * kv_heads): of those that choose, which they told the caller; or null
};

struct QuantizeParams {
  Strided q, k, v;
  const float *k_mean, *v_mean, *v_inverse;
  signed char *q_int8, *k_int8;  // (heads, length, row_bytes)
  unsigned char* v_fp8;  // (heads, v_rows, key_row_bytes): transposed, keys permuted within 16, channels within 32
  float *q_scale, *k_scale;
  float* lse_shift;  // or null
  float* q_mean;     // (batch * q_heads, query tiles, head_dim): smooth Q, 4-bit only
  Prepared* prepared;
  int* too_large;  // set to 1 when V leaves its head room; or null
  int q_heads, kv_heads, q_length, kv_length, head_dim;
  int first_token;  // of those that are quantized
  int row_bytes, key_row_bytes, v_rows, q_scale_rows, k_scale_blocks;
  int q_blocks, k_blocks, v_blocks;  // blocks of the grid for each of the three, in this order, per head
  int q_slices, kv_slices;           // batch * q_heads, batch * kv_heads
  Mask mask;                         // whose keys mark their blocks
  int smooth_v;
  float scale;  // softmax scale
};

struct ChoosingQuantizeParams : QuantizeParams {
  const HeadChoices* choices;
  const int* rotated_heads;  // (batch * kv_heads): as given
  Rotates rotates;
  int more_padding;
};

template <class Statistics, class Quantize>
struct OnePassParamsOf {
  Statistics statistics;
  Quantize quantize;
  int tensors;  // 2: clusters take K and V in turns; 1: K alone
  int units;    // of a block's share
};
using OnePassParams = OnePassParamsOf<StatisticsParams, QuantizeParams>;
using ChoosingOnePassParams = OnePassParamsOf<ChoosingStatisticsParams, ChoosingQuantizeParams>;

struct DeltaParams {
  Strided k;
  const float *k_mean, *q_mean;
  float* delta_s;
  Chunk chunk;
  int q_heads, kv_heads, kv_length, head_dim, query_tiles;
  float scale;  // softmax scale * log2(e)
};
struct HidingDeltaParams : DeltaParams {
  Mask mask;  // whose hidden keys are zeros
  const HeadChoices* choices;
};

}  // namespace sm90
