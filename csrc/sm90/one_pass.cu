// K and V of short sequences, read once: a cluster of blocks holds one head's K or V in shared memory, makes its
// statistics, and quantizes it from there. It writes what the statistics and the quantization pass write.
#include "sm90/quantize_k.cuh"
#include "sm90/quantize_v.cuh"
#include "sm90/statistics.cuh"

namespace sm90 {

extern __shared__ uint4 held_vectors[];

// A block's share of a head: tokens of kLanes vectors of eight channels. A thread copies and sums up the same channels
// of every kTokensAtOnce-th token.
template <class T, int kLanes>
struct HeldTokens {
  static constexpr int kUnitTokens = unit_tokens(8 * kLanes);
  static_assert(kUnitTokens == kUnitLoads * Lanes<kLanes>::kTokensAtOnce && kUnitTokens % kScaleBlock == 0);
  int first, count;  // of the head; those at the end need not exist

  // Tokens four apart have their halves of eight vectors exchanged, so that the transposition of V meets no bank twice.
  static __device__ __forceinline__ int place(int local, int channel) {
    return local * kLanes + (channel / 8 ^ (local & 4));
  }
  static __device__ __forceinline__ Vec8<T> read(int local, int channel) {
    const uint4 raw = held_vectors[place(local, channel)];
    Vec8<T> vector;
    vector.words[0] = raw.x, vector.words[1] = raw.y, vector.words[2] = raw.z, vector.words[3] = raw.w;
    return vector;
  }

  // All copies are under way at once. After it a thread sees its own, after a barrier the others', too.
  __device__ __forceinline__ void copy(const T* head, i64 token_stride, int length, const Lanes<kLanes>& lanes) const {
    const T* from = head + (first + lanes.token) * token_stride + lanes.channel;
    for (int unit = 0; unit < count; unit += kUnitTokens) {
#pragma unroll
      for (int i = 0; i < kUnitLoads; ++i) {
        const int local = unit + i * Lanes<kLanes>::kTokensAtOnce + lanes.token;
        const bool exists = lanes.active && first + local < length;
        cp_async_or_zero(shared_address(&held_vectors[place(local, lanes.channel)]), exists ? from : head, exists);
        from += Lanes<kLanes>::kTokensAtOnce * token_stride;
      }
    }
    cp_async_wait();
  }
};

// What a block keeps beside its tokens.
template <int kLanes>
struct Scratch {
  static constexpr int kChannels = 8 * kLanes, kMostStatistics = 3;
  alignas(16) float partial[kStatisticsWarps][kChannels];
  float of_block[kMostStatistics][kChannels];  // other blocks read it until all have arrived on the cluster's barrier
  alignas(16) float means[kChannels], inverses[kChannels];
  float token_amax[2][kScaleBlock];
};

// Statistics kFirst to kFirst + kCount - 1 of each channel, over the tokens of the head: thread c gets those of channel
// c, below 8 * kLanes.
template <class T, int kLanes, int kFirst, int kCount>
__device__ __forceinline__ void sum_over_cluster(const HeldTokens<T, kLanes>& held, int length, int blocks,
                                                 const Lanes<kLanes>& lanes, Scratch<kLanes>& scratch,
                                                 float (&total)[kCount]) {
  constexpr int kChannels = 8 * kLanes;
  float statistics[kCount][8];
#pragma unroll
  for (int statistic = 0; statistic < kCount; ++statistic) {
#pragma unroll
    for (float& x : statistics[statistic]) x = kFirst + statistic <= kSumV ? 0.f : kNegativeInfinity;
  }
  for (int unit = 0; unit < held.count; unit += held.kUnitTokens) {
#pragma unroll
    for (int i = 0; i < kUnitLoads; ++i) {
      const int local = unit + i * Lanes<kLanes>::kTokensAtOnce + lanes.token;
      if (held.first + local >= length) break;
      float values[8];
      held.read(local, lanes.channel).get(values);
#pragma unroll
      for (int statistic = 0; statistic < kCount; ++statistic) {
#pragma unroll
        for (int j = 0; j < 8; ++j)
          statistics[statistic][j] = combine(kFirst + statistic, statistics[statistic][j],
                                             kFirst + statistic == kMaxNegatedV ? -values[j] : values[j]);
      }
    }
  }
  const int own = threadIdx.x;
#pragma unroll
  for (int statistic = 0; statistic < kCount; ++statistic) {
    float (&x)[8] = statistics[statistic];
#pragma unroll
    for (int distance = kLanes; distance < 32; distance *= 2) {
#pragma unroll
      for (int j = 0; j < 8; ++j)
        x[j] = combine(kFirst + statistic, x[j], __shfl_xor_sync(0xffffffffu, x[j], distance));
    }
    if (threadIdx.x % 32 < kLanes) store_vec8(&scratch.partial[threadIdx.x / 32][lanes.channel], x);
    __syncthreads();
    if (own < kChannels) scratch.of_block[statistic][own] = combine_warps(kFirst + statistic, scratch.partial, own);
    if (statistic + 1 < kCount) __syncthreads();
  }
  cluster_sync();
  if (own >= kChannels) return;
  // All loads are under way before the first sum.
  float others[kCount][kMaxClusterBlocks];
#pragma unroll
  for (int other = 0; other < kMaxClusterBlocks; ++other) {
#pragma unroll
    for (int statistic = 0; statistic < kCount; ++statistic)
      if (other < blocks) others[statistic][other] = load_from_block(&scratch.of_block[statistic][own], other);
  }
#pragma unroll
  for (int statistic = 0; statistic < kCount; ++statistic) {
    total[statistic] = others[statistic][0];
#pragma unroll
    for (int other = 1; other < kMaxClusterBlocks; ++other)
      if (other < blocks) total[statistic] = combine(kFirst + statistic, total[statistic], others[statistic][other]);
  }
}

template <class T, int kLanes, bool kRotated>
__device__ __forceinline__ void prepare_keys(const OnePassParams& params, const Slice& slice, bool writes,
                                             const HeldTokens<T, kLanes>& held, Scratch<kLanes>& scratch) {
  using Format = IntegerFormat<8, kRotated>;
  const StatisticsParams& statistics = params.statistics;
  const Lanes<kLanes> lanes(statistics.head_dim);
  held.copy(slice.of<T>(statistics.k), statistics.k.token_stride, statistics.kv_length, lanes);
  float total[1];
  sum_over_cluster<T, kLanes, kSumK, 1>(held, statistics.kv_length, statistics.cluster_blocks, lanes, scratch, total);
  const int own = threadIdx.x;
  if (own < scratch.kChannels) {
    const bool exists = own < statistics.head_dim;
    scratch.means[own] = exists ? total[0] / statistics.kv_length : 0.f;
    if (writes && exists) statistics.k_mean[i64(slice.index) * statistics.head_dim + own] = scratch.means[own];
  }
  cluster_arrive();
  __syncthreads();
  float mean[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) mean[i] = scratch.means[lanes.channel + i];
  const Rotation<kLanes> rotation;
  if constexpr (kRotated) rotation.change_signs(mean);
  for (int local = 0; local < held.count && held.first + local < statistics.kv_length; local += kScaleBlock) {
    const int block = (held.first + local) / kScaleBlock;
    Vec8<T> raw[kKeyPasses<kLanes>];
#pragma unroll
    for (int pass = 0; pass < kKeyPasses<kLanes>; ++pass)
      raw[pass] = held.read(local + pass * Lanes<kLanes>::kTokensAtOnce + lanes.token, lanes.channel);
    quantize_keys<T, kLanes, Format>(params.quantize, slice, block, lanes, rotation, raw, mean,
                                     scratch.token_amax[block % 2]);
  }
}

template <class T, int kLanes>
__device__ __forceinline__ void prepare_values(const OnePassParams& params, const Slice& slice, bool writes,
                                               const HeldTokens<T, kLanes>& held, Scratch<kLanes>& scratch) {
  const StatisticsParams& statistics = params.statistics;
  const Lanes<kLanes> lanes(statistics.head_dim);
  held.copy(slice.of<T>(statistics.v), statistics.v.token_stride, statistics.kv_length, lanes);
  float total[3];
  sum_over_cluster<T, kLanes, kSumV, 3>(held, statistics.kv_length, statistics.cluster_blocks, lanes, scratch, total);
  const int own = threadIdx.x;
  if (own < scratch.kChannels) {
    ValueFactors factors{};
    if (own < statistics.head_dim) {
      factors = value_factors<T>(total[0], total[1], total[2], statistics.kv_length, statistics.smooth_v);
      if (writes) store_value_factors(statistics, i64(slice.index) * statistics.head_dim + own, factors);
    }
    scratch.means[own] = factors.mean;
    scratch.inverses[own] = factors.inverse;
  }
  cluster_arrive();
  __syncthreads();

  // A warp takes 4 groups of 8 channels, and a lane of it 8 of 16 keys: two words of each channel, which stand beside
  // those of seven other lanes.
  constexpr int kGroups = kLanes / 4, kWarpTokens = 64;
  static_assert(HeldTokens<T, kLanes>::kUnitTokens == kQuantizeThreads / 32 / kGroups * kWarpTokens);
  const QuantizeParams& quantize = params.quantize;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int channel = (warp % kGroups * 4 + lane % 4) * 8, part = lane / 4;
  if (channel / kVChannels * kVChannels >= quantize.v_rows) return;
  unsigned char* const row =
      quantize.v_fp8 + (i64(slice.index) * quantize.v_rows + row_of_channel(channel)) * quantize.key_row_bytes;
  const bool active = channel < quantize.head_dim;
  float mean[8], inverse[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    mean[j] = scratch.means[channel + j];
    inverse[j] = scratch.inverses[channel + j];
  }
  for (int local = warp / kGroups * kWarpTokens; local < held.count; local += held.kUnitTokens) {
    const int position = held.first + local + 8 * part;
    if (position >= quantize.key_row_bytes) break;
    unsigned words[2][8];
#pragma unroll
    for (int word = 0; word < 2; ++word) {
      float values[4][8];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int token = local + part / 2 * 16 + part % 2 * 4 + 2 * word + i / 2 * 8 + i % 2;
        const bool valid = active && held.first + token < quantize.kv_length;
        held.read(token, channel).get(values[i]);
#pragma unroll
        for (int j = 0; j < 8; ++j) values[i][j] = valid ? values[i][j] - mean[j] : 0.f;
      }
#pragma unroll
      for (int j = 0; j < 8; ++j) words[word][j] = quantized_word(values, inverse[j], j);
    }
#pragma unroll
    for (int j = 0; j < 8; ++j)
      *reinterpret_cast<uint2*>(row + row_of_channel(j) * quantize.key_row_bytes + position) =
          make_uint2(words[0][j], words[1][j]);
  }
}

template <class T, int kLanes, bool kRotated>
__device__ __forceinline__ void one_pass_kernel(const OnePassParams& params) {
  __shared__ Scratch<kLanes> scratch;
  // In this order: the quantization of Q does not wait for this kernel, but for all before it.
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  const int blocks = params.statistics.cluster_blocks, block = blockIdx.x % blocks, cluster = blockIdx.x / blocks;
  const Slice slice(cluster / params.tensors, params.statistics.kv_heads);
  const int tokens = params.units * HeldTokens<T, kLanes>::kUnitTokens;
  const HeldTokens<T, kLanes> held{block * tokens, tokens};
  if (cluster % params.tensors)
    prepare_values<T, kLanes>(params, slice, block == 0, held, scratch);
  else
    prepare_keys<T, kLanes, kRotated>(params, slice, block == 0, held, scratch);
  cluster_wait();  // no block leaves while its shared memory may be read
}

}  // namespace sm90

#define ONE_PASS_KERNEL(name, bounds, T, lanes, rotated)                                                         \
  extern "C" __global__ void __launch_bounds__ bounds name(const __grid_constant__ sm90::OnePassParams params) { \
    sm90::one_pass_kernel<T, lanes, rotated>(params);                                                            \
  }
#define BOUNDS (sm90::kQuantizeThreads, 3)
#define BOUNDS_OF_D256 (sm90::kQuantizeThreads, 2)
#define ONE_PASS_KERNELS(prefix, suffix, T, rotated)                \
  ONE_PASS_KERNEL(prefix##_##suffix##_d64, BOUNDS, T, 8, rotated)   \
  ONE_PASS_KERNEL(prefix##_##suffix##_d128, BOUNDS, T, 16, rotated) \
  ONE_PASS_KERNEL(prefix##_##suffix##_d256, BOUNDS_OF_D256, T, 32, rotated)
ONE_PASS_KERNELS(one_pass, fp16, __half, false)
ONE_PASS_KERNELS(one_pass, bf16, __nv_bfloat16, false)
ONE_PASS_KERNELS(one_pass_rotated, fp16, __half, true)
ONE_PASS_KERNELS(one_pass_rotated, bf16, __nv_bfloat16, true)
#undef ONE_PASS_KERNELS
#undef BOUNDS_OF_D256
#undef BOUNDS
#undef ONE_PASS_KERNEL
