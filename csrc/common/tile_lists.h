// The caller's tile lists, and what the attention kernels walk instead. Plain data, no CUDA headers: launch code and
// kernels include it.
#pragma once

#include "common/views.h"

namespace common {

constexpr int kListTile = 128;        // queries of a block, and keys of a tile
constexpr int kMaxListTiles = 32767;  // key tiles: entries are int16
constexpr int kListsPerBlock = 8;     // a warp prepares a list
constexpr int kPrepareListsThreads = 32 * kListsPerBlock;
// Shared memory of a block: a bit for each key tile of each list.
constexpr int bitmap_words(int key_tiles) { return (key_tiles + 31) / 32; }
constexpr int bitmap_bytes(int key_tiles) { return kListsPerBlock * bitmap_words(key_tiles) * 4; }

// Of each list the valid tiles, each once, without those above the diagonal of causal attention.
//
// In order: the last tile comes first. So what needs masking comes first: the ragged last tile, or in causal attention
// the one on the diagonal. In self-attention the tile on the diagonal is the next, and the others go down to the first.
// Linked: entry t is the live tile after the live tile t, the first stands in place of the count, and key_tiles for the
// end. They go up from the first, after the one on the diagonal in self-attention and causal attention.
enum class ListForm : int { in_order = 0, linked = 1 };

struct PreparedLists {
  const unsigned short* entries;  // (lists, key_tiles)
  const int* counts;              // (lists), or the first tiles
  int* next;                      // work tiles of this launch that blocks took beyond their first
  int batch_lists, head_lists;    // lists from one batch, and one head, to the next; 0 where they share
  int key_tiles;
  int causal;
};

struct PrepareListsParams {
  const short* lists;             // (batches, heads, query_blocks, 1 + key_tiles): count, then tiles
  i64 batch_stride, head_stride;  // in elements
  unsigned short* entries;
  int* counts;
  int* next;     // (launches) of the attention kernel: set to 0
  int* dead;     // set to 1 where a list leaves out a tile and else to 0, or null
  int* invalid;  // set to 1 when a count or a tile is out of range or a tile is given twice, or null
  int batches, heads, query_blocks, key_tiles;
  int causal, launches;
  ListForm form;
  int has_diagonal;  // whether a block of queries has a tile of keys at its own place
};

}  // namespace common
