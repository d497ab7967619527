// The fused prologue of a short KV, which reads K and V once: a cluster of blocks holds one head's K or V in shared
// memory, computes its statistics, and quantizes it from there. It writes what the statistics and the quantization pass
// write, and flags each head that is done.
#include "common/type_traits.cuh"
#include "sm90/held_tokens.cuh"
#include "sm90/quantize_k.cuh"
#include "sm90/quantize_v.cuh"
#include "sm90/rotation_choice.cuh"

namespace sm90 {

extern __shared__ uint4 held_vectors[];

// The keys of a block of kScaleBlock that have one of its scales: 8j + 2t and 8j + 2t + 1 for scale t. A warp takes
// them all, kVectors vectors a lane, so that no other has to be waited for.
template <class T, int kLanes, class Format, class Hidden>
class KeyGroup {
  static constexpr bool kMayRotate = Format::kMayRotate, kMayHide = is_same_v<Hidden, HiddenKeys>;
  using Held = HeldTokens<T, kLanes>;
  static constexpr int kKeysAtOnce = 32 / kLanes, kVectors = kScaleBlock / kScalesPerBlock / kKeysAtOnce;
  static constexpr int kUnrolled = kMayRotate ? 2 : kVectors;  // a rotation takes many instructions

 public:
  // `first`: key of the block in `held`.
  __device__ __forceinline__ KeyGroup(const Held& held, int first, int scale, int length, const Lanes<kLanes>& lanes,
                                      const Hidden& hidden, const ShownKeys& shown, const Format& format)
      : block_((held.first + first) / kScaleBlock), scale_(scale), length_(length), format_(format) {
    const int n = threadIdx.x % 32 / kLanes, local = first + n / 2 * 8 + 2 * scale + n % 2;
    key_ = held.first + local;
    from_ = held.address(local, lanes.channel);
    if (hidden.any()) {
      int first_shown = -1;
#pragma unroll
      for (int vector = kVectors - 1; vector >= 0; --vector) {
        if (!exists(vector)) continue;
        if (shown.hides(local + key_offset(vector)))
          hidden_ |= 1u << vector;
        else
          first_shown = vector;
      }
      none_shown_ = first_shown < 0;
      first_shown_ = none_shown_ ? 0 : key_offset(first_shown) * Held::kTokenBytes;
    }
  }

  __device__ __forceinline__ void quantize(const QuantizeParams& params, const BatchHead& bh,
                                           const Lanes<kLanes>& lanes, const Rotation<kLanes>& rotation,
                                           const float (&mean)[8], Prepared& prepared) const {
    Vec8<T> raw[kMayRotate ? 1 : kVectors];
    float amax = amax_of_lane(raw, rotation, mean);
    if (none_shown_ || !exists(0)) amax = 0.f;
    amax = amax_of_token<32>(amax);
    const bool masked = is_masked(params.mask, bh.batch, prepared);
    if (threadIdx.x % 32 == 0) store_key_scale(params, bh, block_, scale_, amax, masked, format_);
    const float2 inverses = inverses_of<kLanes>(format_, inverse_or_zero(format_, amax));
    signed char* const to =
        params.k_int8 + (i64(bh.index) * params.kv_length + key_) * params.row_bytes + lanes.channel;
#pragma unroll kUnrolled
    for (int vector = 0; vector < kVectors; ++vector) {
      float values[8];
      get(kMayRotate ? read(vector) : raw[vector], rotation, mean, values);
      if (is_hidden(vector)) {
#pragma unroll
        for (float& x : values) x = 0.f;
      }
      if (has_channels<Format>(params, lanes) && exists(vector))
        store_int8(format_, to + key_offset(vector) * params.row_bytes, values, inverses);
    }
  }

 private:
  static __device__ __forceinline__ constexpr int key_offset(int vector) {
    return kKeysAtOnce == 1 ? vector / 2 * 8 + vector % 2 : vector * 4 * kKeysAtOnce;
  }
  __device__ __forceinline__ bool is_hidden(int vector) const { return kMayHide && (hidden_ >> vector & 1u); }
  __device__ __forceinline__ bool exists(int vector) const { return key_ + key_offset(vector) < length_; }

  // Minus the mean, rotated if wanted.
  __device__ __forceinline__ void get(Vec8<T> raw, const Rotation<kLanes>& rotation, const float (&mean)[8],
                                      float (&values)[8]) const {
    if constexpr (kMayRotate) rotation.change_signs(raw);
    raw.get(values);
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i] -= mean[i];
    if (format_.rotated) rotation.transform(values);
  }

  // The lane's first key, of those that are not hidden, in place of one that does not exist or is hidden: it does not
  // change the largest magnitude.
  __device__ __forceinline__ Vec8<T> read(int vector) const {
    if constexpr (kMayHide)
      return Held::read(from_ +
                        (exists(vector) && !is_hidden(vector) ? key_offset(vector) * Held::kTokenBytes : first_shown_));
    return Held::read(from_ + (exists(vector) ? key_offset(vector) * Held::kTokenBytes : 0));
  }

  // A lane has the same channels of all its keys. Subtraction is monotonic, so where they are not rotated their
  // extremes give the largest magnitude; `raw` then keeps them, in kernels that never rotate. Beside a rotation the
  // registers do not hold them.
  template <int kKept>
  __device__ __forceinline__ float amax_of_lane(Vec8<T> (&raw)[kKept], const Rotation<kLanes>& rotation,
                                                const float (&mean)[8]) const {
    float amax = 0.f;
    if constexpr (kMayRotate) {
#pragma unroll kUnrolled
      for (int vector = 0; vector < kVectors; ++vector) {
        float values[8];
        get(read(vector), rotation, mean, values);
        amax = max_nan(amax, amax_of_vec8(values));
      }
    } else {
#pragma unroll
      for (int vector = 0; vector < kVectors; ++vector) raw[vector] = read(vector);
      VectorExtremes<T> extremes;
      extremes.clear();
#pragma unroll
      for (const Vec8<T>& x : raw) extremes.add(x);
      float largest[8], smallest[8];
      extremes.largest.get(largest);
      extremes.smallest.get(smallest);
#pragma unroll
      for (int i = 0; i < 8; ++i) amax = max_nan(amax, max_nan(largest[i] - mean[i], mean[i] - smallest[i]));
    }
    return amax;
  }

  // Whether the mask may change a score of the block. One of the four warps that have keys of it stores for the head
  // where a mask for all queries and heads ends the keys.
  __device__ __forceinline__ bool is_masked(const Mask& mask, int batch, Prepared& prepared) const {
    if (mask.element == kNone) return false;
    if (mask.head_stride != 0 || mask.query_stride != 0) return true;
    const int first = block_ * kScaleBlock, lane = threadIdx.x % 32;
    int end = 0, unchanged = 0;
#pragma unroll 1
    for (int key = first; key < min(first + kScaleBlock, length_); key += 32) {
      const float term = key + lane < length_
                             ? mask_term(mask_value(mask, batch * mask.batch_stride + (key + lane) * mask.key_stride))
                             : kLowestTerm;
      const unsigned attended = __ballot_sync(0xffffffffu, !(term <= kLowestTerm));  // or NaN
      if (attended != 0) end = key + 32 - __clz(attended);
      unchanged += __popc(__ballot_sync(0xffffffffu, term == 0.f));
    }
    if (scale_ == 0 && lane == 0 && end != 0) {
      atomicMax(&prepared.keys.end, end);
      atomicAdd(&prepared.keys.unchanged, unchanged);
    }
    return unchanged != min(kScaleBlock, length_ - first);
  }

  const int block_, scale_, length_;
  int key_;        // the lane's first
  unsigned from_;  // its place
  const Format format_;
  unsigned hidden_ = 0;  // bits of vectors
  int first_shown_ = 0;  // bytes from `from_`
  bool none_shown_ = false;
};

// The block's share of the keys, from the mean of K in `scratch` on.
template <class T, int kLanes, class Format, class Hidden>
__device__ __forceinline__ void quantize_held_keys(const QuantizeParams& params, const BatchHead& bh,
                                                   const HeldTokens<T, kLanes>& held, int length,
                                                   const Lanes<kLanes>& lanes, const Scratch<T, kLanes>& scratch,
                                                   const Hidden& hidden, const ShownKeys& shown, const Format& format,
                                                   Prepared& prepared) {
  float mean[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) mean[i] = scratch.means[lanes.channel + i];
  const Rotation<kLanes> rotation(format.rotated);
  if constexpr (Format::kMayRotate) rotation.change_signs(mean);
  for (int part = threadIdx.x / 32; part < held.count / kScaleBlock * kScalesPerBlock; part += scratch.kWarps) {
    const int first = part / kScalesPerBlock * kScaleBlock;
    if (held.first + first >= length) break;
    KeyGroup<T, kLanes, Format, Hidden>(held, first, part % kScalesPerBlock, length, lanes, hidden, shown, format)
        .quantize(params, bh, lanes, rotation, mean, prepared);
  }
}

template <class T, int kLanes>
__device__ __forceinline__ void prepare_keys(const OnePassParams& params, const BatchHead& bh, bool writes,
                                             const HeldTokens<T, kLanes>& held, Scratch<T, kLanes>& scratch,
                                             NoHiddenKeys, ShownKeys& all, Prepared& prepared) {
  const StatisticsParams& statistics = params.statistics;
  const int length = statistics.kv_length;
  const Lanes<kLanes> lanes(statistics.head_dim);
  const float sum =
      statistics_of<false>(held, length, statistics.cluster_blocks, lanes, scratch, NoHiddenKeys(), all).sum;
  const int own = threadIdx.x;
  if (own < scratch.kChannels) {
    const bool exists = own < statistics.head_dim;
    scratch.means[own] = exists ? sum / sampled_key_count(length) : 0.f;
    if (writes && exists) statistics.k_mean[i64(bh.index) * statistics.head_dim + own] = scratch.means[own];
  }
  cluster_arrive();
  __syncthreads();
  quantize_held_keys<T, kLanes>(params.quantize, bh, held, length, lanes, scratch, NoHiddenKeys(), all,
                                FixedFormat<8, false>(), prepared);
}

// The same by a kernel that chooses the rotation of the head, or whose mask may hide keys.
template <class T, int kLanes, class Hidden>
__device__ __forceinline__ void prepare_keys(const ChoosingOnePassParams& params, const BatchHead& bh, bool writes,
                                             const HeldTokens<T, kLanes>& held, Scratch<T, kLanes>& scratch,
                                             Hidden hidden, ShownKeys& shown, Prepared& prepared) {
  const ChoosingStatisticsParams& statistics = params.statistics;
  const Lanes<kLanes> lanes(statistics.head_dim);
  const int length = statistics.kv_length, blocks = statistics.cluster_blocks, own = threadIdx.x;
  const float sum = statistics_of<false>(held, length, blocks, lanes, scratch, hidden, shown).sum;
  const int tokens =
      is_same_v<Hidden, HiddenKeys> ? tokens_of(hidden, shown, blocks, length) : sampled_key_count(length);
  if (own < scratch.kChannels) {
    const bool exists = own < statistics.head_dim;
    scratch.means[own] = exists ? sum / tokens : 0.f;
    if (writes && exists) statistics.k_mean[i64(bh.index) * statistics.head_dim + own] = scratch.means[own];
  }
  __syncthreads();
  const int shown_of_head = shown.of_head;
  hidden.all_but(shown_of_head);
  bool rotated;
  if (statistics.rotates == Rotates::by_head) {
    __shared__ ChoiceScratch choice;
    rotated = choose_rotation<T, kLanes>(statistics, bh, scratch.means, hidden, choice);
  } else {
    rotated = is_rotated_without_choice(params.quantize, bh.index);
  }
  if (writes && own == 0) tell_choices(statistics, bh.index, shown_of_head, rotated);
  cluster_arrive();
  quantize_held_keys<T, kLanes>(params.quantize, bh, held, length, lanes, scratch, hidden, shown,
                                FormatOfHead<8>{rotated}, prepared);
}

template <class T, int kLanes, class Params, class Hidden>
__device__ __forceinline__ void prepare_values(const Params& params, const BatchHead& bh, bool writes,
                                               const HeldTokens<T, kLanes>& held, Scratch<T, kLanes>& scratch,
                                               Hidden hidden, ShownKeys& shown) {
  constexpr bool kMayHide = is_same_v<Hidden, HiddenKeys>;
  const StatisticsParams& statistics = params.statistics;
  const Lanes<kLanes> lanes(statistics.head_dim);
  const ChannelStatistics total =
      statistics_of<true>(held, statistics.kv_length, statistics.cluster_blocks, lanes, scratch, hidden, shown);
  const int own = threadIdx.x;
  if (own < scratch.kChannels) {
    ValueFactors factors{};
    if (own < statistics.head_dim) {
      factors = value_factors<T>(total.sum, total.largest, -total.smallest,
                                 tokens_of(hidden, shown, statistics.cluster_blocks, statistics.kv_length),
                                 statistics.smooth_v);
      if (writes) store_value_factors(statistics, i64(bh.index) * statistics.head_dim + own, factors);
    }
    scratch.means[own] = factors.mean;
    scratch.inverses[own] = factors.inverse;
  }
  cluster_arrive();
  __syncthreads();
  if constexpr (kMayHide) hidden.all_but(shown.of_head);

  // A warp takes 4 groups of 8 channels, and a lane of it 8 of 16 keys: two words of each channel, which stand beside
  // those of seven other lanes.
  constexpr int kGroups = kLanes / 4, kWarpTokens = 64;
  static_assert(HeldTokens<T, kLanes>::kUnitTokens == kQuantizeThreads / 32 / kGroups * kWarpTokens);
  const QuantizeParams& quantize = params.quantize;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int channel = (warp % kGroups * 4 + lane % 4) * 8, part = lane / 4;
  if (channel / kVChannels * kVChannels >= quantize.v_rows) return;
  unsigned char* const row =
      quantize.v_fp8 + (i64(bh.index) * quantize.v_rows + row_of_channel(channel)) * quantize.key_row_bytes;
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
    const int first = local + part / 2 * 16 + part % 2 * 4;
    const unsigned from = held.address(first, channel);
    const auto token_of = [](int word, int i) {
      return 2 * word + i / 2 * 8 + i % 2;  // does not change bit 2 of `first`
    };
    unsigned hidden_tokens = 0;  // from `first` on
    if (hidden.any()) hidden_tokens = shown.hidden[first / 32] >> first % 32;
    unsigned words[2][8];
#pragma unroll
    for (int word = 0; word < 2; ++word) {
      float values[4][8];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int token = token_of(word, i);
        const bool is_hidden = hidden_tokens >> token & 1u;
        const bool valid = active && held.first + first + token < quantize.kv_length && !is_hidden;
        held.read(from + token * held.kTokenBytes).get(values[i]);
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

// Of ChoosingOnePassParams: heads may be rotated, all or those that gain; with HiddenKeys the mask may hide keys.
template <class T, int kLanes, class Params, class Hidden>
__device__ __forceinline__ void one_pass_kernel(const Params& params) {
  constexpr bool kChooses = is_same_v<Params, ChoosingOnePassParams>;
  __shared__ Scratch<T, kLanes> scratch;
  const auto& statistics = params.statistics;
  const int blocks = statistics.cluster_blocks, block = blockIdx.x % blocks, cluster = blockIdx.x / blocks;
  const BatchHead bh(cluster / params.tensors, statistics.kv_heads);
  const int tokens = params.units * HeldTokens<T, kLanes>::kUnitTokens;
  const HeldTokens<T, kLanes> held{shared_address(held_vectors), block * tokens, tokens};
  const bool is_v = cluster % params.tensors;
  const Strided& tensor = is_v ? statistics.v : statistics.k;
  Prepared& prepared = statistics.prepared[bh.index];
  // In this order: the quantization of Q does not wait for this kernel, but for all before it. The attention kernel
  // starts when all blocks are here, so that it finds zeros or what was added. Other blocks of the cluster add behind
  // the barrier of the statistics.
  griddepcontrol_wait();
  if (threadIdx.x == 0) {
    if (block == 0) {
      if (is_v)
        prepared.blocks.v = 0;
      else
        prepared.blocks.k = prepared.keys.end = prepared.keys.unchanged = 0;
      if constexpr (kChooses) {
        if (!is_v) statistics.choices[bh.index] = {};
      }
      __threadfence();
    }
    griddepcontrol_launch_dependents();
  }
  if constexpr (kChooses) {
    if (!is_v && statistics.rotates == Rotates::by_head) prefetch_sample<T, kLanes>(statistics, bh);
  }
  held.copy(bh.of<T>(tensor), tensor.token_stride, statistics.kv_length, Lanes<kLanes>(statistics.head_dim));
  cp_async_wait();
  __shared__ ShownKeys shown;
  const Hidden hidden = [&]() -> Hidden {
    if constexpr (kChooses)
      return {statistics.mask, bh.batch};
    else
      return {};
  }();
  if (is_v)
    prepare_values<T, kLanes>(params, bh, block == 0, held, scratch, hidden, shown);
  else
    prepare_keys<T, kLanes>(params, bh, block == 0, held, scratch, hidden, shown, prepared);
  __syncthreads();
  if (threadIdx.x == 0) red_release_add(is_v ? &prepared.blocks.v : &prepared.blocks.k, 1);
  cluster_wait();  // no block leaves while its shared memory may be read
}

}  // namespace sm90

#define ONE_PASS_KERNEL(name, T, lanes, Params, Hidden)                                     \
  extern "C" __global__ void __launch_bounds__(sm90::kQuantizeThreads, lanes == 32 ? 2 : 3) \
      name(const __grid_constant__ sm90::Params params) {                                   \
    sm90::one_pass_kernel<T, lanes, sm90::Params, sm90::Hidden>(params);                    \
  }
#define ONE_PASS_KERNELS(prefix, suffix, T, Params, Hidden)        \
  ONE_PASS_KERNEL(prefix##_##suffix##_d64, T, 8, Params, Hidden)   \
  ONE_PASS_KERNEL(prefix##_##suffix##_d128, T, 16, Params, Hidden) \
  ONE_PASS_KERNEL(prefix##_##suffix##_d256, T, 32, Params, Hidden)
#define ONE_PASS_KERNELS_OF(suffix, T)                                                \
  ONE_PASS_KERNELS(one_pass, suffix, T, OnePassParams, NoHiddenKeys)                  \
  ONE_PASS_KERNELS(one_pass_choosing, suffix, T, ChoosingOnePassParams, NoHiddenKeys) \
  ONE_PASS_KERNELS(one_pass_hiding, suffix, T, ChoosingOnePassParams, HiddenKeys)
ONE_PASS_KERNELS_OF(fp16, __half)
ONE_PASS_KERNELS_OF(bf16, __nv_bfloat16)
#undef ONE_PASS_KERNELS_OF
#undef ONE_PASS_KERNELS
#undef ONE_PASS_KERNEL
