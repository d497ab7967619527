// Algorithm 1 of the SageAttention2 paper with mma.sync: one block of threads computes 128 query rows of one head.
//
// A step takes one key block. begin_step waits for its K and starts the copies (cp.async) that run beside the step.
// Then P, packed in registers, and the row sums are computed from S = Q K^T. end_step adds P V to the output. There are
// three kinds of steps:
//   full_step       any key block: causal limits, masks and token terms; rescales where a row maximum grows
//   quick_step      P of 16 bits by the row maxima so far (E124), where no query is limited. If a P is too large, a
//                   full_step ends the step that has begun
//   unlimited_step  of INT8, whose P needs the maxima of each key block: a full_step without limits and token terms
// Each kind has a loop of its own, so that its instructions lie together and the rare ones apart. One loop for all was
// 2 to 6 % slower in INT8 (E153), and has other orders of the instructions in 16 bits (E155).
//
// Shared memory has two stages of K with its scales and key bias: one is worked on while the next key block is copied
// into the other. V has one stage, copied while its step computes P, so that end_step waits for it; or two, and is
// copied a step ahead with its K (E154). E4M3 has one stage of both and full steps alone: V is copied beside S and P,
// K of the next step beside P V.
#pragma once

#include "sm80/epilogue.cuh"
#include "sm80/item.cuh"
#include "sm80/kernels.h"
#include "sm80/softmax.cuh"
#include "sm80/token_terms.cuh"
#include "sm80/values.cuh"

namespace sm80 {

template <int kHeadDim, int kBits, class Pv, MaskPolicy kMask>
class Attention : WarpQueries {
  static constexpr bool kHasKeyBias = includes(kMask, MaskPolicy::key_bias);
  static constexpr bool kHasRowBias = includes(kMask, MaskPolicy::row_bias);
  static constexpr int kThreads = attention_threads(kHeadDim);
  static constexpr int kTiles = kQueryBlock / (kThreads / 2);  // 16-row tiles of a warp
  static constexpr int kQBytes = query_tile_bytes(kHeadDim, kBits);
  static constexpr int kKBytes = key_tile_bytes(kHeadDim, kBits);
  static constexpr int kVBytes = value_tile_bytes(kHeadDim, Pv::kVBytes);
  static constexpr int kQScales = query_scales(kBits);
  // Of V in two stages, the next is copied with its K.
  static constexpr int kValueStages = value_stages(Pv::kOfKeyBlock, kHeadDim);
  static constexpr bool kCopiesValuesAhead = kValueStages == 2;
  static constexpr SharedLayout kLayout{kHeadDim, kBits, Pv::kVBytes, Pv::kKeyStages, kValueStages};
  static constexpr int kKAt = kLayout.k, kVAt = kLayout.v, kBiasAt = kLayout.bias;
  static constexpr int kKScalesAt = kLayout.k_scale, kQScalesAt = kLayout.q_scale;
  static constexpr int kQTileWords = kQBytes / (8 * 16);  // 16-byte words of 16 queries
  static constexpr int kGroups = 4;                       // of 8 keys whose scores the quick step computes at once
  static_assert(kQueryBlock == kListTile, "block lists are for blocks of queries");
  using Terms = ScoreTerms<kMask>;
  static constexpr bool kHasQuickStep = Pv::kHasQuickStep && !kHasRowBias;
  static constexpr bool kHasUnlimitedStep = Pv::kOfKeyBlock && !kHasRowBias;
  // Where the warps sync, instructions stay in order: loads are not moved far ahead, which costs registers. Which order
  // is the fastest was measured (E155).
  static constexpr bool kHasRegisters = kHeadDim == 128 && kHasQuickStep && !Pv::kTwoLevels;
  static constexpr int kProductSync = !kHasRegisters ? 4 : kHasKeyBias ? 8 : 0;  // after so many products, or never

 public:
  static __device__ __forceinline__ void run(const AttentionParams& p) {
    extern __shared__ __align__(16) unsigned char shared[];
    __shared__ Item item;
    if (threadIdx.x == 0) item = item_of_block<kHeadDim, kBits, Pv>(p);
    __syncthreads();
    Attention(p, item, shared).compute();
  }

 private:
  __device__ __forceinline__ Attention(const AttentionParams& params, Item& work, unsigned char* memory)
      : WarpQueries{work, int(threadIdx.x % 32), int(threadIdx.x / 32 * kTiles)}, p(params), shared(memory) {}

  __device__ __forceinline__ void compute() {
    copy<kQBytes>(0, item.q);
    copy<kQScales * 4>(kQScalesAt, item.q_scale);
    int key_block = item.first_key_block;
    stage = 0;
    copy_keys(item.k, item.k_scale, key_block, stage);
    if constexpr (kCopiesValuesAhead) copy_values(item.v, key_block, stage);
    if constexpr (Pv::kOfKeyBlock) v_tile_scale = __ldg(item.v_tile_scale + key_block);
    output.clear();
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) rows[tile].clear();
    if constexpr (Pv::kKeyStages == 2) {
      steps_of_two_stages(key_block);
    } else {
      steps_of_one_stage(key_block);
    }
    cp_async_wait<0>();
    Epilogue<Pv, kHeadDim, kTiles>(p, *this, rows, output).store();
  }

  __device__ __forceinline__ void steps_of_two_stages(int key_block) {
    int next = 0;
    bool has_begun = false;  // the step of `key_block`, which ended without its P
    while (key_block < item.key_blocks) {
      if constexpr (kHasUnlimitedStep) {
        while (key_block < item.unlimited_key_blocks && !has_token_terms()) {
          next = begin_step(key_block);
          unlimited_step();
          end_step(next);
          key_block = next;
        }
        if (key_block >= item.key_blocks) break;
      }
      if (!has_begun) next = begin_step(key_block);
      full_step(key_block);
      end_step(next);
      key_block = next;
      if constexpr (kHasQuickStep) {  // now there are maxima to go by
        has_begun = false;
        while (key_block < item.unlimited_key_blocks) {
          next = begin_step(key_block);
          if (!quick_step()) {
            has_begun = true;
            break;
          }
          end_step(next);
          key_block = next;
        }
      }
    }
  }

  __device__ __forceinline__ void steps_of_one_stage(int key_block) {
    while (key_block < item.key_blocks) {
      cp_async_wait<0>();
      __syncthreads();  // K is there, nobody reads the last V any more
      // By one thread, since all need their registers.
      if (threadIdx.x == 0) item.next_key_block = item.key_block_after(key_block);
      copy_values(item.v, key_block);
      full_step(key_block);
      cp_async_wait<0>();
      __syncthreads();  // V is there, nobody reads K any more
      key_block = item.next_key_block;
      copy_keys(item.k, item.k_scale, key_block, 0);
      output.template add_product<kProductSync>(packed, values());
    }
  }

  // A barrier of all threads, which warps may meet at different places of the code: one whose quick step fails leaves
  // that loop alone. __syncthreads() must be the same one for all.
  static __device__ __forceinline__ void sync_warps() { asm volatile("barrier.sync.aligned 0;" ::: "memory"); }

  // Waits for K of a key block and has the copies begin that go on beside its step. Returns the next key block.
  __device__ __forceinline__ int begin_step(int key_block) {
    // What the item tells is read while the warp waits for others.
    const unsigned char *k = item.k, *v = item.v;
    const float* k_scale = item.k_scale;
    const int next = item.key_block_after(key_block);
    cp_async_wait<0>();
    sync_warps();  // K is there, nobody reads the last V any more
    if constexpr (!kCopiesValuesAhead) copy_values(v, key_block);
    copy_keys(k, k_scale, next, kLayout.stage - stage);
    if constexpr (kCopiesValuesAhead) copy_values(v, next, kLayout.stage - stage);
    return next;
  }
  // P V of the key block, whose P is `packed`.
  __device__ __forceinline__ void end_step(int next) {
    // After the last key block it reads past this head's, as copy_keys does.
    if constexpr (Pv::kOfKeyBlock) v_tile_scale = __ldg(item.v_tile_scale + next);
    if constexpr (!kCopiesValuesAhead) {
      cp_async_wait<1>();
      sync_warps();  // V is there, nobody reads K any more
    }
    output.template add_product<kProductSync>(packed, values());
    stage = kLayout.stage - stage;
  }

  // Where the full step is rare, it converts, which scales of any size allow. With terms it would save nothing.
  using FullNumbers = ScoreNumbers<kHeadDim, !Terms::kNone || kHasQuickStep>;

  // P and row sums of one key block; rescales where a row maximum grows.
  __device__ __forceinline__ void full_step(int key_block) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      int scores[1][8][4];
      integer_scores<kHeadDim, kBits>(scores, queries(tile), kQTileWords, keys(), FullNumbers::kStart);
      probabilities<true>(scores[0], key_block, tile);
    }
  }

  // P and row sums of one key block to all keys of which each query may attend.
  __device__ __forceinline__ void unlimited_step() {
    // K is read once for all tiles of the warp: their scores take the registers that the product needs afterwards.
    int scores[kTiles][8][4];
    integer_scores<kHeadDim, kBits>(scores, queries(0), kQTileWords, keys(), FullNumbers::kStart);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) probabilities<false>(scores[tile], 0, tile);
  }

  // P and row sums of 16 queries and one key block, by its row maxima.
  template <bool kLimited>
  __device__ __forceinline__ void probabilities(const int (&scores)[8][4], int key_block, int tile) {
    using Numbers = FullNumbers;
    float scale[2];
    scales_of_rows(scale, tile);
    float zero = Numbers::kZero;
    float x[8][4];
    if constexpr (!Terms::kNone) __syncwarp();  // keeps instructions, and so registers, apart
    Terms::template apply<Numbers>(x, scores, scale, key_terms());
    if (kLimited && has_token_terms()) token_terms(key_block).template add<Numbers, Terms::kNone>(x, scale, zero);
    const KeyLimits limits = {key_block * kKeyBlock + 2 * (lane % 4), first_query(tile), p.sizes.kv_length, p.causal};
    if constexpr (kHasRowBias) limits.add_mask(x, p.mask, item.mask_offset, p.sizes.q_length);
    if (kLimited && key_block * kKeyBlock + kKeyBlock > limits.limit(0)) limits.mask_tail(x);
    float largest[2];
    row_maxima<Pv::kOfKeyBlock>(largest, x);
    if constexpr (Terms::kNone) {
      largest[0] = Numbers::scaled(largest[0], scale[0], zero);
      largest[1] = Numbers::scaled(largest[1], scale[1], zero);
    }
    if constexpr (Pv::kOfKeyBlock) {
      largest[0] = quad_max_nan(largest[0]);
      largest[1] = quad_max_nan(largest[1]);
    }
    float factor[2];
    if (rows[tile].template update<Pv::kMaximumSlack>(largest, factor)) output.rescale(tile, factor);
    float base[2] = {rows[tile].base[0], rows[tile].base[1]};
    if constexpr (Pv::kOfKeyBlock) {
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        base[row] = max_nan(largest[row] - Pv::kLog2OfLargest, kLowest);
        output.block_factor[tile][row] = exp2_approx(base[row] - rows[tile].base[row] + (149.f + Pv::kLog2OfUnit));
        output.value_factor[tile][row] = output.block_factor[tile][row] * fabsf(v_tile_scale);
      }
    }
    const float offset[2] = {Numbers::offset(scale[0], -base[0], zero), Numbers::offset(scale[1], -base[1], zero)};
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        x[j][i] = exp2_approx(Terms::kNone ? fmaf(x[j][i], scale[i / 2], offset[i / 2]) : x[j][i] + offset[i / 2]);
    }
    Pv::pack(packed[tile], x);
    float sum[2];
    Pv::row_sums(sum, x, packed[tile]);
    if (kLimited && has_token_terms()) {
      float without_terms[2];
      token_terms(key_block).row_sums_without(without_terms, x);
#pragma unroll
      for (int row = 0; row < 2; ++row) output.block_factor[tile][row] *= 0x1p-149f;  // these sums are no bits
      output.add_row_sums(tile, without_terms, sum);
    } else {
      output.add_row_sums(tile, sum, sum);
    }
  }

  // P and row sums of one key block by the running maxima as they are: most scores stay below them, and P of 16 bits
  // has room for those that do not. Without maxima, limits and rescaling it is the shorter step. False, for the whole
  // warp, where a P was too large; then nothing has happened.
  __device__ __forceinline__ bool quick_step() {
    float sum[kTiles][2];
    if (kHasRegisters && !kHasKeyBias && !__all_sync(0xffffffffu, true)) return false;  // orders instructions (E155)
    quick_probabilities(sum);
    bool fits = true;  // not where a sum is NaN
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile)
      fits = fits && sum[tile][0] <= Pv::kLargestRowSum && sum[tile][1] <= Pv::kLargestRowSum;
    if (!__all_sync(0xffffffffu, fits)) return false;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) output.add_row_sums(tile, sum[tile]);
    return true;
  }

  __device__ __forceinline__ void quick_probabilities(float (&sum)[kTiles][2]) {
    using Numbers = ScoreNumbers<kHeadDim, kBits == 4>;
    float scale[kTiles][2], offset[kTiles][2];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      scales_of_rows(scale[tile], tile);
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        offset[tile][row] = Numbers::offset(scale[tile][row], -rows[tile].base[row]);
        sum[tile][row] = 0.f;
      }
    }
#pragma unroll
    for (int group = 0; group < 8; group += kGroups) {
      int scores[kTiles][kGroups][4];
      if (kHeadDim != 128 && group > 0) __syncwarp();  // for fewer registers (E155)
      integer_scores<kHeadDim, kBits>(scores, queries(0), kQTileWords, keys() + group * (kKBytes / (8 * 16)),
                                      Numbers::kStart);
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
        for (int pair = 0; pair < kGroups / 2; ++pair) {
          float4 terms;
          if constexpr (kHasKeyBias) terms = key_terms()[(group / 2 + pair) * 4];
          float x[2][4];
#pragma unroll
          for (int odd = 0; odd < 2; ++odd) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              const float score = Numbers::number(scores[tile][2 * pair + odd][i]);
              float added = offset[tile][i / 2];
              if constexpr (kHasKeyBias) added += term_of_key(terms, odd, i % 2);
              x[odd][i] = exp2_approx(fmaf(score, scale[tile][i / 2], added));
              sum[tile][i / 2] += x[odd][i];
            }
          }
          Pv::pack_pair(packed[tile][group / 2 + pair], x[0], x[1]);
        }
      }
    }
  }

  // Of the V that is worked on.
  __device__ __forceinline__ bool has_token_terms() const {
    if constexpr (Pv::kOfKeyBlock) return TokenTerms::marked_by(v_tile_scale);
    return false;
  }
  __device__ __forceinline__ TokenTerms token_terms(int key_block) const { return TokenTerms(item, key_block, lane); }

  template <int kBytes>
  __device__ __forceinline__ void copy(int at, const void* from) const {
    const unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(shared + at)) + threadIdx.x * 16;
    const unsigned char* source = static_cast<const unsigned char*>(from) + threadIdx.x * 16;
#pragma unroll
    for (int offset = 0; offset < kBytes; offset += kThreads * 16) {
      if (kBytes - offset >= kThreads * 16 || threadIdx.x * 16 < kBytes - offset)
        cp_async(to + offset, source + offset);
    }
  }

  // Each a group of cp.async. `at`: the offset of a stage. The copy after the last key block reads past this head's
  // tiles, inside the workspace; nothing uses it.
  __device__ __forceinline__ void copy_keys(const unsigned char* k, const float* k_scale, int key_block, int at) const {
    copy<kKBytes>(kKAt + at, k + i64(key_block) * kKBytes);
    copy<kKeyGroups * 4>(kKScalesAt + at, k_scale + key_block * kKeyGroups);
    if constexpr (kHasKeyBias) copy<kKeyBlock * 4>(kBiasAt + at, item.bias + key_block * kKeyBlock);
    cp_async_commit();
  }
  __device__ __forceinline__ void copy_values(const unsigned char* v, int key_block, int at = 0) const {
    copy<kVBytes>(kVAt + at, v + i64(key_block) * kVBytes);
    cp_async_commit();
  }

  // This lane's words in shared memory: of 16 queries, of the key block that is worked on, and of its bias.
  __device__ __forceinline__ const uint4* queries(int tile) const {
    return reinterpret_cast<const uint4*>(shared) + (first_tile + tile) * kQTileWords + lane;
  }
  __device__ __forceinline__ const uint4* keys() const {
    return reinterpret_cast<const uint4*>(shared + kKAt + stage) + lane;
  }
  __device__ __forceinline__ const uint4* values() const {
    return reinterpret_cast<const uint4*>(shared + kVAt + (kCopiesValuesAhead ? stage : 0)) + lane;
  }
  __device__ __forceinline__ const float4* key_terms() const {
    return reinterpret_cast<const float4*>(shared + kBiasAt + stage) + lane % 4;
  }

  // Of this thread's two rows of a tile with its keys. Not zero, so that -inf times the scale stays -inf.
  __device__ __forceinline__ void scales_of_rows(float (&scale)[2], int tile) const {
    const float* q_scale = reinterpret_cast<const float*>(shared + kQScalesAt);
    const float* k_scale = reinterpret_cast<const float*>(shared + kKScalesAt + stage);
    if constexpr (kQScales == kQueryBlock) {
      const float* of_tile = q_scale + (first_tile + tile) * 16 + lane / 4;
      scale[0] = max_nan(of_tile[0] * k_scale[lane % 4], kSmallestScale);
      scale[1] = max_nan(of_tile[8] * k_scale[lane % 4], kSmallestScale);
    } else {
      scale[0] = scale[1] =
          max_nan(q_scale[(first_tile + tile) / 2 * 8 + lane / 4] * k_scale[lane % 4], kSmallestScale);
    }
  }

  const AttentionParams& p;
  unsigned char* shared;
  int stage;           // offset of the keys that are worked on from those of the first stage
  float v_tile_scale;  // of the V that is worked on, where it has one
  Rows rows[kTiles];
  Output<Pv, kHeadDim, kTiles> output;
  unsigned packed[kTiles][Pv::kSteps][4];
};

}  // namespace sm80
