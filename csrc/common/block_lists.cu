// Lists or bits of key blocks from their scores: those above a threshold of the head, or so many with the highest
// scores of the row. A warp makes a list.
#include "common/block_selection.h"
#include "common/score_order.cuh"

namespace common {

constexpr unsigned kAllLanes = 0xffffffffu;

// The `count`-th highest of a row, ordered, and how many of that value belong to the `count` highest.
struct Cut {
  unsigned value;
  int equal;
};

// `at_least(value)`: how many of the row are not below it. The value is found from its highest bit down, and may stay
// lower than it is where nothing lies between.
template <class AtLeast>
__device__ __forceinline__ Cut highest(int count, const AtLeast& at_least) {
  unsigned value = 0;
#pragma unroll 1
  for (unsigned bit = 0x80000000u; bit; bit >>= 1) {
    const int found = at_least(value | bit);
    if (found >= count) value |= bit;
    if (found == count) break;
  }
  const int above = value == 0xffffffffu ? 0 : at_least(value + 1);
  return {value, count - above};
}

constexpr int kHeldScores = 32;  // of a row, that a lane keeps in registers

__device__ __forceinline__ Cut highest(const float* scores, int length, int count) {
  const int lane = threadIdx.x % 32;
  const auto ordered_at = [&](int i) { return ordered(__ldg(scores + i)); };
  if (length > 32 * kHeldScores) {
    return highest(count, [&](unsigned value) {
      unsigned found = 0;
#pragma unroll 8
      for (int i = lane; i < length; i += 32) found += ordered_at(i) >= value;
      return static_cast<int>(__reduce_add_sync(kAllLanes, found));
    });
  }
  unsigned held[kHeldScores];  // 0 is below all scores
#pragma unroll
  for (int i = 0; i < kHeldScores; ++i) held[i] = 32 * i + lane < length ? ordered_at(32 * i + lane) : 0u;
  return highest(count, [&](unsigned value) {
    unsigned found = 0;
#pragma unroll
    for (int i = 0; i < kHeldScores; ++i) found += held[i] >= value;
    return static_cast<int>(__reduce_add_sync(kAllLanes, found));
  });
}

// Adds the active blocks of one row to the warp's bitmap.
__device__ __forceinline__ void mark(unsigned* bitmap, const BlockListParams& params, i64 row, int head_of_batch) {
  const int lane = threadIdx.x % 32;
  if (params.active) {
    const int words = bitmap_words(params.key_blocks);
    for (int word = lane; word < words; word += 32) bitmap[word] |= params.active[row * words + word];
    return;
  }
  const float* scores = params.scores + row * params.key_blocks;
  const float threshold = params.threshold ? params.threshold[head_of_batch] : 0.f;
  Cut cut{};
  if (!params.threshold)
    cut = highest(scores, params.key_blocks, params.counts ? params.counts[head_of_batch] : params.count);
  const unsigned char* forced = params.forced ? params.forced + i64(head_of_batch) * params.key_blocks : nullptr;
  for (int first = 0; first < params.key_blocks; first += 32) {
    const int block = first + lane;
    const bool exists = block < params.key_blocks;
    const float score = exists ? __ldg(scores + block) : 0.f;
    bool active;
    if (params.threshold) {
      active = exists && !(score <= threshold);
    } else {
      const unsigned value = ordered(score);
      const bool is_equal = exists && value == cut.value;
      const unsigned equal = __ballot_sync(kAllLanes, is_equal);
      active = exists && (value > cut.value || (is_equal && __popc(equal & ((1u << lane) - 1)) < cut.equal));
      cut.equal -= min(cut.equal, __popc(equal));
      active |= exists && ((params.counts && score != score) || (forced && forced[block]));
    }
    const unsigned bits = __ballot_sync(kAllLanes, active);
    if (lane == 0) bitmap[first / 32] |= bits;
  }
}

__device__ __forceinline__ void make_list(unsigned* bitmap, const BlockListParams& params, int index) {
  const int lane = threadIdx.x % 32;
  const int query_block = index % params.query_blocks, bh = index / params.query_blocks;
  const int words = bitmap_words(params.key_blocks);
  const bool is_dense = params.dense && params.dense[query_block];
  for (int word = 0; word < words; ++word) {
    const int block = 32 * word + lane;
    const bool active = block < params.key_blocks && (is_dense || (params.always && params.always[block]));
    const unsigned bits = __ballot_sync(kAllLanes, active);
    if (lane == 0) bitmap[word] = bits;
  }
  if (!is_dense) {
    // Where one list is for the whole batch, `bh` is the head.
    for (int batch = 0; batch < params.batch / params.list_batch; ++batch) {
      const int head_of_batch = bh + batch * params.heads;
      mark(bitmap, params, i64(head_of_batch) * params.query_blocks + query_block, head_of_batch);
    }
  }
  __syncwarp();
  if (params.bits)
    for (int word = lane; word < words; word += 32) params.bits[i64(index) * words + word] = bitmap[word];
  if (!params.lists) return;
  short* list = params.lists + i64(index) * (1 + params.key_blocks);
  int written = 0;
  for (int word = 0; word < words; ++word) {
    const unsigned bits = bitmap[word];
    if (bits >> lane & 1) list[1 + written + __popc(bits & ((1u << lane) - 1))] = static_cast<short>(32 * word + lane);
    written += __popc(bits);
  }
  if (lane == 0) list[0] = static_cast<short>(written);
}

}  // namespace common

extern "C" __global__ void __launch_bounds__(common::kPrepareListsThreads)
    block_lists(const __grid_constant__ common::BlockListParams params) {
  extern __shared__ unsigned bitmaps[];
  const int warp = threadIdx.x / 32, index = blockIdx.x * common::kListsPerBlock + warp;
  if (index < params.list_batch * params.heads * params.query_blocks)
    common::make_list(bitmaps + warp * common::bitmap_words(params.key_blocks), params, index);
}
