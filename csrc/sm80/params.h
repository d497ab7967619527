// What the launch code and the kernels of the sm80 family agree on. Plain data, no CUDA headers: both sides include it.
#pragma once

#include "common/call_sizes.h"
#include "common/rotates.h"
#include "common/tile_lists.h"
#include "common/views.h"
#include "sm80/tiles.h"

namespace sm80 {

using namespace common;

struct Sizes : CallSizes {
  int query_blocks, key_blocks;
  int element;  // of out
};

// "slice" is batch * kv_heads + kv_head (of K and V) or batch * q_heads + q_head. channels: head_dim padded to 64, 128,
// 256.
struct StatisticsParams {
  Strided k, v;
  float* partials;  // (K or V, slices, chunks, sum / minimum / maximum, channels)
  float* k_mean;    // (slices, channels)
  float *v_mean, *v_scale;
  int* shown_of_chunks;  // (slices, chunks): keys that the mask does not hide, or null: it cannot hide keys
  int* shown;            // (slices): the same of all chunks
  Mask mask;             // whose hidden keys do not count (common/hidden_keys.cuh)
  Sizes sizes;
  int slices, chunks;
  int smooth_v;
  float v_maximum;    // what the largest element of a channel of V is scaled to
  int powers_of_two;  // V's scales are such: the largest element is scaled to v_maximum or less
  int padding;
};

// Which key heads gain by rotation, from a sample of each (common/rotation_choice.cuh).
struct RotationParams {
  Strided q, k;
  const float* k_mean;
  const int* shown;    // where the mask may hide keys
  int* rotated;        // (slices)
  int* rotated_heads;  // the same for the caller, or null
  Mask mask;
  Sizes sizes;
  int score_bits, padding;
};

struct QuantizeParams {
  Strided q, k, v;
  const float *k_mean, *v_mean, *v_scale;
  unsigned char *q_tiles, *k_tiles, *v_tiles;
  float* q_scale;  // (q slices, query blocks, query_scales(bits)): with softmax scale and log2(e)
  float* k_scale;  // (slices, key blocks, kKeyGroups)
  // Of V in INT8. (slices, key blocks): the largest relative to v_maximum, over all channels; negative where tokens
  // have scales of their own beside it.
  float* v_tile_scale;
  float* v_token_term;  // (slices, padded keys), there: log2 of the tokens' scales; the order is that of key biases
  float* q_mean;        // (q slices, query blocks, channels) when Q is smoothed
  float* lse_shift;     // (q slices, q_length): scale * q . mean(K), or null
  const int* shown;     // (slices): keys that the mask does not hide, or null: it cannot hide keys
  const int* rotated;   // (slices), where heads are rotated each by itself
  Mask mask;            // whose hidden keys are zeros
  int* too_large;       // set to 1 when a scale of v_tile_scale would exceed the largest; or null
  Sizes sizes;
  i64 query_tiles, key_tiles;  // of all slices: blocks of the grid for Q, K and again key_tiles for V, in this order
  int first_query_block, taken_query_blocks;  // of each slice's blocks, those that are quantized
  int first_key_block, taken_key_blocks;
  float scale;
  float v_maximum;           // as in StatisticsParams
  float largest_tile_scale;  // of v_tile_scale
  int other_product;         // V is for the kernel's other product
  Rotates rotates;
  int padding;
};

// Rows of the key bias hold, in units of log2, what is added to the scores of each key: -inf past the last key. Keys
// are in the order of key_at_position (sm80/layout.cuh).
struct DeltaParams {
  Strided k;
  const float *k_mean, *q_mean;
  const int* shown;  // (slices): keys that the mask does not hide, or null: it cannot hide keys
  float* bias;       // (work items of this launch, padded keys)
  Mask mask;         // one that broadcasts over queries is added here
  Sizes sizes;
  i64 first_work, works;
  int first_slice;  // q slice of first_work
  float scale;      // softmax scale * log2(e)
};

struct KeyBiasParams {
  float* bias;  // (rows, padded keys)
  Mask mask;
  int heads;  // rows are batch * heads + head
  int kv_length, padded_keys, padding;
};

struct AttentionParams {
  const unsigned char *q_tiles, *k_tiles, *v_tiles;
  const float *q_scale, *k_scale, *v_scale, *v_mean;
  const float *v_tile_scale, *v_token_term;  // as in QuantizeParams
  const float* bias;
  i64 bias_batch_stride, bias_head_stride, bias_work_stride;
  const float* lse_shift;
  Mask mask;
  Strided out;
  float* lse;      // (q slices, q_length) or null
  int* nonfinite;  // set to 1 when a value of out is NaN or infinite, or null
  Sizes sizes;
  i64 first_work, works;  // work items (q slice, query block) of this launch
  PreparedLists lists;    // linked, or null
  int causal, padding;
};

}  // namespace sm80
