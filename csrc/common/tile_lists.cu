// Prepares the caller's block lists: the attention kernels visit the results without a test. A warp prepares a list.
#include "common/tile_lists.h"

namespace common {

__device__ __forceinline__ void prepare_list(const PrepareListsParams& params, int index, unsigned* bitmap) {
  const unsigned lane = threadIdx.x % 32;
  const int block = index % params.query_blocks, bh = index / params.query_blocks;
  const int batch = bh / params.heads, head = bh - batch * params.heads;
  const short* list =
      params.lists + batch * params.batch_stride + head * params.head_stride + i64(block) * (1 + params.key_tiles);
  const int words = bitmap_words(params.key_tiles);
  for (int word = lane; word < words; word += 32) bitmap[word] = 0;
  __syncwarp();
  const int given = list[0], count = min(max(given, 0), params.key_tiles);
  bool invalid = given != count;
  for (int i = lane; i < count; i += 32) {
    const int tile = list[1 + i];
    if (tile < 0 || tile >= params.key_tiles) {
      invalid = true;
    } else {
      const unsigned bit = 1u << tile % 32;
      invalid |= (atomicOr(bitmap + tile / 32, bit) & bit) != 0;
    }
  }
  invalid = __any_sync(0xffffffffu, invalid);  // and all bits are set
  if (invalid && lane == 0 && params.invalid) *params.invalid = 1;
  __syncwarp();
  // Tiles above the diagonal are valid and hold no key for these queries.
  const int last = params.causal ? min(block, params.key_tiles - 1) : params.key_tiles - 1;
  // Words from the one with `last` down, without what lies behind it.
  const auto bits_of = [&](int word) {
    return word == last / 32 ? bitmap[word] & (0xffffffffu >> (31 - last % 32)) : bitmap[word];
  };
  unsigned short* entries = params.entries + i64(index) * params.key_tiles;
  const auto is_active = [&](int tile) { return tile >= 0 ? static_cast<int>(bitmap[tile / 32] >> tile % 32 & 1) : 0; };
  if (params.form == ListForm::linked) {
    const int diagonal = params.has_diagonal && block <= last ? block : -1;
    int next = params.key_tiles;
    for (int word = last / 32; word >= 0; --word) {
      unsigned bits = bits_of(word);
      if (diagonal >= 0 && word == diagonal / 32) bits &= ~(1u << diagonal % 32);
      const unsigned behind = bits >> lane >> 1;
      const int following = behind ? 32 * word + static_cast<int>(lane) + __ffs(behind) : next;
      if (bits >> lane & 1) entries[32 * word + lane] = static_cast<unsigned short>(following);
      if (bits) next = 32 * word + __ffs(bits) - 1;
    }
    if (lane == 0) {
      if (is_active(diagonal)) entries[diagonal] = static_cast<unsigned short>(next);
      params.counts[index] = is_active(diagonal) ? diagonal : next;
    }
    return;
  }
  const int diagonal = params.has_diagonal ? min(block, last - 1) : -1;
  int written = 0;
  for (int word = last / 32; word >= 0; --word) {
    const unsigned bits = bits_of(word);
    const unsigned above = bits >> lane;  // this lane's tile and those behind it
    const int tile = 32 * word + static_cast<int>(lane);
    int place = written + __popc(above) - 1;
    if (tile == diagonal) place = is_active(last);
    if (diagonal < tile && tile < last) place += is_active(diagonal);
    if (above & 1) entries[place] = static_cast<unsigned short>(tile);
    written += __popc(bits);
  }
  if (lane == 0) {
    params.counts[index] = written;
    if (params.dead && written <= last) *params.dead = 1;
  }
}

}  // namespace common

// Launched before `prepare_tile_lists` where that says whether blocks are skipped.
extern "C" __global__ void clear_dead_tiles(const __grid_constant__ common::PrepareListsParams params) {
  *params.dead = 0;
}

extern "C" __global__ void __launch_bounds__(common::kPrepareListsThreads)
    prepare_tile_lists(const __grid_constant__ common::PrepareListsParams params) {
  extern __shared__ unsigned bitmaps[];
  for (int i = blockIdx.x * common::kPrepareListsThreads + threadIdx.x; i < params.launches;
       i += gridDim.x * common::kPrepareListsThreads)
    params.next[i] = 0;
  const int warp = threadIdx.x / 32, index = blockIdx.x * common::kListsPerBlock + warp;
  if (index < params.batches * params.heads * params.query_blocks)
    common::prepare_list(params, index, bitmaps + warp * common::bitmap_words(params.key_tiles));
}
