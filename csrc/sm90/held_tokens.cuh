// A block's share of a head's K or V in shared memory, as it is, and the statistics of its channels.
#pragma once

#include "common/hidden_keys.cuh"
#include "common/sampled_keys.cuh"
#include "common/type_traits.cuh"
#include "sm90/quantize.cuh"
#include "sm90/statistics.cuh"

namespace sm90 {

// Tokens of kLanes vectors of eight channels. A thread copies and sums up the same channels of every kTokensAtOnce-th
// token.
template <class T, int kLanes>
struct HeldTokens {
  static constexpr int kVectorBytes = 16, kTokenBytes = kLanes * kVectorBytes;
  static constexpr int kTokensAtOnce = Lanes<kLanes>::kTokensAtOnce, kUnitTokens = unit_tokens(8 * kLanes);
  static_assert(kUnitTokens == kUnitLoads * kTokensAtOnce && kUnitTokens % kScaleBlock == 0 && kTokensAtOnce % 8 == 0);
  unsigned shared;   // the address
  int first, count;  // of the head; those at the end need not exist

  // Tokens four apart have their halves of eight vectors exchanged, so that the transposition of V meets no bank twice.
  // So the address of a token a multiple of eight further on differs by that many kTokenBytes.
  __device__ __forceinline__ unsigned address(int local, int channel) const {
    return shared + local * kTokenBytes + (channel / 8 ^ (local & 4)) * kVectorBytes;
  }
  static __device__ __forceinline__ Vec8<T> read(unsigned address) {
    const uint4 raw = ld_shared_v4_u32(address);
    Vec8<T> vector;
    vector.words[0] = raw.x, vector.words[1] = raw.y, vector.words[2] = raw.z, vector.words[3] = raw.w;
    return vector;
  }

  // Zeros in place of those that do not exist. All copies are under way at once, until cp_async_wait.
  __device__ __forceinline__ void copy(const T* head, i64 token_stride, int length, const Lanes<kLanes>& lanes) const {
    const T* from = head + (first + lanes.token) * token_stride + lanes.channel;
    unsigned to = address(lanes.token, lanes.channel);
#pragma unroll 1
    for (int unit = 0; unit < count; unit += kUnitTokens) {
#pragma unroll
      for (int i = 0; i < kUnitLoads; ++i) {
        const bool exists = lanes.active && first + unit + i * kTokensAtOnce + lanes.token < length;
        cp_async_or_zero(to + i * kTokensAtOnce * kTokenBytes, exists ? from : head, exists);
        from += kTokensAtOnce * token_stride;
      }
      to += kUnitTokens * kTokenBytes;
    }
  }
};

// The larger and the smaller of two numbers in each half, NaN if one of them is NaN; and infinity in each.
__device__ __forceinline__ unsigned larger_pair(unsigned x, unsigned y, __half) {
  asm("max.NaN.f16x2 %0, %0, %1;" : "+r"(x) : "r"(y));
  return x;
}
__device__ __forceinline__ unsigned larger_pair(unsigned x, unsigned y, __nv_bfloat16) {
  asm("max.NaN.bf16x2 %0, %0, %1;" : "+r"(x) : "r"(y));
  return x;
}
__device__ __forceinline__ unsigned smaller_pair(unsigned x, unsigned y, __half) {
  asm("min.NaN.f16x2 %0, %0, %1;" : "+r"(x) : "r"(y));
  return x;
}
__device__ __forceinline__ unsigned smaller_pair(unsigned x, unsigned y, __nv_bfloat16) {
  asm("min.NaN.bf16x2 %0, %0, %1;" : "+r"(x) : "r"(y));
  return x;
}
__device__ __forceinline__ constexpr unsigned infinities(__half) { return 0x7c007c00u; }
__device__ __forceinline__ constexpr unsigned infinities(__nv_bfloat16) { return 0x7f807f80u; }

// The largest and the smallest value of two neighboring channels each, in x and y.
template <class T>
__device__ __forceinline__ void add_extremes(uint2& to, uint2 other) {
  to = make_uint2(larger_pair(to.x, other.x, T()), smaller_pair(to.y, other.y, T()));
}

// Those of eight neighboring channels.
template <class T>
struct VectorExtremes {
  Vec8<T> largest, smallest;

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < 4; ++i) largest.words[i] = infinities(T()) | 0x80008000u, smallest.words[i] = infinities(T());
  }
  __device__ __forceinline__ void add(const Vec8<T>& values) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      largest.words[i] = larger_pair(largest.words[i], values.words[i], T());
      smallest.words[i] = smaller_pair(smallest.words[i], values.words[i], T());
    }
  }
  // Those of the same channels in another lane.
  __device__ __forceinline__ void add_lane(int distance) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      largest.words[i] = larger_pair(largest.words[i], __shfl_xor_sync(0xffffffffu, largest.words[i], distance), T());
      smallest.words[i] =
          smaller_pair(smallest.words[i], __shfl_xor_sync(0xffffffffu, smallest.words[i], distance), T());
    }
  }
};

// What a block keeps beside its tokens.
template <class T, int kLanes>
struct Scratch {
  static constexpr int kChannels = 8 * kLanes, kWarps = kQuantizeThreads / 32;
  alignas(16) float sums[kWarps][kChannels];
  alignas(16) uint2 extremes[kWarps][kChannels / 2];
  struct {
    float sums[kChannels];
    uint2 extremes[kChannels / 2];
  } of_block;  // other blocks read it until all have arrived on the cluster's barrier
  alignas(16) float means[kChannels], inverses[kChannels];
};
constexpr int kSharedOfMultiprocessor = 228 << 10, kReservedOfBlock = 1 << 10;
static_assert(3 * (kMostUnits * kUnitBytes + int(sizeof(Scratch<__half, 16>)) + kReservedOfBlock) <=
                  kSharedOfMultiprocessor,
              "three blocks fit a multiprocessor at head_dim 128");

// Of a block's tokens those that a mask for all queries and heads hides, and how many it does not hide.
struct ShownKeys {
  static constexpr int kMostTokens = kMostUnits * unit_tokens(64);
  unsigned hidden[kMostTokens / 32];  // bits of the block's tokens
  float of_block;                     // which other blocks read as they do Scratch's
  int of_head;

  __device__ __forceinline__ bool hides(int local) const { return hidden[local / 32] >> local % 32 & 1u; }
};
// Those of a block of tokens, by all its threads: what they find holds behind the next barrier.
__device__ __forceinline__ void find_hidden(ShownKeys& shown, const HiddenKeys& keys, int first, int count,
                                            int length) {
  const int end = min(first + count, length);
  if (threadIdx.x == 0) shown.of_block = static_cast<float>(max(end - first, 0));
  if (!keys.any()) return;
  __syncthreads();
#pragma unroll 1
  for (int local = threadIdx.x / 32 * 32; local < count; local += kQuantizeThreads) {
    const unsigned bits = keys.bits(first + local, end);
    if (threadIdx.x % 32 != 0) continue;
    shown.hidden[local / 32] = bits;
    if (bits != 0) atomicAdd(&shown.of_block, -static_cast<float>(__popc(bits)));
  }
  __syncthreads();
}
__device__ __forceinline__ float shown_of_cluster(const ShownKeys& shown, int blocks) {
  float sum = 0.f;
  for (int block = 0; block < blocks; ++block) sum += load_from_block(&shown.of_block, block);
  return sum;
}

// How many tokens the statistics are of.
__device__ __forceinline__ int tokens_of(const NoHiddenKeys&, const ShownKeys&, int, int length) { return length; }
__device__ __forceinline__ int tokens_of(const HiddenKeys& hidden, const ShownKeys& shown, int blocks, int length) {
  const int found = hidden.any() ? static_cast<int>(shown_of_cluster(shown, blocks)) : 0;
  return found != 0 ? found : length;
}

// Of a channel.
struct ChannelStatistics {
  float sum, largest, smallest;
};

// Over the tokens of the head but hidden ones: thread c gets those of channel c, below 8 * kLanes. Largest and smallest
// with kExtremes alone; else, where none can be hidden, the sum is that of sampled keys. With HiddenKeys `shown` is
// found, too, and a block without a shown key has the statistics of all its keys, for masks that hide all.
template <bool kExtremes, class T, int kLanes, class Hidden>
__device__ __forceinline__ ChannelStatistics statistics_of(const HeldTokens<T, kLanes>& held, int length, int blocks,
                                                           const Lanes<kLanes>& lanes, Scratch<T, kLanes>& scratch,
                                                           Hidden hidden, ShownKeys& shown) {
  constexpr bool kMayHide = is_same_v<Hidden, HiddenKeys>;
  constexpr int kChannels = 8 * kLanes, kPairs = kChannels / 2;
  using Held = HeldTokens<T, kLanes>;
  float sums[8] = {};
  VectorExtremes<T> extremes;
  extremes.clear();
  const bool may_hide = hidden.any();
  if constexpr (kMayHide) {
    find_hidden(shown, hidden, held.first, held.count, length);
    if (may_hide) hidden.all_but(static_cast<int>(shown.of_block));
  }
  const auto add = [&](unsigned from, bool exists) {
    const Vec8<T> raw = Held::read(from);
    float values[8];
    raw.get(values);
#pragma unroll
    for (int j = 0; j < 8; ++j) sums[j] += values[j];  // those that do not exist are zeros
    if (kExtremes && exists) extremes.add(raw);
  };
  constexpr bool kSamples = !kExtremes && !kMayHide;
  if constexpr (kSamples) {
    __syncthreads();  // other threads have copied the sampled keys
    for (int n = lanes.token; n < sampled_key_count(length); n += Held::kTokensAtOnce) {
      const int local = sampled_key(n, length) - held.first;
      if (local >= 0 && local < held.count) add(held.address(local, lanes.channel), true);
    }
  }
#pragma unroll 1
  for (int unit = 0; !kSamples && unit < held.count && held.first + unit < length; unit += Held::kUnitTokens) {
    const unsigned from = held.address(unit + lanes.token, lanes.channel);
    constexpr int kDistance = Held::kTokensAtOnce * Held::kTokenBytes;
    if (hidden.any()) {
#pragma unroll 1
      for (int i = 0; i < kUnitLoads; ++i) {
        const int local = unit + i * Held::kTokensAtOnce + lanes.token;
        if (held.first + local < length && !shown.hides(local)) add(from + i * kDistance, true);
      }
      continue;
    }
    if (!kExtremes || held.first + unit + Held::kUnitTokens <= length) {
#pragma unroll
      for (int i = 0; i < kUnitLoads; ++i) add(from + i * kDistance, true);
    } else {
#pragma unroll 1
      for (int i = 0; i < kUnitLoads; ++i)
        add(from + i * kDistance, held.first + unit + i * Held::kTokensAtOnce + lanes.token < length);
    }
  }
#pragma unroll
  for (int distance = kLanes; distance < 32; distance *= 2) {
#pragma unroll
    for (float& sum : sums) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
    if constexpr (kExtremes) extremes.add_lane(distance);
  }
  const int own = threadIdx.x;
  if (own % 32 < kLanes) {
    store_vec8(&scratch.sums[own / 32][lanes.channel], sums);
    if constexpr (kExtremes) {
#pragma unroll
      for (int j = 0; j < 4; ++j)
        scratch.extremes[own / 32][lanes.channel / 2 + j] =
            make_uint2(extremes.largest.words[j], extremes.smallest.words[j]);
    }
  }
  __syncthreads();
  auto& of_block = scratch.of_block;
#pragma unroll 1
  for (int i = own; i < kChannels + (kExtremes ? kPairs : 0); i += kQuantizeThreads) {
    if (i < kChannels) {
      float sum = scratch.sums[0][i];
      for (int warp = 1; warp < scratch.kWarps; ++warp) sum += scratch.sums[warp][i];
      of_block.sums[i] = sum;
    } else {
      uint2 pair = scratch.extremes[0][i - kChannels];
      for (int warp = 1; warp < scratch.kWarps; ++warp) add_extremes<T>(pair, scratch.extremes[warp][i - kChannels]);
      of_block.extremes[i - kChannels] = pair;
    }
  }
  cluster_sync();
  ChannelStatistics total{};
  if constexpr (kMayHide) {
    if (own == 0) shown.of_head = may_hide ? static_cast<int>(shown_of_cluster(shown, blocks)) : 0;
  }
  if (own >= kChannels) return total;
  // All loads are under way before the first sum.
  float sums_of[kMaxClusterBlocks];
  uint2 extremes_of[kMaxClusterBlocks];
#pragma unroll
  for (int other = 0; other < kMaxClusterBlocks; ++other) {
    if (other >= blocks) continue;
    sums_of[other] = load_from_block(&of_block.sums[own], other);
    if constexpr (kExtremes) extremes_of[other] = load_from_block(&of_block.extremes[own / 2], other);
  }
  if constexpr (kMayHide) {
    if (may_hide && shown_of_cluster(shown, blocks) != 0.f) {
#pragma unroll
      for (int other = 0; other < kMaxClusterBlocks; ++other) {
        if (other >= blocks || load_from_block(&shown.of_block, other) != 0.f) continue;
        sums_of[other] = 0.f;
        if constexpr (kExtremes) extremes_of[other] = make_uint2(infinities(T()) | 0x80008000u, infinities(T()));
      }
    }
  }
  total.sum = sums_of[0];
#pragma unroll
  for (int other = 1; other < kMaxClusterBlocks; ++other) {
    if (other >= blocks) continue;
    total.sum += sums_of[other];
    if constexpr (kExtremes) add_extremes<T>(extremes_of[0], extremes_of[other]);
  }
  if constexpr (kExtremes) {
    Vec8<T> pairs;
    pairs.clear();
    pairs.words[0] = extremes_of[0].x, pairs.words[1] = extremes_of[0].y;
    float values[8];
    pairs.get(values);
    total.largest = own % 2 ? values[1] : values[0];
    total.smallest = own % 2 ? values[3] : values[2];
  }
  return total;
}

}  // namespace sm90
