// One attention call as plain data: the signature that a plan is made for, and the addresses that a run of it takes.
#pragma once

#include <array>
#include <cstdint>

// Rises whenever what the module takes, or what that means, changes; it is the major number of csrc/VERSION.
constexpr int kAbiVersion = 6;

// Of a BHND tensor in whatever memory order, in elements. The last dimension is contiguous.
struct TensorStrides {
  int64_t batch, head, token;
};

// Of an attention mask (batch, head, query, key). A stride is 0 where the mask broadcasts.
struct MaskLayout {
  int element;  // 0 none, 1 bool (true = attend), 2 fp16, 3 bf16, 4 fp32 (additive)
  int64_t batch_stride, head_stride, query_stride, key_stride;
};

// Block-sparse attention: which blocks of 128 keys each block of 128 queries attends to, int16 (batch, head, query
// block, 1 + key_blocks), the last two contiguous. Entry 0 counts the active key blocks, which follow it. Entries that
// are out of range or stand twice are skipped.
struct BlockMaskLayout {
  int64_t key_blocks;                 // of kv_length, or 0: no block mask
  int64_t batch_stride, head_stride;  // in elements; 0 where the lists are shared
};

// 8b and 4b: INT8 and INT4 scores, P and V as PvFormat says. Precise: INT8 scores, P and V in 16 bits.
enum Mode { k4b = 4, k8b = 8, kPrecise = 16 };
constexpr int score_bits(int mode) { return mode == k4b ? 4 : 8; }

// What P and V are rounded to in 8b and 4b. kPvOfBuild: fp8, or fp16 in builds without it. Mxfp8, in 8b alone: fp8 by
// block-scaled products. Precise has fp16 or bf16.
enum PvFormat { kPvOfBuild = 0, kPvFp8 = 1, kPvFp16 = 2, kPvInt8 = 3, kPvMxfp8 = 4 };

// A preparation may take q, k and v in slices of their tokens, of which they begin with the first. K's mean, V's mean
// and scale, and which heads are rotated are those of the slice from token 0 on, which is prepared first. In FP8 the
// scale leaves room for values of V that are kHeadRoom times as large as that slice's; in INT8 the second scale of a
// block of keys does, up to kTileHeadRoom times. A slice with larger ones sets kNonfinite.
constexpr int64_t kSliceMultiple = 128;       // of tokens that are not the last
constexpr int64_t kLeastSlicedTokens = 8192;  // of a call: fewer have kernels that prepare all of K and V at once
constexpr float kHeadRoom = 16.f, kTileHeadRoom = 4.f;

// All that decides what a call launches, but for the GPU itself.
struct CallSignature {
  TensorStrides q, k, v, out;
  MaskLayout mask;
  BlockMaskLayout block_mask;
  int64_t batch, q_heads, kv_heads, q_length, kv_length;
  int head_dim;
  int element;           // of q, k, v and out: 2 fp16, 3 bf16, 4 fp32
  int mode;              // Mode
  bool rotate;           // Q and K, after smoothing; in 4 bits Q of rotated heads has a scale for each token
  bool rotate_by_head;   // with `rotate`: of those heads alone that gain by it (common/rotation_choice.cuh)
  bool rotate_as_given;  // with `rotate`: of those heads alone that kRotatedHeads names
  bool smooth_v, causal;
  bool has_lse;
  int pv;              // PvFormat
  int pv_accumulator;  // 32 or 16, in bits; 32 with int8 and mxfp8
  float scale;
  int device;
  int64_t first_token, slice_tokens;  // of the slice that a plan prepares, and no more; 0 tokens: it computes the call

  bool is_slice() const { return slice_tokens != 0; }
  bool has_mask() const { return mask.element != 0; }
  bool has_block_mask() const { return block_mask.key_blocks != 0; }
};

// The memory that a run reads and writes.
enum Operand : int {
  kQ,
  kK,
  kV,
  kOut,
  kWorkspace,
  kLse,        // float (batch, q_heads, q_length), contiguous
  kNonfinite,  // int32, set to 1 when a value of out is NaN or infinite, or when a slice of V is too large, and else
               // left alone; may be left out, but of a slice
  kMask,       // as MaskLayout says
  kBlockMask,  // as BlockMaskLayout says
  kInvalidBlocks,  // int32, set to 1 when the block mask has an entry that is skipped and else left alone; may be left
                   // out
  kRotatedHeads,   // int32 (batch, kv_heads), contiguous: whether a head is rotated. Read with `rotate_as_given`;
                   // written with `rotate_by_head`, where it may be left out
  kOperands
};
constexpr const char* kOperandNames[] = {
    "q", "k", "v", "out", "workspace", "lse", "nonfinite", "mask", "block_mask", "invalid_blocks", "rotated_heads"};
static_assert(sizeof kOperandNames / sizeof *kOperandNames == kOperands, "every operand has a name");

// By Operand; 0: not given.
using OperandAddresses = std::array<uint64_t, kOperands>;

// Which launches of a call a run enqueues. The preparation puts into the workspace what it makes of q, k, v and the
// block mask; the attention phase follows once, on the same stream with the same addresses, but for those of operands
// that it does not use. Its first kernel waits for the one before it on the stream alone (programmatic launch, sm90).
// Another kernel may come between the phases and write to what the preparation has read: launched as usual, it starts
// when the preparation has finished. One that is launched programmatically must wait for its predecessor, as ours do.
enum Phase { kWholeCall = 0, kPreparation = 1, kAttentionPhase = 2 };
