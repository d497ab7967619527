// A consumer warpgroup of the precise mode: scores, online softmax and values of 64 query rows.
#pragma once

#include "sm90/key_order.cuh"
#include "sm90/mma_scores.cuh"
#include "sm90/pipeline_reader.cuh"
#include "sm90/precise_epilogue.cuh"
#include "sm90/precise_softmax.cuh"
#include "sm90/wgmma.cuh"

namespace sm90 {

// The type of P and V.
template <PvElement>
struct PvTypeOf;
template <>
struct PvTypeOf<PvElement::fp16> {
  using Type = __half;
};
template <>
struct PvTypeOf<PvElement::bf16> {
  using Type = __nv_bfloat16;
};

template <class Traits>
struct PreciseConsumer : PipelineReader<Traits> {
  using Pipeline = PipelineReader<Traits>;
  using Pipeline::kScales, Pipeline::params, Pipeline::storage, Pipeline::tiles, Pipeline::steps;
  using Pipeline::load_k_scale, Pipeline::is_biased;
  using Pipeline::wait_for_stage, Pipeline::take_stage, Pipeline::release_stage, Pipeline::key_tile_of;
  using T = typename PvTypeOf<Traits::kPv>::Type;
  static constexpr int kBlockN = Traits::kBlockN;
  static constexpr int kScoreSteps = Traits::kHeadDim / 32;  // of the reduction, in bytes of int8
  // The faster orders of a step by ptxas (E053, E055): K's scales are read before the products are issued; the
  // exponentials come before the wait for the values, and row by row.
  static constexpr bool kScaleFirst = Traits::kBlockList || Traits::kHeadDim > 64;
  static constexpr bool kExponentialsFirst = !Traits::kBlockList || Traits::kHeadDim != 128;
  static constexpr bool kRowByRow = kExponentialsFirst;

  PreciseRowState<T> state;
  // Unused. The places of the other members decide which registers ptxas takes: without this one the code of a few
  // kernels is another one, which nobody timed.
  int gap;
  float q_scale[2], k_scale[kScales];
  unsigned q[kScoreSteps][4];  // A operands: Q is read from shared memory once for all keys
  int scores[kBlockN / 2];
  unsigned packed[kBlockN / 16][4];
  float out[Traits::kHeadDim / 2];

  __device__ __forceinline__ PreciseConsumer(const AttentionParams& params, const SharedStorage<Traits>& storage)
      : Pipeline{params, storage} {}

  // Not kept in registers. Nor is what follows from the thread's number, with a mask, whose terms need them.
  static __device__ __forceinline__ int consumer_thread() {
    int thread = threadIdx.x;
    if constexpr (Traits::kHasBias) asm volatile("" : "+r"(thread));
    return thread - 128;
  }
  static __device__ __forceinline__ int warpgroup() { return __shfl_sync(0xffffffffu, consumer_thread() / 128, 0); }
  static __device__ __forceinline__ int lane_in_quad() { return threadIdx.x % 4; }
  // In the work tile; the thread also holds the row 8 further.
  static __device__ __forceinline__ int row() { return consumer_thread() / 32 * 16 + threadIdx.x % 32 / 4; }

  // A work tile is decoded where it is used, so that the loop keeps none of it in registers.
  __device__ __forceinline__ WorkTile decode_again(int place) const {
    asm volatile("" : "+r"(place));
    return work_tile_at<Traits>(params, place);
  }

  __device__ __forceinline__ void issue_scores(int stage) {
    const u64 k = matrix_descriptor<Traits::kRowBytes>(storage.k(stage));
    constexpr int kStepsPerBox = Traits::kRowBytes / 32;
#pragma unroll
    for (int step = 0; step < kScoreSteps; ++step) {
      const int box = step / kStepsPerBox, within = (step % kStepsPerBox) * 2;
      WgmmaS8FromRegisters<kBlockN>::issue(scores, q[step], k + box * (kBlockN * Traits::kRowBytes / 16) + within,
                                           step > 0);
    }
    wgmma_commit_group();
  }

  // O += P V, accumulated by the tensor cores.
  __device__ __forceinline__ void issue_values(int stage) {
    const u64 v = matrix_descriptor_mn_major(storage.v(stage), Traits::VTile::kBoxBytes);
#pragma unroll
    for (int step = 0; step < kBlockN / 16; ++step)
      Wgmma16<T, Traits::kHeadDim>::issue(out, packed[step], v + step * (16 * 128 / 16));
    wgmma_commit_group();
  }

  // The softmax of a tile with masked keys or additive terms. Returns whether `out` has to be multiplied by `factor`.
  template <bool kLimited>
  __device__ __forceinline__ bool softmax_masked(const WorkTile& tile, int key_tile, float (&sums)[2],
                                                 float (&factor)[2]) {
    int limit[2];
#pragma unroll
    for (int i = 0; i < 2; ++i)
      limit[i] = kLimited && is_causal<Traits>(params) ? min(params.kv_length, tile.first_row + row() + 8 * i + 1)
                                                       : params.kv_length;
    float scale[kScales], maximum[2];
#pragma unroll
    for (int i = 0; i < kScales; ++i) scale[i] = Traits::kHasBias ? fabsf(k_scale[i]) : k_scale[i];
    const int first_key = key_tile * kBlockN, own_key = first_key + 2 * lane_in_quad();
    const auto scaled_with = [&](const auto& terms) {
      scale_scores<kBlockN, kLimited>(scores, q_scale, scale, own_key, limit, terms, maximum);
    };
    if constexpr (!Traits::kHasBias)
      scaled_with(NoTerms());
    else if (params.mask.query_stride == 0)
      scaled_with(KeyTerms<kBlockN>(params, tile, first_key));
    else
      scaled_with(RowTerms(params, tile, row(), own_key));
    const bool raised = state.raise(maximum, PreciseRowState<T>::kLag, factor);
    exponentials_of_floats<kBlockN>(scores, state, sums);
    return raised;
  }

  // The softmax of a whole tile. Returns whether its P are out of range because the base is too low.
  __device__ __forceinline__ bool softmax(float (&sums)[2]) {
    exponentials<kBlockN, kRowByRow>(scores, state, q_scale, k_scale, sums);
    constexpr float kLargest = ProbabilityRange<T>::kLargest;
    return __any_sync(0xffffffffu, sums[0] > kLargest || sums[1] > kLargest);
  }

  // The same once more with a base that fits, from the scores computed anew. `stage` is still held.
  __device__ __forceinline__ bool softmax_again(int stage, float (&sums)[2], float (&factor)[2]) {
    constexpr int kNoLimit[2] = {1, 1};
    float maximum[2];
    mma_scores<Traits>(scores, q, storage.k(stage));
    scale_scores<kBlockN, false>(scores, q_scale, k_scale, 0, kNoLimit, NoTerms(), maximum);
    const bool raised = state.raise(maximum, 0.f, factor);
    exponentials_of_floats<kBlockN>(scores, state, sums);
    pack_probabilities<kBlockN, T>(scores, packed);
    __syncwarp();  // all lanes have read the stage
    return raised;
  }

  // Moves the base of what was summed up.
  __device__ __forceinline__ void rescale(const float (&factor)[2]) {
#pragma unroll
    for (int i = 0; i < Traits::kHeadDim / 2; ++i) out[i] *= factor[i / 2 % 2];
  }

  // The rest of a step whose scores the mask changes. Its terms need registers, so both products are over before, and
  // what it has to know of the work tile is found anew.
  __device__ __forceinline__ void step_masked(int place, int left, int stage) {
    warpgroup_fence_operand(out);
    wgmma_fence();
    issue_values(stage);
    wgmma_wait_group<0>();
    warpgroup_fence_operand(scores);
    warpgroup_fence_operand(out);
    const WorkTile tile = decode_again(place);
    const KeyOrder<Traits> order(params, tile);
    float sums[2], factor[2];
    const bool raised = softmax_masked<false>(tile, key_tile_of(stage, order[left]), sums, factor);
    if (raised) rescale(factor);
    state.sum[0] += sums[0];
    state.sum[1] += sums[1];
    pack_probabilities<kBlockN, T>(scores, packed);
    release_stage(stage);
  }

  // One step: the scores of the next key tile and the values of this one are in flight together, and the softmax of the
  // next hides the values' product. So do steps that a mask leaves as they are: the scores' product hides the vote that
  // tells them apart. All four warps of a group, which issue a product together, vote alike, as they read the same
  // scales.
  __device__ __forceinline__ void step(int place, int left) {
    wait_for_stage();
    const int stage = take_stage();
    if constexpr (kScaleFirst || Traits::kHasBias) load_k_scale(stage, lane_in_quad(), k_scale);
    warpgroup_fence_operand(scores);
    wgmma_fence();
    issue_scores(stage);
    if constexpr (Traits::kHasBias) {
      if (is_biased(k_scale)) return step_masked(place, left, stage);
    }
    warpgroup_fence_operand(out);
    wgmma_fence();
    issue_values(stage);
    if constexpr (!kScaleFirst && !Traits::kHasBias) load_k_scale(stage, lane_in_quad(), k_scale);
    wgmma_wait_group<1>();
    warpgroup_fence_operand(scores);
    float sums[2], factor[2];
    bool raised = false;
    const bool low = softmax(sums);
    if constexpr (kExponentialsFirst) warpgroup_fence_operand(scores);
    wgmma_wait_group<0>();
    warpgroup_fence_operand(out);
    pack_probabilities<kBlockN, T>(scores, packed);
    // Last, so that nothing before it waits for the vote.
    if (low) raised = softmax_again(stage, sums, factor);
    if (raised) rescale(factor);
    state.sum[0] += sums[0];
    state.sum[1] += sums[1];
    release_stage(stage);
  }

  // Stages that hold no key of this warpgroup's rows.
  __device__ __forceinline__ void skip_stages(int count) {
    for (int i = 0; i < count; ++i) {
      wait_for_stage();
      __syncwarp();  // all lanes have waited
      release_stage(take_stage());
    }
  }

  // Q's operands and scales; its buffer is free afterwards.
  __device__ __forceinline__ void load_q() {
    const int buffer = this->wait_for_q();
    ++tiles;
#pragma unroll
    for (int i = 0; i < 2; ++i) q_scale[i] = ld_shared(storage.q_scale(buffer) + 4 * (row() + 8 * i));
#pragma unroll
    for (int step = 0; step < kScoreSteps; ++step)
      load_q_operand<Traits>(q[step], storage.q(buffer), consumer_thread() / 32 * 16, step);
    __syncwarp();  // all lanes have read
    this->release_q(buffer);
  }

  // The key tiles of which `left` are left behind the next.
  __device__ __forceinline__ void attend(int place, const WorkTile& tile, int left) {
    wait_for_stage();
    const int first = take_stage();
    load_k_scale(first, lane_in_quad(), k_scale);
    warpgroup_fence_operand(scores);
    wgmma_fence();
    issue_scores(first);
    wgmma_wait_group<0>();
    warpgroup_fence_operand(scores);
    const int first_tile = key_tile_of(first, left);
    __syncwarp();  // all lanes have read their K scales
    release_stage(first);
    float unused[2];
    softmax_masked<true>(decode_again(place), first_tile, state.sum, unused);
    pack_probabilities<kBlockN, T>(scores, packed);
    while (--left >= 0) step(place, left);
    wait_for_stage();
    const int final = take_stage();
    warpgroup_fence_operand(out);
    wgmma_fence();
    issue_values(final);
    wgmma_wait_group<0>();
    warpgroup_fence_operand(out);
    release_stage(final);
  }

  __device__ __forceinline__ void run_tile(int place, const WorkTile& tile) {
    load_q();
    const int first_row = tile.first_row + warpgroup() * 64;
    const int stages = Traits::kBlockList && tile.key_tiles == 0 ? 0 : tile.key_tiles + 1;
    if (first_row >= params.q_length) return skip_stages(stages);
    const int keys = is_causal<Traits>(params) ? min(params.kv_length, first_row + 64) : params.kv_length;
    const int last_tile = (keys + kBlockN - 1) / kBlockN - 1;  // that holds keys of these rows
    int left = Traits::kKeyEndFromPrologue ? tile.key_tiles - 1 : last_tile;
    if constexpr (Traits::kBlockList) {
      left = tile.key_tiles - 1;
      if (stages > 0) {
        wait_for_stage();
        left -= key_tile_of(steps % Traits::kStages, 0) > last_tile;  // half of a tile on the diagonal
      }
    }
    skip_stages(tile.key_tiles - 1 - left);
    state.reset();
#pragma unroll
    for (float& x : out) x = 0.f;
    if (!Traits::kBlockList || stages > 0) attend(place, tile, left);  // an empty list gives zeros
    const PreciseEpilogue<T> epilogue(params, decode_again(place), row(), state);
    epilogue.store(out);
  }

  // With a block list, the test of its loop at the end makes ptxas count steps in uniform registers.
  __device__ __forceinline__ void run() {
    this->for_each_work_tile([&](int place, const WorkTile& tile) { run_tile(place, tile); });
  }
};

}  // namespace sm90
