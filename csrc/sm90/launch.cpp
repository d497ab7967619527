// One attention call of the sm90 family: statistics, quantization and attention, for 4-bit scores in parts whose
// smooth-Q correction fits its share of the workspace. K and V of short sequences are prepared in one pass.
#include <algorithm>
#include <memory>
#include <type_traits>
#include <utility>

#include "attention_call.h"
#include "common/launch_builder.h"
#include "common/validate.h"
#include "driver.h"
#include "families.h"
#include "kernels.h"
#include "plan.h"
#include "sm90/kernel_choice.h"
#include "sm90/one_pass.h"
#include "sm90/params.h"
#include "sm90/workspace.h"

namespace sm90 {
namespace {

constexpr int kProgrammaticLaunchVersion = 12030;  // the first driver that captures such launches in CUDA graphs

class Builder final : public LaunchBuilder<Workspace> {
 public:
  Builder(const CallSignature& call, const Workspace& workspace, const driver::Images& images, bool in_phases)
      : LaunchBuilder(call, workspace, images),
        choice_(call_, in_phases),
        programmatic_(driver::version() >= kProgrammaticLaunchVersion) {}

 private:
  void prepare() override {
    if (call_.has_block_mask()) prepare_lists(ListForm::in_order, choice_.one_of_two());
    if (choice_.one_pass_keys())
      one_pass();
    else if (call_.first_token == 0)
      statistics();
    quantize();
  }

  void attend() override {
    if (call_.mode != k4b) return attention(workspace_.chunk, 0, programmatic_);
    Chunk chunk = workspace_.chunk;
    int64_t launches = 0;
    for (int64_t head = 0; head < workspace_.q_bh; head += workspace_.chunk.heads) {
      chunk.first_head = static_cast<int>(head);
      chunk.heads = static_cast<int>(std::min<int64_t>(workspace_.chunk.heads, workspace_.q_bh - head));
      for (int64_t tile = 0; tile < workspace_.query_tiles; tile += workspace_.chunk.tiles) {
        chunk.first_tile = static_cast<int>(tile);
        chunk.tiles = static_cast<int>(std::min<int64_t>(workspace_.chunk.tiles, workspace_.query_tiles - tile));
        delta(chunk);
        attention(chunk, launches++, false);
      }
    }
  }

  // Blocks of the statistics pass for each head. By the shape of one head alone: calls are computed in parts of their
  // heads, too, and give the same bits.
  int statistics_cluster() const {
    constexpr int64_t kTokensOfBlock = 2048, kFewest = 4;
    const int64_t fewest = std::min(kFewest, workspace_.k_blocks);
    return static_cast<int>(std::clamp<int64_t>(ceil_div(counted_tokens(), kTokensOfBlock), fewest, kMaxClusterBlocks));
  }

  void one_pass() {
    const HeadShare share = head_share(call_.kv_length, choice_.head_dim());
    if (choice_.quantizes_by_head())
      one_pass(ChoosingOnePassParams{}, share);
    else
      one_pass(OnePassParams{}, share);
  }
  template <class Params>
  void one_pass(Params params, const HeadShare& share) {
    RunFields fields(params);
    set_statistics(params.statistics, fields, share.blocks);
    set_quantization(params.quantize, fields);
    params.tensors = choice_.precise() ? 1 : 2;
    params.units = share.units;
    launch("one_pass", choice_.one_pass_name(), grid(share.blocks * params.tensors * workspace_.kv_bh),
           kQuantizeThreads, share.units * kUnitBytes, params, fields,
           {programmatic_, static_cast<unsigned>(share.blocks)});
  }

  void statistics() {
    if (choice_.has_choices())
      statistics(ChoosingStatisticsParams{});
    else
      statistics(StatisticsParams{});
  }
  template <class Params>
  void statistics(Params params) {
    RunFields fields(params);
    set_statistics(params, fields, statistics_cluster());
    launch("statistics", choice_.statistics_name(), grid(params.cluster_blocks * workspace_.kv_bh), kStatisticsThreads,
           0, params, fields, {programmatic_, static_cast<unsigned>(params.cluster_blocks)});
  }

  void set_statistics(StatisticsParams& params, RunFields& fields, int cluster_blocks) const {
    bind_statistics(params, fields);
    set_key_sizes(params);
    params.kv_length = counted_tokens();
    params.head_room = call_.is_slice() ? kHeadRoom : 1.f;
    fields.bind(params.v_inverse, kWorkspace, workspace_.v_inverse);
    fields.bind(params.prepared, kWorkspace, workspace_.prepared);
    params.cluster_blocks = cluster_blocks;
  }
  void set_statistics(ChoosingStatisticsParams& params, RunFields& fields, int cluster_blocks) const {
    set_statistics(static_cast<StatisticsParams&>(params), fields, cluster_blocks);
    fields.bind(params.choices, kWorkspace, workspace_.choices);
    bind_mask(params.mask, fields);
    bind(params.q, fields, kQ, call_.q);
    set_query_sizes(params);
    if (call_.is_slice()) params.q_length = counted_tokens();
    params.score_bits = score_bits(call_.mode);
    params.rotates = rotates(call_);
    if (call_.rotate_by_head) fields.bind(params.rotated_heads, kRotatedHeads);
  }

  // What the one pass and the attention kernel leave.
  void quantize() {
    const bool only_q = choice_.one_pass_keys();
    if (only_q && choice_.quantizes_q()) return;
    if (only_q ? choice_.may_rotate() : choice_.quantizes_by_head())
      quantize(ChoosingQuantizeParams{}, only_q);
    else
      quantize(QuantizeParams{}, only_q);
  }
  template <class Params>
  void quantize(Params params, bool only_q) {
    RunFields fields(params);
    set_quantization(params, fields);
    if (choice_.quantizes_q()) params.q_blocks = 0;
    const int64_t of_q = int64_t(params.q_blocks) * workspace_.q_bh;
    const int64_t of_kv = int64_t(params.k_blocks + params.v_blocks) * workspace_.kv_bh;
    // Q is quantized without a wait for what the grid before computes: of later slices that is Q itself.
    const bool programmatic = programmatic_ && call_.first_token == 0;
    if (only_q)
      launch("quantize_q", choice_.quantize_q_name(), grid(of_q), kQuantizeThreads, 0, params, fields, {programmatic_});
    else
      launch("quantize", choice_.quantize_name(), grid(of_q + of_kv), kQuantizeThreads, 0, params, fields,
             {programmatic});
  }

  void set_quantization(QuantizeParams& params, RunFields& fields) const {
    bind_quantization(params, fields);
    set_key_sizes(params);
    set_query_sizes(params);
    fields.bind(params.v_inverse, kWorkspace, workspace_.v_inverse);
    fields.bind(params.q_int8, kWorkspace, workspace_.q_int8);
    fields.bind(params.k_int8, kWorkspace, workspace_.k_int8);
    fields.bind(params.v_fp8, kWorkspace, workspace_.v_fp8);
    fields.bind(params.prepared, kWorkspace, workspace_.prepared);
    params.row_bytes = static_cast<int>(workspace_.row_bytes);
    params.key_row_bytes = static_cast<int>(workspace_.key_row_bytes);
    params.v_rows = static_cast<int>(workspace_.v_rows);
    params.q_scale_rows = static_cast<int>(workspace_.q_scale_rows);
    params.k_scale_blocks = static_cast<int>(workspace_.k_scale_blocks);
    params.first_token = static_cast<int>(call_.first_token);
    params.q_blocks = blocks(call_.q_length, kBlockM);
    params.k_blocks = blocks(call_.kv_length, kScaleBlock);
    params.v_blocks = choice_.precise() ? 0 : blocks(call_.kv_length, kVTokens);
    params.q_slices = static_cast<int>(workspace_.q_bh);
    params.kv_slices = static_cast<int>(workspace_.kv_bh);
    params.smooth_v = call_.smooth_v;
    bind_mask(params.mask, fields);
  }
  void set_quantization(ChoosingQuantizeParams& params, RunFields& fields) const {
    set_quantization(static_cast<QuantizeParams&>(params), fields);
    fields.bind(params.choices, kWorkspace, workspace_.choices);
    if (call_.rotate_as_given) fields.bind(params.rotated_heads, kRotatedHeads);
    params.rotates = rotates(call_);
  }

  void delta(const Chunk& chunk) {
    if (may_hide_keys(call_))
      delta(chunk, HidingDeltaParams{});
    else
      delta(chunk, DeltaParams{});
  }
  template <class Params>
  void delta(const Chunk& chunk, Params params) {
    RunFields fields(params);
    bind_delta(params, fields);
    if constexpr (std::is_same_v<Params, HidingDeltaParams>) {
      bind_mask(params.mask, fields);
      fields.bind(params.choices, kWorkspace, workspace_.choices);
    }
    set_key_sizes(params);
    fields.bind(params.delta_s, kWorkspace, workspace_.delta_s);
    params.chunk = chunk;
    params.q_heads = sizes_.q_heads;
    params.query_tiles = static_cast<int>(workspace_.query_tiles);
    launch("delta", choice_.delta_name(),
           grid(ceil_div(call_.kv_length, kDeltaThreads), ceil_div(chunk.tiles, kDeltaTiles), chunk.heads),
           kDeltaThreads, 0, params, fields);
  }

  template <class Params>
  void set_key_sizes(Params& params) const {
    params.kv_heads = sizes_.kv_heads;
    params.kv_length = sizes_.kv_length;
    params.head_dim = sizes_.head_dim;
  }
  template <class Params>
  void set_query_sizes(Params& params) const {
    params.q_heads = sizes_.q_heads;
    params.q_length = sizes_.q_length;
  }

  // `number`: of the call's launches of this kernel.
  void attention(const Chunk& chunk, int64_t number, bool programmatic) {
    if (!call_.has_block_mask() || choice_.one_of_two()) attention(choice_.dense_kernel(), chunk, number, programmatic);
    if (call_.has_block_mask()) attention(choice_.block_list_kernel(), chunk, number, programmatic);
  }
  void attention(const KernelInfo& kernel, const Chunk& chunk, int64_t number, bool programmatic) {
    if (choice_.precise())
      precise_attention(kernel);
    else
      scaled_attention(kernel, chunk, number, programmatic);
  }

  // V in E4M3.
  void scaled_attention(const KernelInfo& kernel, const Chunk& chunk, int64_t number, bool programmatic) {
    AttentionParams params{};
    RunFields fields(params);
    set_attention(params, fields, kernel, chunk, number);
    fields.bind(params.v_map, byte_map(workspace_.v_fp8, workspace_.key_row_bytes, workspace_.v_rows, workspace_.kv_bh,
                                       workspace_.key_row_bytes, kernel.v_row_bytes, kernel.head_dim));
    fields.bind(params.v_scale, kWorkspace, workspace_.v_scale);
    fields.bind(params.v_mean, kWorkspace, workspace_.v_mean);
    if (call_.mode == k4b) fields.bind(params.delta_s, kWorkspace, workspace_.delta_s);
    launch_attention(kernel, params, fields, programmatic);
  }

  // The precise mode: V is read where it is.
  void precise_attention(const KernelInfo& kernel) {
    Chunk chunk = workspace_.chunk;
    chunk.tiles = static_cast<int>(ceil_div(call_.q_length, kernel.block_m));
    AttentionParams params{};
    RunFields fields(params);
    set_attention(params, fields, kernel, chunk, 0);
    fields.bind(params.v_map, element_map(kV, call_.v, call_.kv_heads, call_.kv_length, kernel.block_n));
    launch_attention(kernel, params, fields, programmatic_);
  }

  CausalOrder causal_order(const Chunk& chunk) const {
    constexpr int64_t kRounds = 6;  // that a group takes, so that what its last one leaves idle is little
    const int64_t blocks = blocks_of(chunk), fewest = ceil_div(blocks, chunk.tiles);
    const int64_t wanted = ceil_div(kRounds * blocks, chunk.tiles);
    const int64_t groups = std::clamp<int64_t>(chunk.heads / fewest, 1, ceil_div(chunk.heads, wanted));
    const int64_t heads = ceil_div(chunk.heads, groups), places = round_up(heads * chunk.tiles, blocks);
    return {static_cast<int>(heads), static_cast<int>(places), static_cast<int>(ceil_div(chunk.heads, heads))};
  }

  // Of the attention kernel's grid.
  int64_t blocks_of(const Chunk& chunk) const {
    return std::min<int64_t>(int64_t(chunk.heads) * chunk.tiles, driver::multiprocessor_count(call_.device));
  }

  void set_attention(AttentionParams& params, RunFields& fields, const KernelInfo& kernel, const Chunk& chunk,
                     int64_t number) {
    bind_attention(params, fields, number);
    set_key_sizes(params);
    set_query_sizes(params);
    fields.bind(params.q_map, choice_.quantizes_q()
                                  ? element_map(kQ, call_.q, call_.q_heads, call_.q_length, kernel.block_m)
                                  : byte_map(workspace_.q_int8, workspace_.columns, call_.q_length, workspace_.q_bh,
                                             workspace_.row_bytes, kernel.row_bytes, kernel.block_m));
    fields.bind(params.k_map, byte_map(workspace_.k_int8, workspace_.columns, call_.kv_length, workspace_.kv_bh,
                                       workspace_.row_bytes, kernel.row_bytes, kernel.block_n));
    if (call_.has_lse) fields.bind(params.lse_shift, kWorkspace, workspace_.lse_shift);
    params.chunk = chunk;
    params.q_scale_rows = static_cast<int>(workspace_.q_scale_rows);
    params.k_scale_blocks = static_cast<int>(workspace_.k_scale_blocks);
    params.element = call_.element;
    fields.bind(params.prepared, kWorkspace, workspace_.prepared);
    params.prepared_blocks = head_share(call_.kv_length, choice_.head_dim()).blocks;
    params.scale = call_.scale;
    params.causal = causal_order(chunk);
    if (kernel.variant == Variant::rotating_prologue) fields.bind(params.choices, kWorkspace, workspace_.choices);
    if (call_.has_block_mask() && choice_.one_of_two()) fields.bind(params.dead, kWorkspace, workspace_.lists.skipped);
  }

  void launch_attention(const KernelInfo& kernel, const AttentionParams& params, const RunFields& fields,
                        bool programmatic) {
    launch(kernel.image, kernel.name, grid(blocks_of(params.chunk)), kernel.threads, kernel.shared_bytes, params,
           fields, {programmatic});
  }

  // A tensor of the caller: channels, tokens, heads, batches. The stride of an axis of one element may be anything.
  int element_map(Operand operand, const TensorStrides& strides, int64_t heads, int64_t tokens, int box_rows) {
    const auto byte_stride = [](int64_t elements, int64_t size) {
      constexpr int kElementBytes = 2, kSmallest = 16;
      return static_cast<uint64_t>(size > 1 ? elements * kElementBytes : kSmallest);
    };
    return map({driver::MapElement::uint16,
                4,
                {static_cast<uint64_t>(call_.head_dim), static_cast<uint64_t>(tokens), static_cast<uint64_t>(heads),
                 static_cast<uint64_t>(call_.batch)},
                {byte_stride(strides.token, tokens), byte_stride(strides.head, heads),
                 byte_stride(strides.batch, call_.batch)},
                {kElementBox, static_cast<uint32_t>(box_rows), 1, 1},
                driver::MapSwizzle::bytes_128},
               operand);
  }

  // Rows of `columns` bytes in the workspace, `row_bytes` apart.
  int byte_map(int64_t offset, int64_t columns, int64_t rows, int64_t bh, int64_t row_bytes, int box_columns,
               int box_rows) {
    return map({driver::MapElement::uint8,
                3,
                {static_cast<uint64_t>(columns), static_cast<uint64_t>(rows), static_cast<uint64_t>(bh)},
                {static_cast<uint64_t>(row_bytes), static_cast<uint64_t>(rows * row_bytes)},
                {static_cast<uint32_t>(box_columns), static_cast<uint32_t>(box_rows), 1},
                box_columns == 128 ? driver::MapSwizzle::bytes_128 : driver::MapSwizzle::bytes_64},
               kWorkspace, offset);
  }

  const KernelChoice choice_;
  const bool programmatic_;
};

class AttentionPlan final : public Plan {
 public:
  // Smooth Q's correction is computed of K; the precise mode reads V where it is.
  AttentionPlan(const CallSignature& call, std::shared_ptr<const Kernels> kernels, const Workspace& workspace)
      : Plan(call, std::move(kernels), workspace.bytes, only(kK, call.mode == k4b) | only(kV, call.mode == kPrecise)),
        workspace_(workspace) {}

 private:
  LaunchList launches(bool in_phases) const override {
    return Builder(call(), workspace_, kernels().images, in_phases).build();
  }

  const Workspace workspace_;
};

}  // namespace

std::unique_ptr<Plan> make_plan(const CallSignature& call, std::shared_ptr<const Kernels> kernels) {
  validate(call, kernels->build);
  return std::make_unique<AttentionPlan>(call, std::move(kernels), Workspace(call));
}

}  // namespace sm90
