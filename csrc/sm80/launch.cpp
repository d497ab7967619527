// One attention call of the sm80 family: statistics, quantization, then attention, for 4-bit scores in parts whose
// smooth-Q correction fits its share of the workspace.
#include <algorithm>
#include <memory>
#include <string>
#include <utility>

#include "attention_call.h"
#include "common/launch_builder.h"
#include "common/validate.h"
#include "driver.h"
#include "families.h"
#include "kernels.h"
#include "plan.h"
#include "sm80/kernel_table.h"
#include "sm80/params.h"
#include "sm80/workspace.h"

namespace sm80 {
namespace {

PvProduct product_of(const CallSignature& call, const Kernels& kernels) {
  if (call.mode == kPrecise) {
    if (call.pv_accumulator == 16)
      return kernels.build.half_values ? PvProduct::fp16_sums : PvProduct::precise_fp16_sums;
    return call.element == kHalf ? PvProduct::precise_fp16 : PvProduct::precise_bf16;
  }
  if (call.pv == kPvInt8) return PvProduct::int8;
  if (call.pv == kPvMxfp8) return PvProduct::mxfp8;
  return call.pv_accumulator == 16 ? PvProduct::fp16_sums : PvProduct::fp32_sums;
}

// What the largest element of a channel of V is scaled to. A half-precision sum over 64 keys of P <= 448 stays below
// 65504.
constexpr float v_maximum(const CallSignature& call) {
  if (call.pv == kPvInt8) return 127.f;
  return call.pv_accumulator == 16 ? 2.25f : 448.f;
}

// One that broadcasts over queries becomes part of the key bias.
bool mask_is_bias(const CallSignature& call) { return call.has_mask() && call.mask.query_stride == 0; }
int64_t mask_bias_heads(const CallSignature& call) { return call.mask.head_stride == 0 ? 1 : call.q_heads; }
int64_t padded_keys(const Workspace& workspace) { return workspace.key_blocks * kKeyBlock; }

// Grids that may be too large for a launch, which the workspace does not know of: made with the plan, so that such a
// call is refused then.
struct Grids {
  driver::Extent mask_bias;
  int64_t delta_groups;

  Grids(const CallSignature& call, const Workspace& workspace)
      : mask_bias(mask_is_bias(call)
                      ? grid(call.batch * mask_bias_heads(call), ceil_div(padded_keys(workspace), kBiasThreads))
                      : driver::Extent{}),
        delta_groups(grid(1, ceil_div(workspace.query_blocks, kDeltaBlock)).y) {}
};

class Builder final : public LaunchBuilder<Workspace> {
 public:
  Builder(const CallSignature& call, const Workspace& workspace, const Grids& grids, const Kernels& kernels)
      : LaunchBuilder(call, workspace, kernels.images),
        grids_(grids),
        head_dim_(padded_head_dim(call.head_dim)),
        element_(element_name(call.element)),
        prepare_("prepare_d" + std::to_string(head_dim_)),
        mode_(call.mode == kPrecise ? "precise"
              : call.mode == k4b    ? "4b"
                                    : "8b"),
        mask_is_bias_(mask_is_bias(call)),
        padded_keys_(padded_keys(workspace)),
        product_(product_of(call, kernels)),
        half_values_(kernels.build.half_values),
        all_sizes_{sizes_, static_cast<int>(workspace.query_blocks), static_cast<int>(workspace.key_blocks),
                   call.element} {}

 private:
  void prepare() override {
    if (call_.has_block_mask()) prepare_lists(ListForm::linked);
    if (call_.first_token == 0) {
      statistics();
      if (call_.rotate_by_head) choose_rotation();
    }
    quantize();
  }

  void attend() override {
    if (call_.mode == k4b) return smoothed_attention();
    AttentionParams params{};
    RunFields fields(params);
    set_attention(params, fields, 0, workspace_.works);
    if (mask_is_bias_) {
      mask_bias();
      params.bias_head_stride = call_.mask.head_stride == 0 ? 0 : padded_keys_;
      params.bias_batch_stride = mask_bias_heads(call_) * padded_keys_;
    }
    attention(params, fields,
              mask_is_bias_      ? MaskPolicy::key_bias
              : call_.has_mask() ? MaskPolicy::row_bias
                                 : MaskPolicy::none);
  }

  void statistics() {
    StatisticsParams params{};
    RunFields fields(params);
    bind_statistics(params, fields);
    fields.bind(params.partials, kWorkspace, workspace_.partials);
    params.sizes = counted_sizes();
    params.slices = static_cast<int>(workspace_.kv_bh);
    params.chunks = static_cast<int>(ceil_div(counted_tokens(), kStatisticsTokens));
    params.v_maximum = v_maximum(call_);
    if (call_.mode == kPrecise && has_v_scale(product_)) {  // V keeps its bits
      params.powers_of_two = 1;
      params.smooth_v = 0;
    }
    if (may_hide_keys(call_)) {
      bind_hidden_keys(params, fields);
      fields.bind(params.shown_of_chunks, kWorkspace, workspace_.shown_of_chunks);
    }
    driver::Extent of_k_and_v = workspace_.statistics_grid;
    of_k_and_v.y = static_cast<unsigned>(params.chunks);
    launch(prepare_, "partial_statistics_" + element_, of_k_and_v, kStatisticsThreads, 0, params, fields);
    launch(prepare_, "finish_statistics", {of_k_and_v.x, of_k_and_v.z}, head_dim_, 0, params, fields);
  }

  void choose_rotation() {
    RotationParams params{};
    RunFields fields(params);
    bind(params.q, fields, kQ, call_.q);
    bind(params.k, fields, kK, call_.k);
    fields.bind(params.k_mean, kWorkspace, workspace_.k_mean);
    fields.bind(params.rotated, kWorkspace, workspace_.rotated);
    fields.bind(params.rotated_heads, kRotatedHeads);
    if (may_hide_keys(call_)) bind_hidden_keys(params, fields);
    params.sizes = counted_sizes();
    params.score_bits = score_bits(call_.mode);
    launch(prepare_, "choose_rotation_" + element_, grid(workspace_.kv_bh), kStatisticsThreads, 0, params, fields);
  }

  void quantize() {
    QuantizeParams params{};
    RunFields fields(params);
    bind_quantization(params, fields);
    fields.bind(params.v_scale, kWorkspace, workspace_.v_scale);
    bind_tiles(params, fields);
    params.sizes = all_sizes_;
    params.first_query_block = first_block(kQueryBlock);
    params.taken_query_blocks = blocks(call_.q_length, kQueryBlock);
    params.first_key_block = first_block(kKeyBlock);
    params.taken_key_blocks = blocks(call_.kv_length, kKeyBlock);
    params.query_tiles = workspace_.q_bh * params.taken_query_blocks;
    params.key_tiles = workspace_.kv_bh * params.taken_key_blocks;
    params.largest_tile_scale = call_.is_slice() ? kTileHeadRoom : 1.f;
    params.v_maximum = v_maximum(call_);
    params.other_product = call_.mode == kPrecise ? has_v_scale(product_) : product_ == PvProduct::int8;
    if (may_hide_keys(call_)) bind_hidden_keys(params, fields);
    if (call_.rotate_by_head) fields.bind(params.rotated, kWorkspace, workspace_.rotated);
    if (call_.rotate_as_given) fields.bind(params.rotated, kRotatedHeads);
    params.rotates = rotates(call_);
    launch(prepare_, "quantize_" + mode_ + "_" + element_, grid(params.query_tiles + 2 * params.key_tiles),
           kQuantizeThreads, 0, params, fields);
  }

  // With the tokens of which statistics are computed.
  Sizes counted_sizes() const {
    Sizes sizes = all_sizes_;
    if (call_.is_slice()) sizes.q_length = sizes.kv_length = counted_tokens();
    return sizes;
  }

  // Of a mask that may hide keys: without it the kernels' `shown` is null.
  template <class Params>
  void bind_hidden_keys(Params& params, RunFields& fields) const {
    bind_mask(params.mask, fields);
    fields.bind(params.shown, kWorkspace, workspace_.shown);
  }

  template <class Params>
  void bind_tiles(Params& params, RunFields& fields) const {
    fields.bind(params.q_tiles, kWorkspace, workspace_.q_tiles);
    fields.bind(params.k_tiles, kWorkspace, workspace_.k_tiles);
    fields.bind(params.v_tiles, kWorkspace, workspace_.v_tiles);
    if (product_ == PvProduct::int8) {
      fields.bind(params.v_tile_scale, kWorkspace, workspace_.v_tile_scale);
      fields.bind(params.v_token_term, kWorkspace, workspace_.v_token_term);
    }
  }

  void mask_bias() {
    KeyBiasParams params{};
    RunFields fields(params);
    fields.bind(params.bias, kWorkspace, workspace_.bias);
    bind_mask(params.mask, fields);
    params.heads = static_cast<int>(mask_bias_heads(call_));
    params.kv_length = sizes_.kv_length;
    params.padded_keys = static_cast<int>(padded_keys_);
    launch(prepare_, "mask_bias", grids_.mask_bias, kBiasThreads, 0, params, fields);
  }

  // Work items (query blocks of all heads) go in parts whose correction fits the workspace, whole waves where possible.
  void smoothed_attention() {
    int64_t part = workspace_.bias_rows;
    const int64_t wave = driver::multiprocessor_count(call_.device);
    if (part < workspace_.works && part > wave) part -= part % wave;
    for (int64_t first = 0; first < workspace_.works; first += part) {
      const int64_t works = std::min(part, workspace_.works - first);
      delta(first, works);
      AttentionParams params{};
      RunFields fields(params);
      set_attention(params, fields, first, works);
      params.bias_work_stride = padded_keys_;
      const bool has_row_bias = call_.has_mask() && !mask_is_bias_;
      attention(params, fields, has_row_bias ? MaskPolicy::key_bias | MaskPolicy::row_bias : MaskPolicy::key_bias);
    }
  }

  void delta(int64_t first, int64_t works) {
    DeltaParams params{};
    RunFields fields(params);
    bind_delta(params, fields);
    fields.bind(params.bias, kWorkspace, workspace_.bias);
    if (may_hide_keys(call_)) fields.bind(params.shown, kWorkspace, workspace_.shown);
    if (mask_is_bias_) bind_mask(params.mask, fields);
    params.sizes = all_sizes_;
    params.first_work = first;
    params.works = works;
    params.first_slice = static_cast<int>(first / workspace_.query_blocks);
    const int64_t last_bh = (first + works - 1) / workspace_.query_blocks;
    launch(prepare_, "delta_bias_" + element_,
           grid((last_bh - params.first_slice + 1) * workspace_.key_blocks, grids_.delta_groups), kDeltaThreads, 0,
           params, fields);
  }

  void set_attention(AttentionParams& params, RunFields& fields, int64_t first, int64_t works) const {
    bind_attention(params, fields, 0);
    bind_tiles(params, fields);
    fields.bind(params.v_scale, kWorkspace, workspace_.v_scale);
    fields.bind(params.v_mean, kWorkspace, workspace_.v_mean);
    fields.bind(params.bias, kWorkspace, workspace_.bias);
    fields.bind(params.lse_shift, kWorkspace, workspace_.lse_shift);
    params.sizes = all_sizes_;
    params.first_work = first;
    params.works = works;
    params.causal = call_.causal;
  }

  void attention(const AttentionParams& params, const RunFields& fields, MaskPolicy mask) {
    const KernelInfo& kernel = kernel_of(head_dim_, score_bits(call_.mode), mask, product_);
    launch(kernel.image, kernel.name, grid(params.works), attention_threads(head_dim_),
           SharedLayout(head_dim_, kernel.score_bits, v_bytes(product_, half_values_),
                        key_stages(product_, half_values_), value_stages(product_ == PvProduct::int8, head_dim_))
               .bytes,
           params, fields);
  }

  const Grids& grids_;
  const int head_dim_;
  const std::string element_, prepare_, mode_;
  const bool mask_is_bias_;
  const int64_t padded_keys_;
  const PvProduct product_;
  const bool half_values_;
  const Sizes all_sizes_;
};

class AttentionPlan final : public Plan {
 public:
  // Smooth Q's correction is computed of K.
  AttentionPlan(const CallSignature& call, std::shared_ptr<const Kernels> kernels, const Workspace& workspace)
      : Plan(call, std::move(kernels), workspace.bytes, only(kK, call.mode == k4b)),
        workspace_(workspace),
        grids_(call, workspace) {}

 private:
  // They read q, k and v alike, whether the phases are one run or two.
  LaunchList launches(bool) const override { return Builder(call(), workspace_, grids_, kernels()).build(); }

  const Workspace workspace_;
  const Grids grids_;
};

}  // namespace

std::unique_ptr<Plan> make_plan(const CallSignature& call, std::shared_ptr<const Kernels> kernels) {
  validate(call, kernels->build);
  const PvProduct product = product_of(call, *kernels);
  require(!call.is_slice() || product == PvProduct::int8,
          "pv must be 3 (int8) for a slice: in other formats V has no scale a block of keys, got ",
          std::to_string(call.pv));
  const Workspace workspace(call, product, v_bytes(product, kernels->build.half_values));
  return std::make_unique<AttentionPlan>(call, std::move(kernels), workspace);
}

}  // namespace sm80
