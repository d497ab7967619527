// The tiles of the kernels and the layout of the attention kernel's shared memory: kernels, launch code and tests read
// them here. Plain data, no CUDA headers.
#pragma once

namespace sm80 {

constexpr int kQueryBlock = 128;  // b_q of the paper: rows of a work item, and of a mean of smoothed Q
constexpr int kKeyBlock = 64;     // b_k: keys that share a set of K scales and one update of the online softmax
constexpr int kQueryGroups = 32;  // per-thread groups of a Q block: 8 for each of the c_w = 4 warps
constexpr int kKeyGroups = 4;     // per-thread groups of a K block

// Scales of a Q block: in 4 bits one for each row, which may be that of its per-thread group.
constexpr int query_scales(int bits) { return bits == 4 ? kQueryBlock : kQueryGroups; }

// The smallest scale of V's key block, where it has one: what lies below it is not seen beside the channel's largest.
constexpr float kSmallestTileScale = 0x1p-20f;
// Tokens of a key block have scales of their own where the largest of a token is so many times that of another one.
constexpr float kUnlikeTokens = 3.f;

constexpr int kStatisticsTokens = 512;  // tokens that one block of the statistics pass sums
constexpr int kStatistics = 3;          // sum, largest, largest of the negated
constexpr int kDeltaBlock = 64;         // query blocks, and keys, of a tile of the smooth-Q correction

// Threads of a block.
constexpr int kStatisticsThreads = 256, kQuantizeThreads = 256, kDeltaThreads = 128, kBiasThreads = 256;
constexpr int attention_threads(int head_dim) { return head_dim == 256 ? 256 : 128; }

// Sizes of the tiles in bytes. Q and K tiles hold bits / 8 bytes an element, V tiles v_bytes (1: E4M3, 2: fp16).
constexpr int query_tile_bytes(int head_dim, int bits) { return kQueryBlock * head_dim * bits / 8; }
constexpr int key_tile_bytes(int head_dim, int bits) { return kKeyBlock * head_dim * bits / 8; }
constexpr int value_tile_bytes(int head_dim, int v_bytes) { return kKeyBlock * head_dim * v_bytes; }

// Offsets in the attention kernel's dynamic shared memory, which begins with the Q tile. k, k_scale and bias, and v
// where it has two stages, are those of the first stage.
struct SharedLayout {
  int q_scale, v, k, k_scale, bias;
  int stage;  // bytes of K, its scales and its bias, and of V where it has two stages
  int bytes;  // of all

  // key_stages: key blocks whose K is in shared memory at a time, value_stages: whose V. With two the next is copied
  // while one is worked on; more would leave cards with 100 KB an SM too few blocks of threads.
  constexpr SharedLayout(int head_dim, int bits, int v_bytes, int key_stages, int value_stages)
      : q_scale(query_tile_bytes(head_dim, bits)),
        v(q_scale + query_scales(bits) * 4),
        k(v + value_tile_bytes(head_dim, v_bytes)),
        k_scale(k + key_tile_bytes(head_dim, bits)),
        bias(k_scale + kKeyGroups * 4),
        stage(bias + kKeyBlock * 4 - (value_stages == 2 ? v : k)),
        bytes((value_stages == 2 ? v : k) + key_stages * stage) {}
};

}  // namespace sm80
