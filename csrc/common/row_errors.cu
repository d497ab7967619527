// What heads lose by the key blocks that they leave out, measured on some of their rows, and how many blocks each head
// computes. A fused attention gives what each row gets from each key block alone; an output is a sum over those that
// are active.
#include "common/block_selection.h"
#include "common/elements.cuh"
#include "common/score_order.cuh"
#include "common/scores.cuh"

namespace common {

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) x += __shfl_xor_sync(0xffffffffu, x, distance);
  return x;
}

// The rows that are measured. A block of threads finds one unlike row of a head, the one in its part of the sequence
// that differs most from the mean of its sub-pool; one more block takes those that are spread.
template <class T>
struct RowSample {
  const SampleParams& params;
  const int head = blockIdx.x / (params.unlike + 1), part = blockIdx.x % (params.unlike + 1);
  const int rows = params.spread_rows + params.unlike;

  __device__ __forceinline__ const T* token(int at) const {
    const int batch = head / params.heads, of_batch = head - batch * params.heads;
    return static_cast<const T*>(params.q.pointer) + batch * params.q.batch_stride + of_batch * params.q.head_stride +
           at * params.q.token_stride;
  }

  __device__ __forceinline__ void take(int row, int at, int channel, int step) const {
    const i64 to = i64(head) * rows + row;
    if (channel == 0) params.tokens[to] = at;
    for (; channel < params.head_dim; channel += step)
      static_cast<T*>(params.rows)[to * params.head_dim + channel] = token(at)[channel];
  }

  // A warp reads a sub-pool; a lane has 8 channels, at head_dim 256 of all of its tokens.
  __device__ __forceinline__ void find(int pool, float& farthest, int& found) const {
    const int lane = threadIdx.x % 32, channel = 8 * lane;
    const bool exists = channel < params.head_dim;
    const int first = static_cast<int>(params.pools[i64(part) * params.pools_of_part + pool]);
    Vec8<T> raw[kPoolTokens];
    float mean[8]{};
#pragma unroll
    for (Vec8<T>& of_token : raw) of_token.clear();
    if (exists) {
#pragma unroll
      for (int i = 0; i < kPoolTokens; ++i) raw[i].load(token(first + i) + channel);
    }
#pragma unroll
    for (const Vec8<T>& of_token : raw) {
      float values[8];
      of_token.get(values);
#pragma unroll
      for (int j = 0; j < 8; ++j) mean[j] += values[j] * (1.f / kPoolTokens);
    }
#pragma unroll
    for (int i = 0; i < kPoolTokens; ++i) {
      float values[8], distance = 0.f;
      raw[i].get(values);
#pragma unroll
      for (int j = 0; j < 8; ++j) distance += (values[j] - mean[j]) * (values[j] - mean[j]);
      distance = warp_sum(distance);
      if (distance > farthest) farthest = distance, found = first + i;
    }
  }

  __device__ __forceinline__ void run() const {
    __shared__ float distances[kSampleWarps];
    __shared__ int places[kSampleWarps];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (part == params.unlike) {
      const i64* spread = params.spread + i64(head % params.heads / params.heads_of_group) * params.spread_rows;
      for (int row = warp; row < params.spread_rows; row += kSampleWarps)
        take(row, static_cast<int>(spread[row]), lane, 32);
      return;
    }
    float farthest = -1.f;
    int found = static_cast<int>(params.pools[i64(part) * params.pools_of_part]);
    for (int pool = warp; pool < params.pools_of_part; pool += kSampleWarps) find(pool, farthest, found);
    if (lane == 0) distances[warp] = farthest, places[warp] = found;
    __syncthreads();
    for (int i = 0; i < kSampleWarps; ++i)
      if (distances[i] > farthest || (distances[i] == farthest && places[i] < found))
        farthest = distances[i], found = places[i];
    take(params.spread_rows + part, found, threadIdx.x, kSampleThreads);
  }
};

// The log2 of a row's sum of exponentials over a key block. `head`: of this launch.
__device__ __forceinline__ float lse_of(const RowParams& params, int block, int head, int row) {
  const int full = params.kv_length / kListTile;
  const i64 place = i64(head) * params.rows + row;
  return kLog2E *
         (block < full ? params.lses[i64(block) * params.heads * params.rows + place] : params.last_lses[place]);
}

// The LSE of each row, and the blocks that many rows of a head attend to: their means may not tell. A block of threads
// has a head.
__device__ __forceinline__ void row_masses_kernel(const RowParams& params) {
  __shared__ float maxima[kMassThreads], sums[kMassThreads], totals[kMostRows];
  const int head = blockIdx.x, of_all = params.first_head + head;
  const int groups = kMassThreads / params.rows, group = threadIdx.x / params.rows;
  if (group < groups) {
    const int row = threadIdx.x - group * params.rows;
    float maximum = kLowest, sum = 0.f;
#pragma unroll 4
    for (int block = group; block < params.key_blocks; block += groups) {
      const float lse = lse_of(params, block, head, row), larger = fmaxf(maximum, lse);
      sum = sum * exp2f(maximum - larger) + exp2f(lse - larger);
      maximum = larger;
    }
    maxima[threadIdx.x] = maximum, sums[threadIdx.x] = sum;
  }
  __syncthreads();
  if (threadIdx.x < params.rows) {
    float maximum = kLowest, sum = 0.f;
    for (int i = threadIdx.x; i < groups * params.rows; i += params.rows) maximum = fmaxf(maximum, maxima[i]);
    for (int i = threadIdx.x; i < groups * params.rows; i += params.rows) sum += sums[i] * exp2f(maxima[i] - maximum);
    const float total = maximum + log2f(sum);
    totals[threadIdx.x] = total;
    params.totals[i64(of_all) * params.rows + threadIdx.x] = total;
  }
  __syncthreads();
  for (int block = threadIdx.x / 32; block < params.key_blocks; block += kMassThreads / 32) {
    float mass = 0.f;
    for (int row = threadIdx.x % 32; row < params.rows; row += 32)
      mass += exp2f(lse_of(params, block, head, row) - totals[row]);
    mass = warp_sum(mass);
    if (threadIdx.x % 32 == 0) {
      const bool is_forced = mass >= params.popular || (params.always && params.always[block]);
      params.forced[i64(of_all) * params.key_blocks + block] = is_forced;
    }
  }
}

// What one row loses. A block of threads has a row, and each thread a channel.
template <class T, int kChannels>
struct RowErrors {
  static constexpr int kAtOnce = 8;  // loads under way
  static constexpr int kWarps = kChannels / 32;
  // Of an entry of the order: beside the block.
  static constexpr unsigned kForced = 0x80000000u, kCompared = 0x40000000u, kBlock = 0x3fffffffu;

  struct Sum {
    float out, mass;
    __device__ __forceinline__ void add(float value, float weight) { out += value * weight, mass += weight; }
    __device__ __forceinline__ void add(const Sum& other) { out += other.out, mass += other.mass; }
  };

  const RowParams& params;
  const int row = blockIdx.x % params.rows, head = blockIdx.x / params.rows;
  const int of_all = params.first_head + head, kv_head = of_all / params.group;
  const int channel = threadIdx.x, blocks = params.key_blocks;
  const bool exists = channel < params.head_dim;
  const int token = params.tokens[i64(of_all) * params.rows + row], query_block = token / kListTile;
  const i64 block_row = i64(of_all) * ((params.q_length + kListTile - 1) / kListTile) + query_block;
  float* masses;
  float* tail;
  unsigned* keys;
  unsigned* order;
  float *between, *tail_between;  // (kMostCuts, kChannels): of blocks between a cut and the next
  float* pooled;

  __device__ __forceinline__ float block_sum(float x) const {
    __shared__ float parts[kWarps];
    x = warp_sum(x);
    __syncthreads();
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
    __syncthreads();
    float sum = 0.f;
#pragma unroll
    for (const float part : parts) sum += part;
    return sum;
  }

  // Q's mean over the sub-pool of the row to shared memory; returns the row's share of all scores.
  __device__ __forceinline__ float pool_query() const {
    const int batch = of_all / params.q_heads, of_batch = of_all - batch * params.q_heads;
    float sum = 0.f, common = 0.f;
    if (exists) {
      const T* q = static_cast<const T*>(params.q.pointer) + batch * params.q.batch_stride +
                   of_batch * params.q.head_stride + channel;
      const int first = token / kPoolTokens * kPoolTokens;
#pragma unroll
      for (int i = 0; i < kPoolTokens; ++i)
        sum += to_float(q[min(first + i, params.q_length - 1) * params.q.token_stride]);
      common = to_float(q[token * params.q.token_stride]) * params.center[i64(kv_head) * kChannels + channel];
    }
    pooled[channel] = sum * (1.f / kPoolTokens);
    return block_sum(common) * params.scale;
  }

  // What a block's mean would have of the row's probability, beside all blocks by their tokens.
  __device__ __forceinline__ float tail_mass(int block, float common, float total) const {
    const __nv_bfloat16* mean =
        static_cast<const __nv_bfloat16*>(params.key_means) + (i64(kv_head) * params.mean_rows + block) * kChannels;
    float score = 0.f;
#pragma unroll 4
    for (int first = 0; first < kChannels; first += 8) {
      float values[8];
      load_vec8(mean + first, values);
#pragma unroll
      for (int j = 0; j < 8; ++j) score += values[j] * pooled[first + j];
    }
    const int tokens = min(kListTile, params.kv_length - block * kListTile);
    return tokens * exp2f(score * params.scale + common - total);
  }

  // Blocks by falling scores, the lower one first of equal ones.
  __device__ __forceinline__ void rank() const {
    const float* scores = params.scores ? params.scores + block_row * blocks : nullptr;
    const unsigned* compared = params.compared ? params.compared + block_row * ((blocks + 31) / 32) : nullptr;
    const unsigned char* forced = params.forced + i64(of_all) * blocks;
    const float total = params.totals[i64(of_all) * params.rows + row];
    const float common = params.center ? pool_query() : 0.f;
    for (int block = threadIdx.x; block < blocks; block += kChannels) {
      masses[block] = exp2f(lse_of(params, block, head, row) - total);
      keys[block] = scores ? ordered(scores[block]) : 0u;
    }
    __syncthreads();
    for (int block = threadIdx.x; block < blocks; block += kChannels) {
      const unsigned own = keys[block];
      unsigned entry = block;
      int place = 0;
#pragma unroll 4
      for (int i = 0; i < blocks; ++i) place += keys[i] > own || (keys[i] == own && i < block);
      if (forced[block] || own == 0xffffffffu) entry |= kForced;
      if (!compared || compared[block / 32] >> block % 32 & 1) entry |= kCompared;
      order[place] = entry;
      tail[block] = params.center ? tail_mass(block, common, total) : 0.f;
    }
    __syncthreads();
  }

  // Adds up the blocks at these places: those that stay active at each cut, those that do not, and their tail.
  __device__ __forceinline__ void walk(int begin, int end, bool is_active, Sum& active, Sum& left_out, Sum& by_mean,
                                       Sum& compared, Sum& compared_by_mean) const {
    const int full = params.kv_length / kListTile;
    const T* outs =
        static_cast<const T*>(params.outs) + head * params.out_head_stride + row * params.out_row_stride + channel;
    const T* last = static_cast<const T*>(params.last_outs) + head * params.last_head_stride +
                    row * params.last_row_stride + channel;
    const __nv_bfloat16* means =
        static_cast<const __nv_bfloat16*>(params.value_means) + i64(kv_head) * params.mean_rows * kChannels + channel;
#pragma unroll 1
    for (int first = begin; first < end; first += kAtOnce) {
      T out[kAtOnce];
      __nv_bfloat16 mean[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int block = order[min(first + i, end - 1)] & kBlock;
        out[i] = T(0.f), mean[i] = __nv_bfloat16(0.f);
        if (exists) {
          out[i] = *(block < full ? outs + block * params.out_block_stride : last);
          if (params.center) mean[i] = means[i64(block) * kChannels];
        }
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (first + i >= end) break;
        const unsigned entry = order[first + i], block = entry & kBlock;
        const float value = to_float(out[i]), mass = masses[block];
        if (is_active || entry & kForced) {
          active.add(value, mass);
        } else {
          left_out.add(value, mass);
          by_mean.add(to_float(mean[i]), tail[block]);
        }
        if (entry & kCompared)
          compared.add(value, mass);
        else
          compared_by_mean.add(to_float(mean[i]), tail[block]);
      }
    }
  }

  __device__ __forceinline__ void norm_to(int place, const Sum& sum, float exact) const {
    // A row of which nothing is left gives zeros, as the attention kernels do.
    const float lost = sum.mass == 0.f ? exact : exact - sum.out / sum.mass;
    const float norm = block_sum(lost * lost);
    if (threadIdx.x == 0) params.norms[(i64(of_all) * params.rows + row) * kRowNorms + place] = norm;
  }

  __device__ __forceinline__ void run() const {
    constexpr int kTail = kMostCuts + 1;
    __shared__ float between_masses[kMostCuts], tail_masses[kMostCuts], active_masses[kMostCuts];
    rank();
    Sum active{}, left_out{}, by_mean{}, compared{}, compared_by_mean{};
    walk(0, params.cuts ? params.counts[params.cuts - 1] : blocks, true, active, left_out, by_mean, compared,
         compared_by_mean);
#pragma unroll 1
    for (int cut = params.cuts - 1; cut >= 0; --cut) {
      left_out = by_mean = {};
      walk(params.counts[cut], cut ? params.counts[cut - 1] : blocks, false, active, left_out, by_mean, compared,
           compared_by_mean);
      between[cut * kChannels + channel] = left_out.out, tail_between[cut * kChannels + channel] = by_mean.out;
      if (threadIdx.x == 0) between_masses[cut] = left_out.mass, tail_masses[cut] = by_mean.mass;
    }
    __syncthreads();
    // From the loosest cut to the strictest: what is active, and in the end all.
#pragma unroll 1
    for (int cut = params.cuts - 1; cut >= 0; --cut) {
      left_out = {between[cut * kChannels + channel], between_masses[cut]};
      between[cut * kChannels + channel] = active.out;
      if (threadIdx.x == 0) active_masses[cut] = active.mass;
      active.add(left_out);
    }
    __syncthreads();
    const float exact = active.out;
    by_mean = {};
#pragma unroll 1
    for (int cut = 0; cut < params.cuts; ++cut) {
      active = {between[cut * kChannels + channel], active_masses[cut]};
      norm_to(cut, active, exact);
      if (params.center) {
        by_mean.add({tail_between[cut * kChannels + channel], tail_masses[cut]});
        active.add(by_mean);
        norm_to(kTail + cut, active, exact);
      }
    }
    if (params.compared) {
      norm_to(kMostCuts, compared, exact);
      if (params.center) {
        compared.add(compared_by_mean);
        norm_to(kTail + kMostCuts, compared, exact);
      }
    }
    const float norm = block_sum(exact * exact);
    if (threadIdx.x == 0) params.norms[(i64(of_all) * params.rows + row) * kRowNorms + kRowNorms - 1] = norm;
  }
};

template <class T, int kChannels>
__device__ __forceinline__ void row_errors_kernel(const RowParams& params) {
  extern __shared__ float shared[];
  const int blocks = params.key_blocks;
  float* between = shared + 4 * blocks;
  RowErrors<T, kChannels> errors{params};
  errors.masses = shared;
  errors.tail = shared + blocks;
  errors.keys = reinterpret_cast<unsigned*>(shared) + 2 * blocks;
  errors.order = reinterpret_cast<unsigned*>(shared) + 3 * blocks;
  errors.between = between;
  errors.tail_between = between + kMostCuts * kChannels;
  errors.pooled = between + 2 * kMostCuts * kChannels;
  errors.run();
}

// Of each head the loosest cut whose error and those of all stricter ones are within the bound, and with a tail where
// that leaves out more by what it costs. A block of threads has a head.
struct ChosenCut {
  const CutParams& params;
  const float *spread, *all;  // sums over the rows of kRowNorms

  // A row that is not spread counts a quarter, and only where it raises the error.
  __device__ __forceinline__ float error(int place) const {
    const int exact = kRowNorms - 1;
    return sqrtf(max_nan(spread[place] / spread[exact], all[place] / all[exact]));
  }

  __device__ __forceinline__ int loosest(int tail) const {
    int cut = 0;
    if (params.bound >= 0.f)
      while (cut + 1 < params.cuts && error(tail * (kMostCuts + 1) + cut + 1) <= params.bound) ++cut;
    return cut;
  }

  __device__ __forceinline__ void choose(int head) const {
    if (params.compared_errors) {
      const bool by_tail = params.compared_by_tail && params.compared_by_tail[head];
      params.compared_errors[head] = error(by_tail * (kMostCuts + 1) + kMostCuts);
    }
    if (params.cuts == 0) return;
    int cut = loosest(0);
    bool by_tail = false;
    if (params.has_tail) {
      const int cut_with_tail = loosest(1);
      by_tail = params.bound < 0.f || params.counts[cut] - params.counts[cut_with_tail] > params.tail_cost;
      if (by_tail) cut = cut_with_tail;
      params.by_tail[head] = by_tail;
    }
    params.chosen[head] = params.counts[cut];
    params.errors[head] = error(by_tail * (kMostCuts + 1) + cut);
  }
};

}  // namespace common

extern "C" __global__ void __launch_bounds__(common::kChoiceThreads)
    chosen_cuts(const __grid_constant__ common::CutParams params) {
  constexpr float kWeightOfUnlike = 0.25f;
  __shared__ float sums[2][common::kRowNorms];
  const int norm = threadIdx.x;
  if (norm < common::kRowNorms) {
    const float* norms = params.norms + common::i64(blockIdx.x) * params.rows * common::kRowNorms + norm;
    float spread = 0.f, unlike = 0.f;
#pragma unroll 8
    for (int row = 0; row < params.rows; ++row)
      (row < params.rows - params.unlike ? spread : unlike) += norms[row * common::kRowNorms];
    sums[0][norm] = spread, sums[1][norm] = spread + kWeightOfUnlike * unlike;
  }
  __syncthreads();
  if (threadIdx.x > 0) return;
  common::ChosenCut{params, sums[0], sums[1]}.choose(blockIdx.x);
}

extern "C" __global__ void __launch_bounds__(common::kMassThreads)
    row_masses(const __grid_constant__ common::RowParams params) {
  common::row_masses_kernel(params);
}

#define ROW_ERRORS_KERNEL(name, T, channels)                                              \
  extern "C" __global__ void __launch_bounds__(channels)                                  \
      row_errors_##name##_d##channels(const __grid_constant__ common::RowParams params) { \
    common::row_errors_kernel<T, channels>(params);                                       \
  }
#define ROW_KERNELS(name, T)                                                   \
  extern "C" __global__ void __launch_bounds__(common::kSampleThreads)         \
      row_sample_##name(const __grid_constant__ common::SampleParams params) { \
    common::RowSample<T>{params}.run();                                        \
  }                                                                            \
  ROW_ERRORS_KERNEL(name, T, 64)                                               \
  ROW_ERRORS_KERNEL(name, T, 128)                                              \
  ROW_ERRORS_KERNEL(name, T, 256)
ROW_KERNELS(fp16, __half)
ROW_KERNELS(bf16, __nv_bfloat16)
#undef ROW_KERNELS
#undef ROW_ERRORS_KERNEL
