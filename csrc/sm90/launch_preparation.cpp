// The launches of the kernels that prepare Q, K and V: statistics, quantization, and for short K and V one pass that
// does both. Kernels that choose rotations or leave out hidden keys have the parameters of the others and more, so
// their set_... begins with that of the others. Fields that hold addresses are bound: each run puts them in.
#include <algorithm>

#include "common/launch_builder.h"
#include "sm90/launch_builder.h"

namespace sm90 {

// Blocks of the statistics pass for each head. By the shape of one head alone: calls are computed in parts of their
// heads, too, and give the same bits.
int Builder::statistics_cluster() const {
  constexpr int64_t kTokensOfBlock = 2048, kFewest = 4;
  const int64_t fewest = std::min(kFewest, workspace_.k_blocks);
  return static_cast<int>(std::clamp<int64_t>(ceil_div(counted_tokens(), kTokensOfBlock), fewest, kMaxClusterBlocks));
}

void Builder::one_pass() {
  const HeadShare share = head_share(call_.kv_length, choice_.head_dim());
  if (choice_.quantizes_by_head())
    one_pass(ChoosingOnePassParams{}, share);
  else
    one_pass(OnePassParams{}, share);
}

template <class Params>
void Builder::one_pass(Params params, const HeadShare& share) {
  RunFields fields(params);
  set_statistics(params.statistics, fields, share.blocks);
  set_quantization(params.quantize, fields);
  params.tensors = choice_.precise() ? 1 : 2;
  params.units = share.units;
  launch("one_pass", choice_.one_pass_name(), grid(share.blocks * params.tensors * workspace_.kv_bh), kQuantizeThreads,
         share.units * kUnitBytes, params, fields, {programmatic_, static_cast<unsigned>(share.blocks)});
}

void Builder::statistics() {
  if (choice_.has_choices())
    statistics(ChoosingStatisticsParams{});
  else
    statistics(StatisticsParams{});
}

template <class Params>
void Builder::statistics(Params params) {
  RunFields fields(params);
  set_statistics(params, fields, statistics_cluster());
  launch("statistics", choice_.statistics_name(), grid(params.cluster_blocks * workspace_.kv_bh), kStatisticsThreads, 0,
         params, fields, {programmatic_, static_cast<unsigned>(params.cluster_blocks)});
}

void Builder::set_statistics(StatisticsParams& params, RunFields& fields, int cluster_blocks) const {
  bind_statistics(params, fields);
  set_key_sizes(params);
  params.kv_length = counted_tokens();
  params.head_room = call_.is_slice() ? kHeadRoom : 1.f;
  fields.bind(params.v_inverse, kWorkspace, workspace_.v_inverse);
  fields.bind(params.prepared, kWorkspace, workspace_.prepared);
  params.cluster_blocks = cluster_blocks;
}
void Builder::set_statistics(ChoosingStatisticsParams& params, RunFields& fields, int cluster_blocks) const {
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

void Builder::quantize() {
  const bool only_q = choice_.one_pass_keys();
  if (only_q ? choice_.may_rotate() : choice_.quantizes_by_head())
    quantize(ChoosingQuantizeParams{}, only_q);
  else
    quantize(QuantizeParams{}, only_q);
}

template <class Params>
void Builder::quantize(Params params, bool only_q) {
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

void Builder::set_quantization(QuantizeParams& params, RunFields& fields) const {
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
void Builder::set_quantization(ChoosingQuantizeParams& params, RunFields& fields) const {
  set_quantization(static_cast<QuantizeParams&>(params), fields);
  fields.bind(params.choices, kWorkspace, workspace_.choices);
  if (call_.rotate_as_given) fields.bind(params.rotated_heads, kRotatedHeads);
  params.rotates = rotates(call_);
}

}  // namespace sm90
