// One attention call of the sm80 family: statistics, quantization, then attention, for 4-bit scores in parts whose
// smooth-Q correction fits its share of the workspace.
#include "common/launch.h"

#include <algorithm>
#include <string>

#include "attention_call.h"
#include "common/constants.h"
#include "driver.h"
#include "sm80/kernel_table.h"
#include "sm80/params.h"
#include "sm80/workspace.h"

namespace sm80 {
namespace {

// What this build can do: csrc/architectures.json says which.
constexpr bool kInt4Scores = INT4_SCORES;  // INT4 tensor cores
constexpr bool kHalfValues = HALF_VALUES;  // no FP8: P V in fp16
constexpr int value_bytes(int mode) { return kHalfValues || mode == kPrecise ? 2 : 1; }
constexpr Features kFeatures{kInt4Scores, true, true};

// The largest element of a channel of V is scaled to this. A half-precision sum over 64 keys of P <= 448 stays below
// 65504.
constexpr float kE4m3Maximum = 448.f, kHalfAccumulatorMaximum = 2.25f;

class AttentionLauncher final : public Launcher {
 public:
  explicit AttentionLauncher(const AttentionCall& call)
      : Launcher(call),
        workspace_(call, value_bytes(call.mode)),
        head_dim_(padded_head_dim(call.head_dim)),
        element_(element_name(call.element)),
        prepare_("prepare_d" + std::to_string(head_dim_)),
        mode_(call.mode == kPrecise ? "precise"
              : call.mode == k4b    ? "4b"
                                    : "8b"),
        mask_(mask_of(call.mask)),
        // One that broadcasts over queries becomes part of the key bias.
        mask_is_bias_(mask_.element != kNone && mask_.query_stride == 0),
        // Here, so that a call that is too large launches nothing.
        mask_bias_grid_(mask_is_bias_ ? grid(call.batch * mask_bias_heads(), ceil_div(padded_keys(), kBiasThreads))
                                      : driver::Extent{}),
        delta_groups_(grid(1, ceil_div(workspace_.query_blocks, kDeltaBlock)).y) {
    sizes_.q_heads = static_cast<int>(call.q_heads);
    sizes_.kv_heads = static_cast<int>(call.kv_heads);
    sizes_.q_length = static_cast<int>(call.q_length);
    sizes_.kv_length = static_cast<int>(call.kv_length);
    sizes_.head_dim = call.head_dim;
    sizes_.query_blocks = static_cast<int>(workspace_.query_blocks);
    sizes_.key_blocks = static_cast<int>(workspace_.key_blocks);
    sizes_.element = call.element;
  }

 private:
  void prepare() const override {
    if (listed(call_)) prepare_lists(workspace_.lists, ListForm::linked);
    statistics();
    quantize();
  }

  void attend() const override {
    if (call_.mode == k4b) return smoothed_attention();
    AttentionParams params = attention_params(0, workspace_.works);
    if (mask_is_bias_) {
      mask_bias();
      params.bias_head_stride = mask_.head_stride == 0 ? 0 : padded_keys();
      params.bias_batch_stride = mask_bias_heads() * padded_keys();
    }
    attention(params, mask_is_bias_            ? MaskPolicy::key_bias
                      : mask_.element != kNone ? MaskPolicy::row_bias
                                               : MaskPolicy::none);
  }

  int64_t padded_keys() const { return workspace_.key_blocks * kKeyBlock; }
  float v_maximum() const { return call_.pv_accumulator == 16 ? kHalfAccumulatorMaximum : kE4m3Maximum; }
  int64_t mask_bias_heads() const { return mask_.head_stride == 0 ? 1 : call_.q_heads; }

  void statistics() const {
    StatisticsParams params{};
    params.k = strided(call_.k);
    params.v = strided(call_.v);
    params.partials = at<float>(workspace_.partials);
    params.k_mean = at<float>(workspace_.k_mean);
    params.v_mean = at<float>(workspace_.v_mean);
    params.v_scale = at<float>(workspace_.v_scale);
    params.sizes = sizes_;
    params.slices = static_cast<int>(workspace_.kv_slices);
    params.chunks = static_cast<int>(workspace_.chunks);
    params.smooth_v = call_.smooth_v;
    params.v_maximum = v_maximum();
    const driver::Extent& of_k_and_v = workspace_.statistics_grid;
    launch(prepare_, "partial_statistics_" + element_, of_k_and_v, kStatisticsThreads, 0, params);
    launch(prepare_, "finish_statistics", {of_k_and_v.x, of_k_and_v.z}, head_dim_, 0, params);
  }

  void quantize() const {
    QuantizeParams params{};
    params.q = strided(call_.q);
    params.k = strided(call_.k);
    params.v = strided(call_.v);
    params.k_mean = at<float>(workspace_.k_mean);
    params.v_mean = at<float>(workspace_.v_mean);
    params.v_scale = at<float>(workspace_.v_scale);
    params.q_tiles = at<unsigned char>(workspace_.q_tiles);
    params.k_tiles = at<unsigned char>(workspace_.k_tiles);
    params.v_tiles = at<unsigned char>(workspace_.v_tiles);
    params.q_scale = at<float>(workspace_.q_scale);
    params.k_scale = at<float>(workspace_.k_scale);
    params.q_mean = call_.mode == k4b ? at<float>(workspace_.q_mean) : nullptr;
    params.lse_shift = call_.lse ? at<float>(workspace_.lse_shift) : nullptr;
    params.sizes = sizes_;
    params.query_tiles = workspace_.works;
    params.key_tiles = workspace_.kv_slices * workspace_.key_blocks;
    params.scale = call_.scale;
    params.v_maximum = v_maximum();
    launch(prepare_, "quantize_" + mode_ + (call_.rotate ? "_rotated_" : "_") + element_, workspace_.quantize_grid,
           kQuantizeThreads, 0, params);
  }

  void mask_bias() const {
    KeyBiasParams params{at<float>(workspace_.bias), mask_, static_cast<int>(mask_bias_heads()), sizes_.kv_length,
                         static_cast<int>(padded_keys())};
    launch(prepare_, "mask_bias", mask_bias_grid_, kBiasThreads, 0, params);
  }

  // Work items (query blocks of all heads) go in parts whose correction fits the workspace, whole waves where possible.
  void smoothed_attention() const {
    int64_t part = workspace_.bias_rows;
    const int64_t wave = driver::multiprocessor_count(call_.device);
    if (part < workspace_.works && part > wave) part -= part % wave;
    for (int64_t first = 0; first < workspace_.works; first += part) {
      const int64_t works = std::min(part, workspace_.works - first);
      delta(first, works);
      AttentionParams params = attention_params(first, works);
      params.bias_work_stride = padded_keys();
      const bool has_row_bias = mask_.element != kNone && !mask_is_bias_;
      attention(params, has_row_bias ? MaskPolicy::key_bias | MaskPolicy::row_bias : MaskPolicy::key_bias);
    }
  }

  void delta(int64_t first, int64_t works) const {
    DeltaParams params{};
    params.k = strided(call_.k);
    params.k_mean = at<float>(workspace_.k_mean);
    params.q_mean = at<float>(workspace_.q_mean);
    params.bias = at<float>(workspace_.bias);
    if (mask_is_bias_) params.mask = mask_;
    params.sizes = sizes_;
    params.first_work = first;
    params.works = works;
    params.first_slice = static_cast<int>(first / workspace_.query_blocks);
    params.scale = call_.scale * kLog2E;
    const int64_t last_slice = (first + works - 1) / workspace_.query_blocks;
    launch(prepare_, "delta_bias_" + element_,
           grid((last_slice - params.first_slice + 1) * workspace_.key_blocks, delta_groups_), kDeltaThreads, 0,
           params);
  }

  AttentionParams attention_params(int64_t first, int64_t works) const {
    AttentionParams params{};
    params.q_tiles = at<unsigned char>(workspace_.q_tiles);
    params.k_tiles = at<unsigned char>(workspace_.k_tiles);
    params.v_tiles = at<unsigned char>(workspace_.v_tiles);
    params.q_scale = at<float>(workspace_.q_scale);
    params.k_scale = at<float>(workspace_.k_scale);
    params.v_scale = at<float>(workspace_.v_scale);
    params.v_mean = at<float>(workspace_.v_mean);
    params.bias = at<float>(workspace_.bias);
    params.lse_shift = at<float>(workspace_.lse_shift);
    params.mask = mask_;
    params.out = strided(call_.out);
    params.lse = pointer<float>(call_.lse);
    params.nonfinite = pointer<int>(call_.nonfinite);
    params.sizes = sizes_;
    params.first_work = first;
    params.works = works;
    params.lists = prepared_lists(workspace_.lists, 0);
    params.gaps = pointer<float>(call_.gaps);
    params.causal = call_.causal;
    return params;
  }

  PvProduct product() const {
    if (call_.mode == kPrecise) return call_.element == kHalf ? PvProduct::precise_fp16 : PvProduct::precise_bf16;
    return call_.pv_accumulator == 16 ? PvProduct::fp16_sums : PvProduct::fp32_sums;
  }
  void attention(AttentionParams& params, MaskPolicy mask) const {
    const KernelInfo& kernel = kernel_of(head_dim_, score_bits(call_.mode), mask, product());
    launch(kernel.image, kernel.name, grid(params.works), attention_threads(head_dim_),
           SharedLayout(head_dim_, kernel.score_bits, value_bytes(call_.mode)).bytes, params);
  }

  const Workspace workspace_;
  const int head_dim_;
  const std::string element_, prepare_, mode_;
  const Mask mask_;
  const bool mask_is_bias_;
  const driver::Extent mask_bias_grid_;
  const int64_t delta_groups_;
  Sizes sizes_{};
};

}  // namespace
}  // namespace sm80

int64_t workspace_bytes(const AttentionCall& call) {
  common::validate(call, sm80::kFeatures);
  return sm80::Workspace(call, sm80::value_bytes(call.mode)).bytes;
}

// Smooth Q's correction is computed of K.
InputsRead read_by_attention_phase(const AttentionCall& call) { return {false, call.mode == k4b, false}; }

void attention(const AttentionCall& call) {
  common::validate(call, sm80::kFeatures);
  const driver::ContextGuard guard(call.device);
  sm80::AttentionLauncher(call).run();
}
