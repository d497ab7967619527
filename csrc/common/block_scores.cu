// Scores of blocks from sub-pools of Q and K: log2 of the share of their queries' probability that key blocks hold.
//
// A thread block owns some sub-pools of Q and meets all of K once. The softmax of a row needs its sum before the rows
// of a query block can be added, so that the sums over each key block are kept until then, relative to a base of the
// row: the largest score of its first step, raised only where exponentials would become too large. In bf16, in an order
// of the threads' own: each reads what it wrote. So few bytes stay in L2.
#include "common/bf16_products.cuh"
#include "common/block_selection.h"
#include "common/scores.cuh"

namespace common {

constexpr float kLargestSum = 0x1p60f;  // of exponentials, before the base is raised
constexpr float kSmallestShare = 0x1p-126f;

template <int kChannels>
struct BlockScores {
  static constexpr int kRowTiles = score_row_tiles(kChannels), kRows = score_rows(kChannels);
  static constexpr int kRowBytes = kChannels * 2, kUnits = kRowBytes / 16;
  static constexpr int kOwnRows = 2 * kRowTiles;         // of a thread, in each 8th row
  static constexpr int kOwnBlocks = 2;                   // key blocks of a step
  static constexpr int kValues = kOwnRows * kOwnBlocks;  // of a thread in a step
  static constexpr int kMmas = kScoreKeys / 8, kSteps = kChannels / 16;
  static constexpr unsigned kKeyBytes = kScoreKeys * kRowBytes, kQueryBytes = kRows * kRowBytes;

  const BlockScoreParams& params;
  const int lane, warp;
  unsigned queries, keys;  // in shared memory
  const char* key_pools;   // of this head
  uint2* sums;             // of this thread, from one step to the next kScoreThreads * kRowTiles
  float base[kOwnRows], total[kOwnRows];

  // Units of 16 bytes are permuted within a row, so that the eight rows of a matrix lie in different banks.
  static __device__ __forceinline__ unsigned query_unit(int row, int unit) {
    return row * kRowBytes + ((unit ^ (row & 7)) * 16);
  }
  static __device__ __forceinline__ unsigned key_unit(int row, int unit) {
    return row * kRowBytes + ((unit ^ ((row & 1) | (row >> 3 & 6))) * 16);
  }
  // The sub-pool of K, of a step, that is column `column` of mma `mma`. A thread has columns 2t and 2t + 1 of all mmas:
  // so it gets all sub-pools of two blocks.
  static __device__ __forceinline__ int key_of_column(int mma, int column) {
    return 16 * (column / 2) + 8 * (mma / (kMmas / 2)) + 2 * (mma % (kMmas / 2)) + column % 2;
  }

  __device__ __forceinline__ void copy_queries(const char* from) const {
    for (int i = threadIdx.x; i < kRows * kUnits; i += kScoreThreads)
      copy_async(queries + query_unit(i / kUnits, i % kUnits), from + i64(i) * 16);
  }
  __device__ __forceinline__ void copy_keys(int step) const {
    const char* from = key_pools + i64(step) * kKeyBytes;
    const unsigned to = keys + step % kScoreStages * kKeyBytes;
#pragma unroll
    for (int i = threadIdx.x; i < kScoreKeys * kUnits; i += kScoreThreads)
      copy_async(to + key_unit(i / kUnits, i % kUnits), from + i64(i) * 16);
  }

  __device__ __forceinline__ void multiply(float (&scores)[kRowTiles][kMmas][4], int step) const {
#pragma unroll
    for (auto& of_tile : scores)
#pragma unroll
      for (auto& of_mma : of_tile)
#pragma unroll
        for (float& score : of_mma) score = 0.f;
    const unsigned stage = keys + step % kScoreStages * kKeyBytes;
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      unsigned a[kRowTiles][4];
#pragma unroll
      for (int tile = 0; tile < kRowTiles; ++tile)
        load_matrices(a[tile], queries + query_unit((warp * kRowTiles + tile) * 16 + lane % 16, 2 * k + lane / 16));
#pragma unroll
      for (int pair = 0; pair < kMmas / 2; ++pair) {
        unsigned b[4];
        load_matrices(b, stage + key_unit(key_of_column(2 * pair + lane / 16, lane % 8), 2 * k + lane / 8 % 2));
#pragma unroll
        for (int tile = 0; tile < kRowTiles; ++tile) {
          mma_bf16(scores[tile][2 * pair], a[tile], b[0], b[1]);
          mma_bf16(scores[tile][2 * pair + 1], a[tile], b[2], b[3]);
        }
      }
    }
  }

  // Sub-pools behind the last one do not exist, and the last one may have fewer tokens.
  __device__ __forceinline__ void weight_last(float (&scores)[kRowTiles][kMmas][4], int step) const {
    const int pools = (params.kv_length + kPoolTokens - 1) / kPoolTokens;
    const float weight = log2f((params.kv_length - (pools - 1) * kPoolTokens) * (1.f / kPoolTokens));
#pragma unroll
    for (int mma = 0; mma < kMmas; ++mma) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int pool = step * kScoreKeys + key_of_column(mma, 2 * (lane % 4) + i % 2);
#pragma unroll
        for (auto& of_tile : scores) {
          if (pool == pools - 1) of_tile[mma][i] += weight;
          if (pool >= pools) of_tile[mma][i] = kNegativeInfinity;
        }
      }
    }
  }

  // Of row `row` of the thread, the sum over key block `block` of the two that it has.
  __device__ __forceinline__ float exponentials(const float (&scores)[kRowTiles][kMmas][4], int row, int block) const {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < kPoolsOfBlock; ++i)
      sum += exp2_approx(scores[row / 2][block * (kMmas / 2) + i / 2][row % 2 * 2 + i % 2] - base[row]);
    return sum;
  }

  __device__ __forceinline__ uint2& kept(int step, int tile) const {
    return sums[(i64(step) * kRowTiles + tile) * kScoreThreads];
  }
  // Of the two rows of a tile, each with two blocks.
  static __device__ __forceinline__ void unpack(const uint2& from, float (&to)[2][kOwnBlocks]) {
    const unsigned words[2] = {from.x, from.y};
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      to[row][0] = __uint_as_float(words[row] << 16);
      to[row][1] = __uint_as_float(words[row] & 0xffff0000u);
    }
  }

  __device__ __forceinline__ void scale_kept(int steps, const float (&factors)[kOwnRows]) const {
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
#pragma unroll
      for (int tile = 0; tile < kRowTiles; ++tile) {
        float values[2][kOwnBlocks];
        unpack(kept(step, tile), values);
        const float f0 = factors[2 * tile], f1 = factors[2 * tile + 1];
        kept(step, tile) = {packed_bf16(values[0][0] * f0, values[0][1] * f0),
                            packed_bf16(values[1][0] * f1, values[1][1] * f1)};
      }
    }
  }

  __device__ __forceinline__ void raise_bases(const float (&scores)[kRowTiles][kMmas][4], int step) {
    float factors[kOwnRows];
#pragma unroll
    for (int row = 0; row < kOwnRows; ++row) {
      float largest = kLowest;
#pragma unroll
      for (int mma = 0; mma < kMmas; ++mma)
        largest = fmaxf(largest, fmaxf(scores[row / 2][mma][row % 2 * 2], scores[row / 2][mma][row % 2 * 2 + 1]));
      const float raised = fmaxf(base[row], quad_max(largest));
      factors[row] = exp2_approx(base[row] - raised);
      total[row] *= factors[row];
      base[row] = raised;
    }
    scale_kept(step, factors);
  }

  __device__ __forceinline__ void add(const float (&scores)[kRowTiles][kMmas][4], int step) {
    float sum[kOwnRows][kOwnBlocks];
    const auto sum_up = [&]() {
      float largest = 0.f;
#pragma unroll
      for (int row = 0; row < kOwnRows; ++row) {
#pragma unroll
        for (int block = 0; block < kOwnBlocks; ++block) {
          sum[row][block] = exponentials(scores, row, block);
          largest = fmaxf(largest, sum[row][block]);
        }
      }
      return largest;
    };
    if (__any_sync(0xffffffffu, sum_up() > kLargestSum)) {
      raise_bases(scores, step);
      sum_up();
    }
#pragma unroll
    for (int row = 0; row < kOwnRows; ++row) total[row] += sum[row][0] + sum[row][1];
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile)
      kept(step, tile) = {packed_bf16(sum[2 * tile][0], sum[2 * tile][1]),
                          packed_bf16(sum[2 * tile + 1][0], sum[2 * tile + 1][1])};
  }

  // Of the thread's rows: what their sums are multiplied by to give shares of the mean over their query block.
  __device__ __forceinline__ void finish_rows(float (&factors)[kOwnRows], int first_pool) const {
#pragma unroll
    for (int row = 0; row < kOwnRows; ++row) {
      float of_row = total[row];
      of_row += __shfl_xor_sync(0xffffffffu, of_row, 1);
      of_row += __shfl_xor_sync(0xffffffffu, of_row, 2);
      const int pool = first_pool + (warp * kOwnRows + row) * 8 + lane / 4;
      const int first_token = pool / kPoolsOfBlock * kListTile;
      const int tokens = min(kPoolTokens, params.q_length - pool * kPoolTokens);
      const int of_block = min(kListTile, params.q_length - first_token);
      factors[row] = tokens > 0 ? tokens / (of_row * of_block) : 0.f;
    }
  }

  // Adds up each value over the eight threads that have the rows of its query block; thread group lane / 4 gets the
  // value of this number, where there are so many.
  __device__ __forceinline__ float sum_of_rows(float (&values)[kValues]) const {
#pragma unroll
    for (int count = kValues / 2; count > 0; count /= 2) {
      const bool is_upper = lane & 4 * count;
#pragma unroll
      for (int i = 0; i < count; ++i) {
        const float sent = is_upper ? values[i] : values[i + count];
        values[i] = (is_upper ? values[i + count] : values[i]) + __shfl_xor_sync(0xffffffffu, sent, 4 * count);
      }
    }
#pragma unroll
    for (int distance = 4 * kValues; distance < 32; distance *= 2)
      values[0] += __shfl_xor_sync(0xffffffffu, values[0], distance);
    return values[0];
  }

  // `first_block`: of queries, that the thread block has.
  __device__ __forceinline__ void write(const float (&factors)[kOwnRows], int steps, int head, int first_block) const {
    const int value = lane / 4;
    const int query_block = first_block + warp * kOwnRows + value / kOwnBlocks;
    const int first_key_block = kOwnBlocks * (lane % 4) + value % kOwnBlocks;
    const bool exists = value < kValues && query_block < params.query_blocks;
    float* scores = params.scores + (i64(head) * params.query_blocks + query_block) * params.key_blocks;
#pragma unroll 2
    for (int step = 0; step < steps; ++step) {
      float values[kValues];
#pragma unroll
      for (int tile = 0; tile < kRowTiles; ++tile) {
        float of_tile[2][kOwnBlocks];
        unpack(kept(step, tile), of_tile);
#pragma unroll
        for (int i = 0; i < 2 * kOwnBlocks; ++i) {
          const float factor = factors[2 * tile + i / kOwnBlocks];
          // A row behind the last query has no part, whatever its scores are.
          values[tile * 2 * kOwnBlocks + i] = factor == 0.f ? 0.f : of_tile[i / kOwnBlocks][i % kOwnBlocks] * factor;
        }
      }
      const float share = sum_of_rows(values);
      const int key_block = first_key_block + step * (kScoreKeys / kPoolsOfBlock);
      if (exists && key_block < params.key_blocks) scores[key_block] = share < kSmallestShare ? -126.f : log2f(share);
    }
  }

  __device__ __forceinline__ void work(int index) {
    const int works_of_head = params.query_rows / kRows;
    const int head = index / works_of_head, first_pool = (index - head * works_of_head) * kRows;
    const int batch = head / params.q_heads, of_batch = head - batch * params.q_heads;
    const int kv_head = batch * params.kv_heads + of_batch / (params.q_heads / params.kv_heads);
    key_pools = static_cast<const char*>(params.key_pools) + i64(kv_head) * params.key_rows * kRowBytes;
    copy_queries(static_cast<const char*>(params.query_pools) +
                 (i64(head) * params.query_rows + first_pool) * kRowBytes);
    copy_keys(0);
#pragma unroll
    for (int row = 0; row < kOwnRows; ++row) base[row] = kLowest, total[row] = 0.f;
    const int steps = params.key_rows / kScoreKeys;
    for (int step = 0; step < steps; ++step) {
      wait_for_copies();
      __syncthreads();  // and the other stage was read
      if (step + 1 < steps) copy_keys(step + 1);
      float scores[kRowTiles][kMmas][4];
      multiply(scores, step);
      if (step == steps - 1) weight_last(scores, step);
      add(scores, step);
    }
    float factors[kOwnRows];
    finish_rows(factors, first_pool);
    write(factors, steps, head, first_pool / kPoolsOfBlock);
    __syncthreads();  // before shared memory is written to anew
  }
};

template <int kChannels>
__device__ __forceinline__ void block_scores_kernel(const BlockScoreParams& params) {
  extern __shared__ __align__(128) unsigned char shared[];
  using Scores = BlockScores<kChannels>;
  const unsigned queries = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  char* sums =
      static_cast<char*>(params.sums) + blockIdx.x * (params.key_rows / kScoreKeys * score_step_bytes(kChannels));
  Scores scores{params,
                static_cast<int>(threadIdx.x % 32),
                static_cast<int>(threadIdx.x / 32),
                queries,
                queries + Scores::kQueryBytes,
                nullptr,
                reinterpret_cast<uint2*>(sums) + threadIdx.x,
                {},
                {}};
  for (int index = blockIdx.x; index < params.works; index += gridDim.x) scores.work(index);
}

}  // namespace common

#define BLOCK_SCORES_KERNEL(channels, blocks)                                             \
  extern "C" __global__ void __launch_bounds__(common::kScoreThreads, blocks)             \
      block_scores_d##channels(const __grid_constant__ common::BlockScoreParams params) { \
    common::block_scores_kernel<channels>(params);                                        \
  }
BLOCK_SCORES_KERNEL(64, common::kScoreBlocksOfSm)
BLOCK_SCORES_KERNEL(128, common::kScoreBlocksOfSm)
BLOCK_SCORES_KERNEL(256, 2)
#undef BLOCK_SCORES_KERNEL
