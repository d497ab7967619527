// A consumer warpgroup of the attention kernel: scores, online softmax and values of 64 query rows.
#pragma once

#include "sm90/epilogue.cuh"
#include "sm90/key_order.cuh"
#include "sm90/padded_tile.cuh"
#include "sm90/pipeline_reader.cuh"
#include "sm90/products.cuh"
#include "sm90/query_quantizer.cuh"
#include "sm90/step_order.cuh"

namespace sm90 {

template <class Traits, bool kHasBias = Traits::kHasBias>
struct Consumer : PipelineReader<Traits> {
  using Pipeline = PipelineReader<Traits>;
  using Pipeline::kScales, Pipeline::params, Pipeline::storage, Pipeline::tiles, Pipeline::steps;
  using Pipeline::load_k_scale, Pipeline::is_biased;
  using Pipeline::wait_for_stage, Pipeline::take_stage, Pipeline::release_stage, Pipeline::key_tile_of;
  static constexpr int kBlockN = Traits::kBlockN;
  // One accumulator up to head_dim 128; two halves of the channels above, because registers do not hold two results of
  // 256.
  static constexpr bool kHalves = Traits::kHeadDim > 128;
  static constexpr int kLastColumns = (kHalves ? 128 : Traits::kHeadDim) + 8;
  static constexpr bool kPadded = Traits::kKeyEndFromProducer && !kHasBias;  // the mask does nothing but end the keys
  static constexpr bool kWide = Traits::kHeadDim >= 128;
  static constexpr StepOrder kOrder = step_order<Traits, kHasBias>();

  const int group;  // consumer warpgroup 0 or 1
  const int row;    // in the work tile; the thread also holds row + 8
  const int lane;   // in the quad

  RowState state;
  // Unused. The places of the other members decide which registers ptxas takes: without this one the code of a few
  // kernels is another one, which nobody timed.
  int gap;
  float q_scale[2], k_scale[kScales];
  int scores[kBlockN / 2];
  unsigned packed[kBlockN / 32][4];
  float first_half[kHalves ? 64 : 1];
  float last[kLastColumns / 2];  // the last 8 columns hold the row sum

  __device__ __forceinline__ Consumer(const AttentionParams& params, const SharedStorage<Traits>& storage,
                                      int thread = threadIdx.x - 128)
      : Pipeline{params, storage},
        group(__shfl_sync(0xffffffffu, thread / 128, 0)),
        row((thread / 32) * 16 + (thread % 32) / 4),
        lane(thread % 4) {}

  __device__ __forceinline__ void issue_scores(int stage) {
    issue_score_product<Traits>(scores, storage.q(tiles % kQBuffers) + group * 64 * Traits::kRowBytes,
                                storage.k(stage));
  }

  // P V for kColumns channels from `first_row` of V^T on, into fresh registers: the first level of the accumulation.
  template <int kColumns>
  __device__ __forceinline__ void issue_values(float (&result)[kColumns / 2], int stage, int first_row) {
    issue_value_product<Traits, kColumns>(result, packed, storage.v(stage) + first_row * Traits::VTile::kRowBytes);
  }

  // Kernels with a fused prologue have no other additive terms.
  __device__ __forceinline__ bool is_mask_for_all_queries() const {
    return Traits::kFewKeys || (params.delta_s == nullptr && params.mask.query_stride == 0);
  }

  __device__ __forceinline__ void softmax_last(const WorkTile& tile, int key_tile) {
    const int first_key = key_tile * kBlockN + 2 * lane;
    int limit[2];
#pragma unroll
    for (int i = 0; i < 2; ++i)
      limit[i] = is_causal<Traits>(params) ? min(params.kv_length, tile.first_row + row + 8 * i + 1) : params.kv_length;
    float scale[kScales];
    scales_without_marks(scale);
    if constexpr (kPadded)
      return softmax_padded_tile<kBlockN>(scores, state, q_scale, scale, tile.key_end - key_tile * kBlockN, lane);
    if constexpr (kHasBias) {
      if (is_mask_for_all_queries()) {
        constexpr bool kEnds = Traits::kFewKeys;
        if constexpr (kEnds) {
#pragma unroll
          for (int i = 0; i < kScales; ++i)  // of keys that do not exist, it is what the memory held
            if (key_tile * kBlockN + i * kScaleBlock >= params.kv_length) scale[i] = 0.f;
        }
        const KeyTerms<kBlockN, kEnds> terms(params, tile, key_tile * kBlockN);
        return softmax_tile_with_terms<kBlockN, !kEnds>(scores, state, q_scale, scale, first_key, limit, terms);
      }
    }
    const Bias<kHasBias> bias(params, tile, row);
    bias.visit(
        [&](const auto& term) { softmax_last_tile<kBlockN>(scores, state, q_scale, scale, first_key, limit, term); });
  }
  __device__ __forceinline__ void softmax_biased(const WorkTile& tile, int key_tile) {
    float scale[kScales];
    scales_without_marks(scale);
    if constexpr (kHasBias) {
      if (is_mask_for_all_queries()) {
        const int limit[2] = {};  // there is none
        const KeyTerms<kBlockN> terms(params, tile, key_tile * kBlockN);
        return softmax_tile_with_terms<kBlockN, false>(scores, state, q_scale, scale, key_tile * kBlockN + 2 * lane,
                                                       limit, terms);
      }
    }
    const Bias<kHasBias> bias(params, tile, row);
    bias.visit([&](const auto& term) {
      softmax_biased_tile<kBlockN>(scores, state, q_scale, scale, key_tile * kBlockN + 2 * lane, params.kv_length,
                                   term);
    });
  }
  __device__ __forceinline__ void softmax(const WorkTile& tile, int key_tile) {
    if (kHasBias && is_biased(k_scale))
      softmax_biased(tile, key_tile);
    else
      softmax_full_tile<kBlockN, kWide, kOrder.by_row, !kWide>(scores, state, q_scale, k_scale);
  }

  // A K scale is negative where the mask may change a score of its block.
  __device__ __forceinline__ void scales_without_marks(float (&scale)[kScales]) const {
#pragma unroll
    for (int i = 0; i < kScales; ++i) scale[i] = kHasBias || kPadded ? fabsf(k_scale[i]) : k_scale[i];
  }
  // Scores alone, of a stage that was waited for.
  __device__ __forceinline__ void scores_of(int stage) {
    load_k_scale(stage, lane, k_scale);
    warpgroup_fence_operand(scores);
    wgmma_fence();
    issue_scores(stage);
    wgmma_wait_group<0>();
    warpgroup_fence_operand(scores);
  }

  __device__ __forceinline__ void issue_products(int stage, float (&result)[kLastColumns / 2]) {
    warpgroup_fence_operand(scores);
    wgmma_fence();
    issue_scores(stage);
    warpgroup_fence_operand(result);
    wgmma_fence();
    issue_values<kLastColumns>(result, stage, 0);
  }

  // A step whose scores may have additive terms: they need the registers of `result`, so only the other group's softmax
  // hides the values' product.
  __device__ __forceinline__ void step_biased(const WorkTile& tile, int key_tile, int stage,
                                              float (&result)[kLastColumns / 2]) {
    key_tile = key_tile_of(stage, key_tile);
    const float rescale[2] = {state.rescale[0], state.rescale[1]};
    issue_products(stage, result);
    wait_for_stage();
    wgmma_wait_group<0>();
    warpgroup_fence_operand(scores);
    warpgroup_fence_operand(result);
    accumulate(last, result, rescale);
    softmax_biased(tile, key_tile);
    release_stage(stage);
    pack_probabilities<kBlockN>(scores, packed);
    if constexpr (kOrder.scales_ahead) load_k_scale(steps % Traits::kStages, lane, k_scale);
  }

  // One step: the scores of the next key tile and the values of this one are in flight together, and the softmax of the
  // next hides the values' product. So do steps that a mask leaves as they are. They are told apart before the products
  // are issued, as ptxas needs registers for both ways once the values are in flight. All four warps of a group, which
  // issue a product together, go the same way: their scales are of the same blocks.
  __device__ __forceinline__ void step(const WorkTile& tile, int key_tile, float (&result)[kLastColumns / 2]) {
    const int stage = take_stage();
    if constexpr (!kOrder.scales_ahead) load_k_scale(stage, lane, k_scale);
    const float rescale[2] = {state.rescale[0], state.rescale[1]};
    issue_products(stage, result);
    wgmma_wait_group<1>();
    warpgroup_fence_operand(scores);
    if constexpr (kOrder.stage_first) wait_for_stage();
    softmax_full_tile<kBlockN, kOrder.from_last, kOrder.by_row, kOrder.tested>(scores, state, q_scale, k_scale);
    unsigned short upper[kBlockN / 8];
    if constexpr (!kOrder.packed_at_once) pack_upper<kBlockN>(scores, upper);
    if constexpr (!kOrder.stage_first) wait_for_stage();
    if constexpr (kOrder.scales_ahead) load_k_scale(steps % Traits::kStages, lane, k_scale);
    wgmma_wait_group<0>();
    warpgroup_fence_operand(result);
    release_stage(stage);
    if constexpr (kOrder.packed_at_once) pack_probabilities<kBlockN>(scores, packed);
    accumulate(last, result, rescale);
    if constexpr (!kOrder.packed_at_once) pack_lower<kBlockN>(scores, upper, packed);
  }

  // All steps but the first of a work tile. Those that a mask leaves as they are run in a loop of their own, for which
  // ptxas finds as good an order as without masks. Smooth Q's correction is in every step.
  __device__ __forceinline__ void steps_of(const WorkTile& tile, const KeyOrder<Traits>& order,
                                           float (&result)[kLastColumns / 2]) {
    int left = tile.key_tiles - 2;
    if constexpr (kHasBias) {
      while (true) {
        for (; left >= 0 && !is_biased(k_scale); --left) step(tile, order[left], result);
        if (left < 0) return;
        step_biased(tile, order[left], take_stage(), result);
        --left;
      }
    } else {
      for (; left >= 0; --left) step(tile, order[left], result);
    }
  }

  // The same for head dimensions above 128, one product after the other.
  __device__ __forceinline__ void step_in_halves(const WorkTile& tile, int key_tile) {
    const int stage = take_stage();
    if constexpr (kHasBias) key_tile = key_tile_of(stage, key_tile);
    values_of_stage(stage);
    scores_of(stage);
    release_stage(stage);
    softmax(tile, key_tile);
    pack_probabilities<kBlockN>(scores, packed);
    wait_for_stage();
  }

  template <int kColumns>
  __device__ __forceinline__ void values_of_columns(float (&total)[kColumns / 2], int stage, int first_row) {
    float result[kColumns / 2];
    warpgroup_fence_operand(result);
    wgmma_fence();
    issue_values<kColumns>(result, stage, first_row);
    wgmma_wait_group<0>();
    warpgroup_fence_operand(result);
    accumulate(total, result, state.rescale);
  }
  __device__ __forceinline__ void values_of_stage(int stage) {
    if constexpr (kHalves) {
      values_of_columns<128>(first_half, stage, 0);
      // This barrier has completed before. The wait is a fence for ptxas, which keeps the halves, and so their
      // registers, apart on both sides of its loop.
      mbarrier_wait(storage.full(stage), (steps - 1) / Traits::kStages % 2);
    }
    values_of_columns<kLastColumns>(last, stage, kHalves ? 128 : 0);
  }

  // Quantizes the rows that the group multiplies. The products of the work tile before may still run in other warps;
  // they read the other buffer.
  __device__ __forceinline__ void quantize_q(const WorkTile& tile, int buffer) {
    mbarrier_wait(storage.elements_full(), tiles % 2);
    const QueryQuantizer<Traits> quantizer(storage.elements(), storage.q(buffer), row, lane);
    const auto loaded = [&] {
      __syncwarp();
      if (threadIdx.x % 32 == 0) mbarrier_arrive(storage.elements_empty());
    };
    const auto run = [&](auto element) {
      using T = decltype(element);
      if constexpr (Traits::kRotatesQ) {
        if (is_rotated(tile)) return quantizer.template run_rotated<T>(params.scale, q_scale, loaded);
      }
      quantizer.template run<T>(params.scale, q_scale, loaded);
    };
    if (params.element == kHalf)
      run(__half());
    else
      run(__nv_bfloat16());
    fence_proxy_async_shared();
    warpgroup_barrier(1 + group);
  }

  // Of kernels that rotate Q, whose head has been prepared.
  __device__ __forceinline__ bool is_rotated(const WorkTile& tile) const {
    const u64 choices = ld_acquire_u64(&params.choices[tile.kv_head]);
    return __builtin_bit_cast(HeadChoices, choices).rotation == kRotated;
  }

  __device__ __forceinline__ void begin_tile(const WorkTile& tile) {
    const int buffer = this->wait_for_q();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      state.maximum[i] = kNegativeInfinity;
      if constexpr (!Traits::kFusedPrologue) q_scale[i] = ld_shared(storage.q_scale(buffer) + 4 * (row + 8 * i));
    }
    if constexpr (Traits::kFusedPrologue) quantize_q(tile, buffer);
#pragma unroll
    for (float& x : first_half) x = 0.f;
#pragma unroll
    for (float& x : last) x = 0.f;
  }

  __device__ __forceinline__ void end_tile(const WorkTile& known) {
    WorkTile tile = known;
    if constexpr (Traits::kBlockList)
      tile = this->block_list_tile(this->wait_for_work());  // read again, so that no register keeps it
    const int buffer = tiles++ % kQBuffers;
    const Epilogue<Traits::kFewKeys && !kHasBias> epilogue(params, tile, row, lane, state.maximum,
                                                           last[kLastColumns / 2 - 4], last[kLastColumns / 2 - 2],
                                                           storage.v_scale(buffer), storage.v_mean(buffer));
    if constexpr (kHalves) epilogue.store(first_half, 0);
    epilogue.store(last, kHalves ? 128 : 0);
    __syncwarp();
    this->release_q(buffer);
  }

  // All key tiles of a work tile, of which there is at least one.
  __device__ __forceinline__ void attend(const WorkTile& tile) {
    wait_for_stage();
    const int first = take_stage();
    scores_of(first);
    const int key_tile = key_tile_of(first, tile.key_tiles - 1);
    __syncwarp();  // all lanes have read their K scales
    release_stage(first);
    bool whole = !is_causal<Traits>(params) && !kHasBias && params.kv_length % kBlockN == 0;
    if constexpr (kPadded) whole = tile.key_end % kBlockN == 0;
    if (whole)
      softmax_full_tile<kBlockN, kWide, kOrder.by_row, !kWide>(scores, state, q_scale, k_scale);
    else
      softmax_last(tile, key_tile);
    pack_probabilities<kBlockN>(scores, packed);
    wait_for_stage();
    const KeyOrder<Traits> order(params, tile);
    if constexpr (kHalves) {
      for (int left = tile.key_tiles - 2; left >= 0; --left) step_in_halves(tile, order[left]);
    } else {
      float result[kLastColumns / 2];
#pragma unroll
      for (float& x : result) x = 0.f;
      if constexpr (kOrder.scales_ahead) load_k_scale(steps % Traits::kStages, lane, k_scale);
      steps_of(tile, order, result);
    }
    const int final = take_stage();
    values_of_stage(final);
    release_stage(final);
  }

  __device__ __forceinline__ void run_tile(const WorkTile& tile) {
    begin_tile(tile);
    if (!Traits::kBlockList || tile.key_tiles > 0) attend(tile);  // an empty list gives zeros
    end_tile(tile);
  }

  __device__ __forceinline__ void run() {
    this->for_each_work_tile([&](int, const WorkTile& tile) { run_tile(tile); });
  }
};

}  // namespace sm90
