// One attention call as plain data: what the Python side hands to an architecture's launch code.
// Every family of kernels implements the two functions at the end in its launch.cpp.
#pragma once

#include <cstdint>

// Rises whenever the fields of AttentionCall or their meaning change; it is the major number of csrc/VERSION.
constexpr int kAbiVersion = 4;

// A BHND view in whatever memory order. Strides count elements; the last dimension is contiguous.
struct TensorView {
  uint64_t pointer;
  int64_t batch_stride, head_stride, token_stride;
};

// An attention mask (batch, head, query, key). A stride is 0 where the mask broadcasts.
struct MaskView {
  uint64_t pointer;
  int64_t batch_stride, head_stride, query_stride, key_stride;
  int element;  // 0 none, 1 bool (true = attend), 2 fp16, 3 bf16, 4 fp32 (additive)
};

// Which tiles of 128 keys each block of 128 queries attends to: int16 (batch, head, query block, 1 + key_tiles), the
// last two contiguous. Entry 0 counts the tiles, which follow it; what is out of range or given twice is left out.
struct TileListsView {
  uint64_t pointer;
  int64_t batch_stride, head_stride;  // in elements; 0 where the lists are shared
  int64_t key_tiles;                  // of kv_length, or 0: no lists
  uint64_t invalid;                   // int32, set to 1 when something was left out and else left alone, or 0
};

// 8b and 4b: INT8 and INT4 scores, P and V in 8 bits (16 where the GPU has no FP8). Precise: INT8 scores, P and V in 16
// bits.
enum Mode { k4b = 4, k8b = 8, kPrecise = 16 };
constexpr int score_bits(int mode) { return mode == k4b ? 4 : 8; }

// Which launches of a call to enqueue. The preparation puts into the workspace what it makes of q, k, v and the tile
// lists; the attention phase follows once, on the same stream with the same fields, but for pointers that it does not
// read. Its first kernel waits for the one before it on the stream alone (programmatic launch, sm90). Another kernel
// may come between the phases and write to what the preparation has read: launched as usual, it starts when the
// preparation has finished. One that is launched programmatically must wait for its predecessor, as ours do.
enum Phase { kWholeCall = 0, kPreparation = 1, kAttentionPhase = 2 };

struct AttentionCall {
  TensorView q, k, v, out;
  MaskView mask;
  TileListsView tiles;
  uint64_t lse;        // float (batch, q_heads, q_length) contiguous, or 0 when not wanted
  uint64_t nonfinite;  // int32, set to 1 when a value of out is NaN or infinite and else left alone, or 0
  // Of each tile of 128 queries and keys the largest score relative to the running maximum of its row, in log2, or 0:
  // float (batch, q_heads, tiles of queries, of keys), minus infinity before the call. Without tiles, mask and causal.
  uint64_t gaps;
  int64_t batch, q_heads, kv_heads, q_length, kv_length;
  int head_dim;
  int element;  // of q, k, v and out: 2 fp16, 3 bf16
  int mode;     // Mode
  int phase;    // Phase
  bool rotate;  // Q and K, after smoothing; in 4 bits Q then has a scale for each token
  bool smooth_v, causal;
  int pv_accumulator;  // 32 or 16
  float scale;
  uint64_t workspace;
  int64_t workspace_bytes;
  int device;
  uint64_t stream;
};

// Bytes of scratch memory that `attention` needs for this call. Reads no strides, and no pointer but whether lse is
// wanted. Throws std::invalid_argument for a call that this architecture cannot run.
int64_t workspace_bytes(const AttentionCall& call);

struct InputsRead {
  bool q, k, v;
};

// What the attention phase of this call still reads. Reads the mode alone.
InputsRead read_by_attention_phase(const AttentionCall& call);

// Enqueues the launches of call.phase on call.stream. Throws std::invalid_argument for a call that this architecture
// cannot run and std::runtime_error for a driver failure. The preparation loads the kernels of the attention phase,
// too, which after it can fail only as any launch can.
void attention(const AttentionCall& call);
