// One attention call of the sm90 family: statistics, quantization and attention, for 4-bit scores in parts whose
// smooth-Q correction fits its share of the workspace. K and V of short sequences are prepared in one pass.
#include "common/launch.h"

#include <algorithm>
#include <string>

#include "attention_call.h"
#include "common/constants.h"
#include "driver.h"
#include "sm90/kernel_table.h"
#include "sm90/one_pass.h"
#include "sm90/params.h"
#include "sm90/tiles.h"
#include "sm90/workspace.h"

namespace sm90 {
namespace {

constexpr Features kFeatures{true, true, false};
constexpr int kProgrammaticLaunchVersion = 12030;  // the first driver that captures such launches in CUDA graphs

bool biased(const AttentionCall& call) { return call.mode == k4b || call.mask.element != kNone; }

class AttentionLauncher final : public Launcher {
 public:
  explicit AttentionLauncher(const AttentionCall& call)
      : Launcher(call),
        workspace_(call),
        head_dim_(padded_head_dim(call.head_dim)),
        element_(element_name(call.element)),
        programmatic_(driver::version() >= kProgrammaticLaunchVersion) {}

 private:
  void prepare() const override {
    if (listed(call_)) prepare_lists(workspace_.lists, ListForm::in_order, one_of_two());
    if (one_pass_keys())
      one_pass();
    else
      statistics();
    quantize();
  }

  void attend() const override {
    if (call_.mode != k4b) return attention(workspace_.chunk, 0, programmatic_);
    Chunk chunk = workspace_.chunk;
    int64_t launches = 0;
    for (int64_t head = 0; head < workspace_.q_slices; head += workspace_.chunk.heads) {
      chunk.first_head = static_cast<int>(head);
      chunk.heads = static_cast<int>(std::min<int64_t>(workspace_.chunk.heads, workspace_.q_slices - head));
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
    return static_cast<int>(std::clamp<int64_t>(ceil_div(call_.kv_length, kTokensOfBlock), fewest, kMaxClusterBlocks));
  }

  // Whether one launch makes of K and V all that there is to be made.
  bool one_pass_keys() const {
    return call_.mode != k4b && call_.element != kFloat && fits_one_pass(call_.kv_length, head_dim_);
  }

  void one_pass() const {
    const HeadShare share = head_share(call_.kv_length, head_dim_);
    OnePassParams params{};
    params.statistics = statistics_params(share.blocks);
    params.quantize = quantize_params();
    params.tensors = precise() ? 1 : 2;
    params.units = share.units;
    launch("one_pass", kernel("one_pass"), grid(share.blocks * params.tensors * workspace_.kv_slices), kQuantizeThreads,
           share.units * kUnitBytes, params, {programmatic_, static_cast<unsigned>(share.blocks)});
  }

  StatisticsParams statistics_params(int cluster_blocks) const {
    StatisticsParams params{};
    params.k = strided(call_.k);
    params.v = strided(call_.v);
    params.k_mean = at<float>(workspace_.k_mean);
    params.v_mean = at<float>(workspace_.v_mean);
    params.v_scale = at<float>(workspace_.v_scale);
    params.v_inverse = at<float>(workspace_.v_inverse);
    params.prepared = at<Prepared>(workspace_.prepared);
    params.kv_heads = static_cast<int>(call_.kv_heads);
    params.kv_length = static_cast<int>(call_.kv_length);
    params.head_dim = call_.head_dim;
    params.smooth_v = call_.smooth_v;
    params.cluster_blocks = cluster_blocks;
    return params;
  }

  void statistics() const {
    StatisticsParams params = statistics_params(statistics_cluster());
    launch("statistics", (precise() ? "statistics_k_" : "statistics_") + element_,
           grid(params.cluster_blocks * workspace_.kv_slices), kStatisticsThreads, 0, params,
           {programmatic_, static_cast<unsigned>(params.cluster_blocks)});
  }

  QuantizeParams quantize_params() const {
    QuantizeParams params{};
    params.q = strided(call_.q);
    params.k = strided(call_.k);
    params.v = strided(call_.v);
    params.k_mean = at<float>(workspace_.k_mean);
    params.v_mean = at<float>(workspace_.v_mean);
    params.v_inverse = at<float>(workspace_.v_inverse);
    params.q_int8 = at<signed char>(workspace_.q_int8);
    params.k_int8 = at<signed char>(workspace_.k_int8);
    params.v_fp8 = at<unsigned char>(workspace_.v_fp8);
    params.q_scale = at<float>(workspace_.q_scale);
    params.k_scale = at<float>(workspace_.k_scale);
    params.lse_shift = call_.lse ? at<float>(workspace_.lse_shift) : nullptr;
    params.q_mean = call_.mode == k4b ? at<float>(workspace_.q_mean) : nullptr;
    params.prepared = at<Prepared>(workspace_.prepared);
    params.q_heads = static_cast<int>(call_.q_heads);
    params.kv_heads = static_cast<int>(call_.kv_heads);
    params.q_length = static_cast<int>(call_.q_length);
    params.kv_length = static_cast<int>(call_.kv_length);
    params.head_dim = call_.head_dim;
    params.row_bytes = static_cast<int>(workspace_.row_bytes);
    params.key_row_bytes = static_cast<int>(workspace_.key_row_bytes);
    params.v_rows = static_cast<int>(workspace_.v_rows);
    params.q_scale_rows = static_cast<int>(workspace_.q_scale_rows);
    params.k_scale_blocks = static_cast<int>(workspace_.k_scale_blocks);
    params.q_blocks = static_cast<int>(workspace_.query_tiles);
    params.k_blocks = static_cast<int>(workspace_.k_blocks);
    params.v_blocks = static_cast<int>(workspace_.v_blocks);
    params.q_slices = static_cast<int>(workspace_.q_slices);
    params.kv_slices = static_cast<int>(workspace_.kv_slices);
    params.smooth_v = call_.smooth_v;
    params.scale = call_.scale;
    params.mask = mask_of(call_.mask);
    return params;
  }

  // What the one pass and the attention kernel leave.
  void quantize() const {
    QuantizeParams params = quantize_params();
    if (quantizes_q()) params.q_blocks = 0;
    const int64_t of_q = int64_t(params.q_blocks) * workspace_.q_slices;
    const int64_t of_kv = one_pass_keys() ? 0 : (workspace_.k_blocks + workspace_.v_blocks) * workspace_.kv_slices;
    if (of_kv != 0)
      launch("quantize", kernel("quantize" + std::to_string(score_bits(call_.mode))), grid(of_q + of_kv),
             kQuantizeThreads, 0, params, {programmatic_});
    else if (of_q != 0)
      launch("quantize_q", kernel("quantize_q"), grid(of_q), kQuantizeThreads, 0, params, {programmatic_});
  }

  // The name of one that prepares tensors of this call.
  std::string kernel(const std::string& kind) const {
    return kind + (call_.rotate ? "_rotated_" : "_") + element_ + "_d" + std::to_string(head_dim_);
  }

  void delta(const Chunk& chunk) const {
    DeltaParams params{};
    params.k = strided(call_.k);
    params.k_mean = at<float>(workspace_.k_mean);
    params.q_mean = at<float>(workspace_.q_mean);
    params.delta_s = at<float>(workspace_.delta_s);
    params.chunk = chunk;
    params.q_heads = static_cast<int>(call_.q_heads);
    params.kv_heads = static_cast<int>(call_.kv_heads);
    params.kv_length = static_cast<int>(call_.kv_length);
    params.head_dim = call_.head_dim;
    params.query_tiles = static_cast<int>(workspace_.query_tiles);
    params.scale = call_.scale * kLog2E;
    launch("delta", "delta_" + element_,
           grid(ceil_div(call_.kv_length, kDeltaThreads), ceil_div(chunk.tiles, kDeltaTiles), chunk.heads),
           kDeltaThreads, 0, params);
  }

  bool precise() const { return call_.mode == kPrecise; }

  // Whether there are so few keys that kernels for them are faster: at head_dim 64 where a step of 192 keys takes more
  // keys that do not exist.
  bool few_keys() const {
    const bool narrower = head_dim_ != 64 || round_up(call_.kv_length, kTileN) < round_up(call_.kv_length, kWideTileN);
    return call_.kv_length <= kMaxShortKv && narrower;
  }
  // Whether a step takes kWideTileN keys at head_dim 64.
  bool wide() const {
    return call_.mode == k8b && !call_.causal && !recording(call_) && call_.mask.query_stride == 0 && !few_keys();
  }
  // Whether the attention kernel quantizes Q: of whole calls alone, since others may have lost Q before it is launched.
  bool quantizes_q() const {
    return call_.mode == k8b && few_keys() && head_dim_ <= 128 && call_.phase == kWholeCall &&
           call_.element != kFloat && call_.mask.query_stride == 0 && !call_.causal && !call_.rotate && !call_.lse &&
           !listed(call_) && !recording(call_);
  }

  PvElement pv_element() const {
    if (!precise()) return PvElement::e4m3;
    return call_.element == kHalf ? PvElement::fp16 : PvElement::bf16;
  }
  const KernelInfo& kernel_for(MaskPolicy mask, Variant variant) const {
    return kernel_of(pv_element(), head_dim_, mask, variant);
  }
  const KernelInfo& block_list_kernel() const {
    return kernel_for(biased(call_) ? MaskPolicy::block_list | kAnyBias : MaskPolicy::block_list, Variant::standard);
  }
  const KernelInfo& dense_kernel() const {
    const bool with_bias = biased(call_);
    const Variant standard = listed(call_) && has_dense_fallback() ? Variant::dense_fallback : Variant::standard;
    if (recording(call_))
      return kernel_for(with_bias ? MaskPolicy::key_bias : MaskPolicy::none, Variant::block_margins);
    if (call_.causal) return kernel_for(with_bias ? MaskPolicy::causal | kAnyBias : MaskPolicy::causal, standard);
    if (quantizes_q())
      return kernel_for(with_bias ? MaskPolicy::key_bias | MaskPolicy::padding : MaskPolicy::none,
                        Variant::fused_prologue);
    const bool narrow = !precise() && head_dim_ == 64 && !wide();
    return kernel_for(with_bias ? kAnyBias | MaskPolicy::padding : MaskPolicy::none,
                      narrow ? Variant::narrow : standard);
  }

  // Whether such calls have a dense kernel that is launched beside a block-list kernel alone.
  bool has_dense_fallback() const { return precise() && head_dim_ == 256 && !biased(call_); }
  // Whether this call with lists is the dense kernel's if they skip nothing (DenseFallback, sm90/kernel_traits.h).
  bool one_of_two() const { return has_dense_fallback() || !dense_kernel().has_tile_of(block_list_kernel()); }

  // `number`: of the call's launches of this kernel.
  void attention(const Chunk& chunk, int64_t number, bool programmatic) const {
    if (!listed(call_) || one_of_two()) attention(dense_kernel(), chunk, number, programmatic);
    if (listed(call_)) attention(block_list_kernel(), chunk, number, programmatic);
  }
  void attention(const KernelInfo& kernel, const Chunk& chunk, int64_t number, bool programmatic) const {
    if (precise())
      precise_attention(kernel);
    else
      scaled_attention(kernel, chunk, number, programmatic);
  }

  // V in E4M3.
  void scaled_attention(const KernelInfo& kernel, const Chunk& chunk, int64_t number, bool programmatic) const {
    AttentionParams params = attention_params(kernel, chunk, number);
    params.v_map = map(workspace_.v_fp8, workspace_.key_row_bytes, workspace_.v_rows, workspace_.kv_slices,
                       workspace_.key_row_bytes, kernel.v_row_bytes, kernel.head_dim);
    params.v_scale = at<float>(workspace_.v_scale);
    params.v_mean = at<float>(workspace_.v_mean);
    params.delta_s = call_.mode == k4b ? at<float>(workspace_.delta_s) : nullptr;
    launch_attention(kernel, params, programmatic);
  }

  // The precise mode: V is read where it is.
  void precise_attention(const KernelInfo& kernel) const {
    Chunk chunk = workspace_.chunk;
    chunk.tiles = static_cast<int>(ceil_div(call_.q_length, kernel.block_m));
    AttentionParams params = attention_params(kernel, chunk, 0);
    params.v_map = element_map(call_.v, call_.kv_heads, call_.kv_length, kernel.block_n);
    launch_attention(kernel, params, programmatic_);
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

  AttentionParams attention_params(const KernelInfo& kernel, const Chunk& chunk, int64_t number) const {
    AttentionParams params{};
    params.q_map = quantizes_q() ? element_map(call_.q, call_.q_heads, call_.q_length, kernel.block_m)
                                 : map(workspace_.q_int8, workspace_.columns, call_.q_length, workspace_.q_slices,
                                       workspace_.row_bytes, kernel.row_bytes, kernel.block_m);
    params.k_map = map(workspace_.k_int8, workspace_.columns, call_.kv_length, workspace_.kv_slices,
                       workspace_.row_bytes, kernel.row_bytes, kernel.block_n);
    params.q_scale = at<float>(workspace_.q_scale);
    params.k_scale = at<float>(workspace_.k_scale);
    params.lse_shift = call_.lse ? at<float>(workspace_.lse_shift) : nullptr;
    params.mask = mask_of(call_.mask);
    params.out = strided(call_.out);
    params.lse = pointer<float>(call_.lse);
    params.nonfinite = pointer<int>(call_.nonfinite);
    params.chunk = chunk;
    params.q_scale_rows = static_cast<int>(workspace_.q_scale_rows);
    params.k_scale_blocks = static_cast<int>(workspace_.k_scale_blocks);
    params.q_heads = static_cast<int>(call_.q_heads);
    params.kv_heads = static_cast<int>(call_.kv_heads);
    params.q_length = static_cast<int>(call_.q_length);
    params.kv_length = static_cast<int>(call_.kv_length);
    params.head_dim = call_.head_dim;
    params.element = call_.element;
    params.lists = prepared_lists(workspace_.lists, number);
    params.gaps = pointer<float>(call_.gaps);
    params.prepared = at<Prepared>(workspace_.prepared);
    params.prepared_blocks = head_share(call_.kv_length, head_dim_).blocks;
    params.scale = call_.scale;
    params.causal = causal_order(chunk);
    params.dead = listed(call_) && one_of_two() ? at<int>(workspace_.lists.dead) : nullptr;
    return params;
  }

  void launch_attention(const KernelInfo& kernel, AttentionParams& params, bool programmatic) const {
    launch(kernel.image, kernel.name, grid(blocks_of(params.chunk)), kernel.threads, kernel.shared_bytes, params,
           {programmatic});
  }

  // A tensor of the caller: channels, tokens, heads, batches. The stride of an axis of one element may be anything.
  TensorMap element_map(const TensorView& view, int64_t heads, int64_t tokens, int box_rows) const {
    const auto stride = [](int64_t elements, int64_t size) {
      constexpr int kElementBytes = 2, kSmallest = 16;
      return static_cast<uint64_t>(size > 1 ? elements * kElementBytes : kSmallest);
    };
    const uint64_t sizes[] = {static_cast<uint64_t>(call_.head_dim), static_cast<uint64_t>(tokens),
                              static_cast<uint64_t>(heads), static_cast<uint64_t>(call_.batch)};
    const uint64_t strides[] = {stride(view.token_stride, tokens), stride(view.head_stride, heads),
                                stride(view.batch_stride, call_.batch)};
    const uint32_t box[] = {kElementBox, static_cast<uint32_t>(box_rows), 1, 1};
    return driver::encode_tensor_map(driver::MapElement::uint16, 4, view.pointer, sizes, strides, box,
                                     driver::MapSwizzle::bytes_128);
  }

  // Rows of `columns` bytes, `row_bytes` apart.
  TensorMap map(int64_t offset, int64_t columns, int64_t rows, int64_t slices, int64_t row_bytes, int box_columns,
                int box_rows) const {
    const uint64_t sizes[] = {static_cast<uint64_t>(columns), static_cast<uint64_t>(rows),
                              static_cast<uint64_t>(slices)};
    const uint64_t strides[] = {static_cast<uint64_t>(row_bytes), static_cast<uint64_t>(rows * row_bytes)};
    const uint32_t box[] = {static_cast<uint32_t>(box_columns), static_cast<uint32_t>(box_rows), 1};
    const auto swizzle = box_columns == 128 ? driver::MapSwizzle::bytes_128 : driver::MapSwizzle::bytes_64;
    return driver::encode_tensor_map(driver::MapElement::uint8, 3, call_.workspace + static_cast<uint64_t>(offset),
                                     sizes, strides, box, swizzle);
  }

  const Workspace workspace_;
  const int head_dim_;
  const std::string element_;
  const bool programmatic_;
};

}  // namespace
}  // namespace sm90

int64_t workspace_bytes(const AttentionCall& call) {
  common::validate(call, sm90::kFeatures);
  return sm90::Workspace(call).bytes;
}

// Smooth Q's correction is computed of K; the precise mode reads V where it is.
InputsRead read_by_attention_phase(const AttentionCall& call) {
  return {false, call.mode == k4b, call.mode == kPrecise};
}

void attention(const AttentionCall& call) {
  common::validate(call, sm90::kFeatures);
  const driver::ContextGuard guard(call.device);
  sm90::AttentionLauncher(call).run();
}
