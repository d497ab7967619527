// The orders in which the kernels take the keys, from their own sources, for ctypes. The compiler includes host_cuda.h
// first.
#include "sm90/key_order.cuh"

#include <thread>
#include <vector>

#include "common/tile_lists.cu"
#include "sm80/item.cuh"

namespace {

// The part of KernelTraits that the order of keys depends on.
template <int kBlockM_, int kBlockN_, bool kCausal_>
struct Traits {
  static constexpr int kBlockM = kBlockM_, kBlockN = kBlockN_;
  static constexpr bool kCausal = kCausal_, kBlockList = false, kKeyEndFromPrologue = false;
};

template <class T>
int order_of(int q_length, int kv_length, int work_tile, int* out) {
  sm90::AttentionParams params{};
  params.q_heads = params.kv_heads = 1;
  params.q_length = q_length;
  params.kv_length = kv_length;
  params.chunk = {0, 1, 0, (q_length + T::kBlockM - 1) / T::kBlockM};
  for (int index = 0; index < params.chunk.tiles; ++index) {
    const sm90::WorkTile tile = sm90::WorkTile::decode<T>(params, index);
    if (tile.first_row != work_tile * T::kBlockM) continue;
    const sm90::KeyOrder<T> order(params, tile);
    for (int step = 0; step < tile.key_tiles; ++step) out[step] = order[tile.key_tiles - 1 - step];
    return tile.key_tiles;
  }
  return -1;
}

template <int kBlockM, int kBlockN>
int order_of(bool causal, int q_length, int kv_length, int work_tile, int* out) {
  return causal ? order_of<Traits<kBlockM, kBlockN, true>>(q_length, kv_length, work_tile, out)
                : order_of<Traits<kBlockM, kBlockN, false>>(q_length, kv_length, work_tile, out);
}

}  // namespace

unsigned bitmaps[common::kListsPerBlock * (common::kMaxListTiles + 1) / 32];

// Writes the key tiles of `block_n` keys for a work tile of `block_m` queries; returns their number.
extern "C" int sm90_order(int block_m, int block_n, bool causal, int q_length, int kv_length, int work_tile, int* out) {
  if (block_m == 128 && block_n == 192) return order_of<128, 192>(causal, q_length, kv_length, work_tile, out);
  if (block_m == 128 && block_n == 128) return order_of<128, 128>(causal, q_length, kv_length, work_tile, out);
  if (block_m == 128 && block_n == 64) return order_of<128, 64>(causal, q_length, kv_length, work_tile, out);
  if (block_m == 192 && block_n == 64) return order_of<192, 64>(causal, q_length, kv_length, work_tile, out);
  return -1;
}

// Writes the key blocks for a block of queries, by a linked list if there is one; returns their number.
extern "C" int sm80_order(bool has_diagonal, int key_blocks, int query_block, const unsigned short* entries, int first,
                          int* out) {
  sm80::Item item{};
  item.query_block = query_block;
  item.key_blocks = key_blocks;
  item.attend_to_all(has_diagonal);
  if (entries) item.attend_to_list(entries, first);
  int steps = 0;
  for (int block = item.first_key_block; block < key_blocks; block = item.key_block_after(block)) {
    if (steps == key_blocks) return -1;
    out[steps++] = block;
  }
  return steps;
}

// One warp after another prepares the lists of one head.
extern "C" void prepare(const short* lists, int query_blocks, int key_tiles, bool causal, bool has_diagonal,
                        bool linked, unsigned short* entries, int* counts, int* invalid) {
  common::PrepareListsParams params{};
  params.lists = lists;
  params.entries = entries;
  params.counts = counts;
  params.invalid = invalid;
  params.batches = params.heads = 1;
  params.query_blocks = query_blocks;
  params.key_tiles = key_tiles;
  params.causal = causal;
  params.has_diagonal = has_diagonal;
  params.form = linked ? common::ListForm::linked : common::ListForm::in_order;
  for (int list = 0; list < query_blocks; ++list) {
    std::vector<std::thread> warp;
    for (unsigned lane = 0; lane < 32; ++lane)
      warp.emplace_back([=] {
        threadIdx.x = list % common::kListsPerBlock * 32 + lane;
        blockIdx.x = list / common::kListsPerBlock;
        prepare_tile_lists(params);
      });
    for (std::thread& thread : warp) thread.join();
  }
}
