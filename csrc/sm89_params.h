// What the launch code and the kernels of the sm89 family agree on. Plain data, no CUDA headers: both sides include it.
#pragma once

#include "common/views.h"

namespace sm89 {

using namespace common;

constexpr int kQueryBlock = 128;  // b_q of the paper: rows of a work item, and of a mean of smoothed Q
constexpr int kKeyBlock = 64;     // b_k: keys that share a set of K scales and one update of the online softmax
constexpr int kQueryGroups = 32;  // per-thread groups of a Q block: 8 for each of the c_w = 4 warps
constexpr int kKeyGroups = 4;     // per-thread groups of a K block

constexpr int kStatisticsTokens = 512;  // tokens that one block of the statistics pass sums
constexpr int kStatistics = 3;          // sum, largest, largest of the negated
constexpr int kDeltaBlock = 64;         // query blocks, and keys, of a tile of the smooth-Q correction

// Threads of a block.
constexpr int kStatisticsThreads = 256, kQuantizeThreads = 256, kDeltaThreads = 128, kBiasThreads = 256;

// Sizes of the tiles in bytes. Q and K tiles hold bits / 8 bytes an element, V tiles v_bytes (1: E4M3, 2: fp16).
constexpr int query_tile_bytes(int head_dim, int bits) { return kQueryBlock * head_dim * bits / 8; }
constexpr int key_tile_bytes(int head_dim, int bits) { return kKeyBlock * head_dim * bits / 8; }
constexpr int value_tile_bytes(int head_dim, int v_bytes) { return kKeyBlock * head_dim * v_bytes; }

constexpr int attention_threads(int head_dim) { return head_dim == 256 ? 256 : 128; }
// Q tile, K tile, V tile, key bias, K scales, Q scales.
constexpr int attention_shared_bytes(int head_dim, int bits, int v_bytes) {
    return query_tile_bytes(head_dim, bits) + key_tile_bytes(head_dim, bits) + value_tile_bytes(head_dim, v_bytes) +
           (kKeyBlock + kKeyGroups + kQueryGroups) * 4;
}

struct Sizes {  // head_dim is a multiple of 8
    int q_heads, kv_heads, q_length, kv_length, head_dim;
    int query_blocks, key_blocks;
    int element;                   // of out
};

// "slice" is batch * kv_heads + kv_head (of K and V) or batch * q_heads + q_head. channels: head_dim padded to 64, 128, 256.
struct StatisticsParams {
    Strided k, v;
    float* partials;       // (K or V, slices, chunks, sum / minimum / maximum, channels)
    float *k_mean;         // (slices, channels)
    float *v_mean, *v_scale;
    Sizes sizes;
    int slices, chunks;
    int smooth_v;
    float v_maximum;  // what the largest element of a channel of V is scaled to
};

struct QuantizeParams {
    Strided q, k, v;
    const float *k_mean, *v_mean, *v_scale;
    unsigned char *q_tiles, *k_tiles, *v_tiles;
    float* q_scale;    // (q slices, query blocks, kQueryGroups): with softmax scale and log2(e)
    float* k_scale;    // (slices, key blocks, kKeyGroups)
    float* q_mean;     // (q slices, query blocks, channels) when Q is smoothed
    float* lse_shift;  // (q slices, q_length): scale * q . mean(K), or null
    Sizes sizes;
    i64 query_tiles, key_tiles;  // of all slices: blocks of the grid for Q, K and again key_tiles for V, in this order
    float scale;
};

// Rows of the key bias hold, in units of log2, what is added to the scores of each key: -inf past the last key. Keys are in
// the order of key_at_position (sm89_tiles.cuh).
struct DeltaParams {
    Strided k;
    const float *k_mean, *q_mean;
    float* bias;  // (work items of this launch, padded keys)
    Mask mask;    // one that broadcasts over queries is added here
    Sizes sizes;
    i64 first_work, works;
    int first_slice;  // q slice of first_work
    float scale;      // softmax scale * log2(e)
};

struct KeyBiasParams {
    float* bias;  // (rows, padded keys)
    Mask mask;
    int heads;  // rows are batch * heads + head
    int kv_length, padded_keys;
};

struct AttentionParams {
    const unsigned char *q_tiles, *k_tiles, *v_tiles;
    const float *q_scale, *k_scale, *v_scale, *v_mean;
    const float* bias;
    i64 bias_batch_stride, bias_head_stride, bias_work_stride;
    const float* lse_shift;
    Mask mask;
    Strided out;
    float* lse;      // (q slices, q_length) or null
    int* nonfinite;  // set to 1 when a value of out is NaN or infinite, or null
    Sizes sizes;
    i64 first_work, works;  // work items (q slice, query block) of this launch
    int causal;
};

}  // namespace sm89
