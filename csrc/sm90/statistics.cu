// Statistics of K and V: the mean of K over a sample of its tokens (smooth K), the mean of V (smooth V) and V's scale
// per channel over all of them. A cluster of blocks shares a head and adds its partial results through distributed
// shared memory, always in the same order, so that repeated runs are equal bit by bit.
#include "common/sampled_keys.cuh"
#include "common/type_traits.cuh"
#include "sm90/rotation_choice.cuh"

namespace sm90 {

constexpr int kMaxHeadDim = 256;

// Whether a head of so many channels, which the cluster holds, is to be rotated.
template <class T, class Hidden>
__device__ __forceinline__ bool choose_rotation(const ChoosingStatisticsParams& params, const BatchHead& bh,
                                                const float* means, const Hidden& hidden, ChoiceScratch& scratch) {
  if (params.head_dim <= 64) return choose_rotation<T, 8>(params, bh, means, hidden, scratch);
  if (params.head_dim <= 128) return choose_rotation<T, 16>(params, bh, means, hidden, scratch);
  return choose_rotation<T, 32>(params, bh, means, hidden, scratch);
}

// Over the threads of a block, for all of them.
__device__ __forceinline__ int block_sum(int x) {
  __shared__ int of_warp[kStatisticsWarps];
  x = __reduce_add_sync(0xffffffffu, x);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = x;
  __syncthreads();
  int sum = 0;
#pragma unroll
  for (const int of : of_warp) sum += of;
  return sum;
}

constexpr int kHiddenKeysAtOnce = 4096;  // whose bits a block of the grid holds

// Without kWithV, K's mean alone: the precise mode does not quantize V. ChoosingStatisticsParams: the call may
// rotate all heads, or choose the rotation of each; with HiddenKeys those do not count, and K's mean is that of all
// others.
template <class T, bool kWithV, class Params, class Hidden>
__device__ __forceinline__ void statistics_kernel(const Params& params) {
  constexpr bool kChooses = is_same_v<Params, ChoosingStatisticsParams>, kMayHide = is_same_v<Hidden, HiddenKeys>;
  constexpr int kCount = kWithV ? kStatistics : kSumK + 1;
  __shared__ float partial[kCount][kStatisticsWarps][kMaxHeadDim];
  __shared__ float of_block[kCount][kMaxHeadDim];
  // In this order: the quantization of Q does not wait for this kernel, but for all before it.
  griddepcontrol_wait();
  if constexpr (kChooses) {  // before the quantization of Q starts, which reads it
    if (threadIdx.x == 0 && blockIdx.x % params.cluster_blocks == 0) {
      params.choices[blockIdx.x / params.cluster_blocks] = {};
      __threadfence();
    }
  }
  griddepcontrol_launch_dependents();
  if constexpr (kChooses) {
    if (params.rotates == Rotates::by_head)
      prefetch_sample<T, 32>(params, BatchHead(blockIdx.x / params.cluster_blocks, params.kv_heads));
  }

  const int lanes = params.head_dim <= 64 ? 8 : params.head_dim <= 128 ? 16 : 32;  // threads that read one token
  const int channel = threadIdx.x % lanes * 8;
  const int blocks = params.cluster_blocks, block = blockIdx.x % blocks, bh = blockIdx.x / blocks;
  const int batch = bh / params.kv_heads, head = bh - batch * params.kv_heads;
  const int share = (params.kv_length + blocks - 1) / blocks;
  const int end = min(params.kv_length, (block + 1) * share);
  const T* k =
      static_cast<const T*>(params.k.pointer) + batch * params.k.batch_stride + head * params.k.head_stride + channel;
  const T* v =
      static_cast<const T*>(params.v.pointer) + batch * params.v.batch_stride + head * params.v.head_stride + channel;

  if (block == 0 && threadIdx.x == 0) params.prepared[bh].keys.end = 0;
  __shared__ float shown_of_block;
  float statistics[kCount][8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    statistics[kSumK][i] = 0.f;
    if constexpr (kWithV) {
      statistics[kSumV][i] = 0.f;
      statistics[kMaxV][i] = statistics[kMaxNegatedV][i] = -__builtin_bit_cast(float, 0x7f800000u);
    }
  }
  const auto add_key = [&](const Vec8<T>& raw) {
    float values[8];
    raw.get(values);
#pragma unroll
    for (int i = 0; i < 8; ++i) statistics[kSumK][i] += values[i];
  };
  const auto add = [&](const Vec8<T>& k_raw, const Vec8<T>& v_raw) {
    if constexpr (kMayHide) add_key(k_raw);
    if constexpr (kWithV) {
      float values[8];
      v_raw.get(values);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        statistics[kSumV][i] += values[i];
        statistics[kMaxV][i] = max_nan(statistics[kMaxV][i], values[i]);
        statistics[kMaxNegatedV][i] = max_nan(statistics[kMaxNegatedV][i], -values[i]);
      }
    }
  };
  // Those whose mean is taken for that of K, in turns of the blocks.
  const auto add_sampled_keys = [&] {
    if (channel >= params.head_dim) return;
    const int count = sampled_key_count(params.kv_length), step = kStatisticsThreads / lanes * blocks;
#pragma unroll 4
    for (int n = threadIdx.x / lanes * blocks + block; n < count; n += step) {
      Vec8<T> raw;
      raw.load(k + sampled_key(n, params.kv_length) * params.k.token_stride);
      add_key(raw);
    }
  };
  // The keys from `first` on. `skips(token)`: whether one does not count.
  const auto add_keys = [&](int first, int end, const auto& skips) {
    if (channel >= params.head_dim) return;
    constexpr int kAtOnce = (kWithV && kMayHide ? 8 : 16) / sizeof(T);  // as many as the registers hold
    const int step = kStatisticsThreads / lanes;
    int token = first + threadIdx.x / lanes;
    const T* k_token = k + token * params.k.token_stride;
    const T* v_token = v + token * params.v.token_stride;
    const i64 k_step = step * params.k.token_stride, v_step = step * params.v.token_stride;
    Vec8<T> k_raw[kAtOnce], v_raw[kAtOnce];
    const auto load = [&](int i) {
      if constexpr (kMayHide) k_raw[i].load(k_token);
      if constexpr (kWithV) v_raw[i].load(v_token);
      k_token += k_step;
      v_token += v_step;
    };
    if (token + (kAtOnce - 1) * step < end) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) load(i);
      token += kAtOnce * step;
      // Each row is replaced by the one kAtOnce further on as soon as it was added: so several loads are always under
      // way.
      for (; token + (kAtOnce - 1) * step < end; token += kAtOnce * step) {
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const Vec8<T> k_old = k_raw[i], v_old = v_raw[i];
          load(i);
          if (!skips(token + (i - kAtOnce) * step)) add(k_old, v_old);
        }
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
        if (!skips(token + (i - kAtOnce) * step)) add(k_raw[i], v_raw[i]);
    }
    for (; token < end; token += step) {
      load(0);
      if (!skips(token)) add(k_raw[0], v_raw[0]);
    }
  };
  int shown_keys = 0;
  if constexpr (kMayHide) {
    __shared__ unsigned bits[kHiddenKeysAtOnce / 32];
    const HiddenKeys hidden(params.mask, batch);
    if (hidden.any()) {
#pragma unroll 1
      for (int first = block * share; first < end; first += kHiddenKeysAtOnce) {
        const int next = min(end, first + kHiddenKeysAtOnce);
        int hidden_here = 0;
        __syncthreads();
#pragma unroll 1
        for (int word = threadIdx.x / 32; first + 32 * word < next; word += kStatisticsWarps) {
          const unsigned of_word = hidden.bits(first + 32 * word, next);
          hidden_here += threadIdx.x % 32 == 0 ? __popc(of_word) : 0;
          if (threadIdx.x % 32 == 0) bits[word] = of_word;
        }
        shown_keys += next - first - block_sum(hidden_here);
        add_keys(first, next, [&](int token) { return bits[(token - first) / 32] >> (token - first) % 32 & 1u; });
      }
    }
    if (threadIdx.x == 0) shown_of_block = shown_keys;
  }
  if constexpr (!kMayHide) add_sampled_keys();
  // A block without a shown key sums up all of its keys, for masks that hide all.
  if (shown_keys == 0 && (kMayHide || kWithV)) add_keys(block * share, end, [](int) { return false; });
#pragma unroll
  for (int statistic = 0; statistic < kCount; ++statistic) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float x = statistics[statistic][i];
      for (int distance = lanes; distance < 32; distance *= 2)
        x = combine(statistic, x, __shfl_xor_sync(0xffffffff, x, distance));
      if (threadIdx.x % 32 < lanes) partial[statistic][threadIdx.x / 32][channel + i] = x;
    }
  }
  __syncthreads();
  const int own = threadIdx.x;
  if (own < params.head_dim) {
#pragma unroll
    for (int statistic = 0; statistic < kCount; ++statistic)
      of_block[statistic][own] = combine_warps(statistic, partial[statistic], own);
  }
  cluster_sync();
  float shown = 0.f;  // where no key is, too
  if constexpr (kMayHide)
    for (int other = 0; other < blocks; ++other) shown += load_from_block(&shown_of_block, other);
  const auto total_of = [&](int statistic) {  // in kernels that choose, where all blocks need the mean
    float total = initial(statistic);
    for (int other = 0; other < blocks; ++other) {
      const float of_other = load_from_block(&of_block[statistic][own], other);
      if (!kMayHide || shown == 0.f || load_from_block(&shown_of_block, other) != 0.f)
        total = combine(statistic, total, of_other);
    }
    return total;
  };
  const auto tokens = [&] {
    if constexpr (kMayHide)
      return shown != 0.f ? shown : static_cast<float>(params.kv_length);
    else
      return params.kv_length;
  };
  const auto k_tokens = [&] {
    if constexpr (kMayHide)
      return tokens();
    else
      return sampled_key_count(params.kv_length);
  };
  if constexpr (kChooses) {
    __shared__ float means[kMaxHeadDim];
    __shared__ ChoiceScratch scratch;
    bool rotated = false;
    if (params.rotates == Rotates::by_head) {
      means[own] = own < params.head_dim ? total_of(kSumK) / k_tokens() : 0.f;
      __syncthreads();
      Hidden hidden(params.mask, batch);
      hidden.all_but(static_cast<int>(shown));
      rotated = choose_rotation<T>(params, BatchHead(bh, params.kv_heads), means, hidden, scratch);
    }
    if (block == 0 && own == 0) tell_choices(params, bh, static_cast<int>(shown), rotated);
  }
  if (block == 0 && own < params.head_dim) {
    float total[kCount];
#pragma unroll
    for (int statistic = 0; statistic < kCount; ++statistic) {
      if constexpr (kChooses) {
        total[statistic] = total_of(statistic);
        continue;
      }
      total[statistic] = of_block[statistic][own];
      for (int other = 1; other < blocks; ++other)
        total[statistic] = combine(statistic, total[statistic], load_from_block(&of_block[statistic][own], other));
    }
    const i64 index = i64(bh) * params.head_dim + own;
    params.k_mean[index] = total[kSumK] / k_tokens();
    if constexpr (kWithV) {
      store_value_factors(params, index,
                          value_factors<T>(total[kSumV], total[kMaxV], total[kMaxNegatedV], tokens(), params.smooth_v,
                                           params.head_room));
    }
  }
  cluster_sync();  // no block leaves while its shared memory may be read
}

}  // namespace sm90

#define STATISTICS_KERNEL(name, T, with_v, Params, Hidden)                  \
  extern "C" __global__ void __launch_bounds__(sm90::kStatisticsThreads, 2) \
      name(const __grid_constant__ sm90::Params params) {                   \
    sm90::statistics_kernel<T, with_v, sm90::Params, sm90::Hidden>(params); \
  }
#define STATISTICS_KERNELS(prefix, suffix, T, with_v)                                              \
  STATISTICS_KERNEL(prefix##_##suffix, T, with_v, StatisticsParams, NoHiddenKeys)                  \
  STATISTICS_KERNEL(prefix##_choosing_##suffix, T, with_v, ChoosingStatisticsParams, NoHiddenKeys) \
  STATISTICS_KERNEL(prefix##_hiding_##suffix, T, with_v, ChoosingStatisticsParams, HiddenKeys)
STATISTICS_KERNELS(statistics, fp16, __half, true)
STATISTICS_KERNELS(statistics, bf16, __nv_bfloat16, true)
STATISTICS_KERNELS(statistics, fp32, float, true)
STATISTICS_KERNELS(statistics_k, fp16, __half, false)
STATISTICS_KERNELS(statistics_k, bf16, __nv_bfloat16, false)
#undef STATISTICS_KERNELS
#undef STATISTICS_KERNEL
