// The tail of attention with block lists: each key block that is in no list takes part as one key and one value, the
// means of its tokens, as often as it has tokens. Corrects the output and the LSE of the call with the lists.
//
// A thread block owns 64 sub-pools of Q. Their scores with the means stand for those of their 16 tokens; but for what
// all keys have in common, which is taken from K's means and added of each token by itself.
#include "common/bf16_products.cuh"
#include "common/block_selection.h"
#include "common/elements.cuh"
#include "common/scores.cuh"

namespace common {

template <class T, int kChannels>
struct PooledTail {
  static constexpr int kRowBytes = kChannels * 2, kUnits = kRowBytes / 16;
  static constexpr int kKeys = tail_keys(kChannels), kMmas = kKeys / 8, kSteps = kChannels / 16;
  static constexpr int kLanes = kChannels / 8;  // threads that hold a token
  static constexpr int kGroups = kTailThreads / kLanes;
  static constexpr unsigned kQueryBytes = kTailPools * kRowBytes, kMeanBytes = kKeys * kRowBytes;

  const TailParams& params;
  unsigned char* shared;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int channel = threadIdx.x % kLanes * 8, group = threadIdx.x / kLanes;
  int batch, head, kv_bh, first_query;
  float* shifts;      // (kTailQueries)
  float* maxima;      // (kTailPools)
  float* totals;      // (kTailPools)
  unsigned* bitmaps;  // (kTailBlocks, words)
  int words;

  static __device__ __forceinline__ unsigned unit_offset(int row, int unit) {
    return row * kRowBytes + ((unit ^ (row & 7)) * 16);
  }

  // Which key blocks the lists of the query blocks have.
  __device__ __forceinline__ void mark_listed() const {
    for (int i = threadIdx.x; i < kTailBlocks * words; i += kTailThreads) bitmaps[i] = 0;
    __syncthreads();
    for (int i = warp; i < kTailBlocks; i += kTailWarps) {
      const int block = first_query / kListTile + i;
      if (block >= params.query_blocks) break;
      const short* list = params.lists + batch * params.list_batch_stride + head * params.list_head_stride +
                          i64(block) * (1 + params.key_blocks);
      const int count = min(max(static_cast<int>(list[0]), 0), params.key_blocks);
      for (int entry = lane; entry < count; entry += 32) {
        const int listed = list[1 + entry];
        if (listed >= 0 && listed < params.key_blocks) atomicOr(bitmaps + i * words + listed / 32, 1u << listed % 32);
      }
    }
  }

  // Means of 16 queries to shared memory, and of each query the score of the vector that was taken from K.
  __device__ __forceinline__ void pool_queries() const {
    const T* q =
        static_cast<const T*>(params.q.pointer) + batch * params.q.batch_stride + head * params.q.head_stride + channel;
    float center[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) center[j] = params.center[i64(kv_bh) * kChannels + channel + j] * params.factor;
    for (int pool = group; pool < kTailPools; pool += kGroups) {
      const int first = first_query + pool * kPoolTokens, count = min(kPoolTokens, params.q_length - first);
      float sum[8]{};
      constexpr int kAtOnce = 32 / sizeof(T);  // loads under way
#pragma unroll 1
      for (int part = 0; part < kPoolTokens; part += kAtOnce) {
        Vec8<T> raw[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          raw[i].clear();
          if (part + i < count && channel < params.head_dim)
            raw[i].load(q + (first + part + i) * params.q.token_stride);
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          float values[8], shift = 0.f;
          raw[i].get(values);
#pragma unroll
          for (int j = 0; j < 8; ++j) {
            sum[j] += values[j];
            shift += values[j] * center[j];
          }
#pragma unroll
          for (int distance = 1; distance < kLanes; distance *= 2)
            shift += __shfl_xor_sync(0xffffffffu, shift, distance);
          if (channel == 0) shifts[pool * kPoolTokens + part + i] = shift;
        }
      }
      const float factor = count > 0 ? params.factor / count : 0.f;
      unsigned packed[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) packed[j] = packed_bf16(sum[2 * j] * factor, sum[2 * j + 1] * factor);
      *reinterpret_cast<uint4*>(shared + unit_offset(pool, channel / 8)) = {packed[0], packed[1], packed[2], packed[3]};
    }
  }

  __device__ __forceinline__ void copy_means(unsigned to, const void* means, int step) const {
    const char* from = static_cast<const char*>(means) + (i64(kv_bh) * params.mean_rows + step * kKeys) * kRowBytes;
#pragma unroll
    for (int i = threadIdx.x; i < kKeys * kUnits; i += kTailThreads)
      copy_async(to + unit_offset(i / kUnits, i % kUnits), from + i64(i) * 16);
  }

  // Scores of the warp's two query blocks with a step of means; minus infinity where a block is listed.
  __device__ __forceinline__ void multiply(float (&scores)[kMmas][4], unsigned queries, unsigned keys, int step) const {
#pragma unroll
    for (auto& of_mma : scores)
#pragma unroll
      for (float& score : of_mma) score = 0.f;
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      unsigned a[4];
      load_matrices(a, queries + unit_offset(warp * 16 + lane % 16, 2 * k + lane / 16));
#pragma unroll
      for (int pair = 0; pair < kMmas / 2; ++pair) {
        unsigned b[4];
        load_matrices(b, keys + unit_offset(16 * pair + lane / 16 * 8 + lane % 8, 2 * k + lane / 8 % 2));
        mma_bf16(scores[2 * pair], a, b[0], b[1]);
        mma_bf16(scores[2 * pair + 1], a, b[2], b[3]);
      }
    }
    constexpr float kFullBlock = 7.f;  // log2 of its tokens
    static_assert(kListTile == 128, "of kFullBlock");
#pragma unroll
    for (int mma = 0; mma < kMmas; ++mma) {
      const int word = (step * kKeys + 8 * mma) / 32;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int block = step * kKeys + 8 * mma + 2 * (lane % 4) + i % 2;
        const unsigned bits = word < words ? bitmaps[(2 * warp + i / 2) * words + word] : 0u;
        const int tokens = params.kv_length - block * kListTile;
        const bool is_listed = bits >> block % 32 & 1;
        const float weight = tokens >= kListTile ? kFullBlock : log2f(tokens);
        scores[mma][i] = is_listed || tokens <= 0 ? kNegativeInfinity : scores[mma][i] + weight;
      }
    }
  }

  __device__ __forceinline__ void attend(unsigned queries) const {
    const unsigned keys = queries + kQueryBytes, values = keys + kMeanBytes;
    float numerators[kChannels / 8][4]{};
    float maximum[2] = {kNegativeInfinity, kNegativeInfinity}, total[2]{};
    const int steps = (params.key_blocks + kKeys - 1) / kKeys;
    for (int step = 0; step < steps; ++step) {
      copy_means(keys, params.key_means, step);
      copy_means(values, params.value_means, step);
      wait_for_copies();
      __syncthreads();
      float scores[kMmas][4];
      multiply(scores, queries, keys, step);
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        float largest = maximum[row];
#pragma unroll
        for (int mma = 0; mma < kMmas; ++mma)
          largest = max_nan(largest, max_nan(scores[mma][2 * row], scores[mma][2 * row + 1]));
        largest = max_nan(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
        largest = max_nan(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
        const float base = largest == kNegativeInfinity ? 0.f : largest;
        const float factor = exp2_approx(maximum[row] - base);
        maximum[row] = largest;
        total[row] *= factor;
#pragma unroll
        for (auto& of_mma : numerators) of_mma[2 * row] *= factor, of_mma[2 * row + 1] *= factor;
#pragma unroll
        for (int mma = 0; mma < kMmas; ++mma) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            float& score = scores[mma][2 * row + i];
            score = exp2_approx(score - base);
            total[row] += score;
          }
        }
      }
#pragma unroll
      for (int k = 0; k < kKeys / 16; ++k) {
        const unsigned p[4] = {packed_bf16(scores[2 * k][0], scores[2 * k][1]),
                               packed_bf16(scores[2 * k][2], scores[2 * k][3]),
                               packed_bf16(scores[2 * k + 1][0], scores[2 * k + 1][1]),
                               packed_bf16(scores[2 * k + 1][2], scores[2 * k + 1][3])};
#pragma unroll
        for (int pair = 0; pair < kChannels / 16; ++pair) {
          unsigned b[4];
          load_transposed_matrices(b, values + unit_offset(16 * k + lane % 16, 2 * pair + lane / 16));
          mma_bf16(numerators[2 * pair], p, b[0], b[1]);
          mma_bf16(numerators[2 * pair + 1], p, b[2], b[3]);
        }
      }
      __syncthreads();  // before the next step is copied, or the numerators are written
    }
    float* rows = reinterpret_cast<float*>(shared);
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const int pool = warp * 16 + row * 8 + lane / 4;
      total[row] += __shfl_xor_sync(0xffffffffu, total[row], 1);
      total[row] += __shfl_xor_sync(0xffffffffu, total[row], 2);
      if (lane % 4 == 0) maxima[pool] = maximum[row], totals[pool] = total[row];
#pragma unroll
      for (int mma = 0; mma < kChannels / 8; ++mma)
        *reinterpret_cast<float2*>(rows + pool * kChannels + 8 * mma + 2 * (lane % 4)) = {numerators[mma][2 * row],
                                                                                          numerators[mma][2 * row + 1]};
    }
    __syncthreads();
  }

  __device__ __forceinline__ void correct() const {
    T* out =
        static_cast<T*>(params.out.pointer) + batch * params.out.batch_stride + head * params.out.head_stride + channel;
    float* lse = params.lse + (i64(batch) * params.q_heads + head) * params.q_length;
    const int end = min(kTailQueries, params.q_length - first_query);
    constexpr int kAtOnce = 16 / sizeof(T);  // loads under way
    for (int first = 0; first < end; first += kAtOnce * kGroups) {
      Vec8<T> raw[kAtOnce];
      float of_lists[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int row = first + i * kGroups + group, query = first_query + row;
        raw[i].clear();
        of_lists[i] = 0.f;
        if (row < end) {
          of_lists[i] = lse[query] * kLog2E - shifts[row];
          if (channel < params.head_dim) {
            const uint4* from = reinterpret_cast<const uint4*>(out + query * params.out.token_stride);
#pragma unroll
            for (int part = 0; part < Vec8<T>::kWords / 4; ++part) {
              const uint4 words_of_part = from[part];
              raw[i].words[4 * part] = words_of_part.x, raw[i].words[4 * part + 1] = words_of_part.y;
              raw[i].words[4 * part + 2] = words_of_part.z, raw[i].words[4 * part + 3] = words_of_part.w;
            }
          }
        }
      }
      __syncwarp();  // all lanes of a token have read its LSE
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int row = first + i * kGroups + group, query = first_query + row, pool = row / kPoolTokens;
        if (row >= end || totals[pool] == 0.f) continue;
        const float maximum = maxima[pool], of_tail = maximum + log2f(totals[pool]);
        const float larger = max_nan(of_lists[i], of_tail);
        const float both = larger + log2f(exp2_approx(of_lists[i] - larger) + exp2_approx(of_tail - larger));
        const float keeps = exp2_approx(of_lists[i] - both), takes = exp2_approx(maximum - both);
        if (channel == 0) lse[query] = (both + shifts[row]) * kLn2;
        if (channel >= params.head_dim) continue;
        const float* numerator = reinterpret_cast<const float*>(shared) + pool * kChannels + channel;
        float values[8];
        raw[i].get(values);
#pragma unroll
        for (int j = 0; j < 8; ++j) values[j] = values[j] * keeps + numerator[j] * takes;
        store_vec8(out + query * params.out.token_stride, values);
      }
    }
  }

  __device__ __forceinline__ void run() {
    const int works_of_head = (params.query_blocks + kTailBlocks - 1) / kTailBlocks;
    const int bh = blockIdx.x / works_of_head;
    batch = bh / params.q_heads, head = bh - batch * params.q_heads;
    kv_bh = batch * params.kv_heads + head / (params.q_heads / params.kv_heads);
    first_query = (blockIdx.x - bh * works_of_head) * kTailQueries;
    words = bitmap_words(params.key_blocks);
    shifts = reinterpret_cast<float*>(shared + tail_tile_bytes(kChannels));
    maxima = shifts + kTailQueries;
    totals = maxima + kTailPools;
    bitmaps = reinterpret_cast<unsigned*>(totals + kTailPools);
    mark_listed();
    pool_queries();
    attend(static_cast<unsigned>(__cvta_generic_to_shared(shared)));
    correct();
  }
};

template <class T, int kChannels>
__device__ __forceinline__ void pooled_tail_kernel(const TailParams& params) {
  extern __shared__ __align__(128) unsigned char shared[];
  PooledTail<T, kChannels> tail{params, shared};
  tail.run();
}

}  // namespace common

#define POOLED_TAIL_KERNEL(name, T, channels)                                                 \
  extern "C" __global__ void __launch_bounds__(common::kTailThreads, channels <= 128 ? 3 : 2) \
      pooled_tail_##name##_d##channels(const __grid_constant__ common::TailParams params) {   \
    common::pooled_tail_kernel<T, channels>(params);                                          \
  }
#define POOLED_TAIL_KERNELS(name, T) \
  POOLED_TAIL_KERNEL(name, T, 64)    \
  POOLED_TAIL_KERNEL(name, T, 128)   \
  POOLED_TAIL_KERNEL(name, T, 256)
POOLED_TAIL_KERNELS(fp16, __half)
POOLED_TAIL_KERNELS(bf16, __nv_bfloat16)
POOLED_TAIL_KERNELS(fp32, float)
#undef POOLED_TAIL_KERNELS
#undef POOLED_TAIL_KERNEL
