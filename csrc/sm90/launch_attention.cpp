// The launches of the attention kernels, and of the smooth-Q correction before each part of a 4-bit call. All attention
// kernels have the same parameters, but read V in E4M3 from the workspace and V in 16 bits where the caller has it. A
// grid has no more blocks than the GPU has multiprocessors: a block takes one work tile of the chunk after the other.
#include <algorithm>
#include <type_traits>

#include "common/launch_builder.h"
#include "driver.h"
#include "sm90/causal_order.h"
#include "sm90/launch_builder.h"
#include "sm90/tensor_maps.h"

namespace sm90 {

void Builder::delta(const Chunk& chunk) {
  if (may_hide_keys(call_))
    delta(chunk, HidingDeltaParams{});
  else
    delta(chunk, DeltaParams{});
}

template <class Params>
void Builder::delta(const Chunk& chunk, Params params) {
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
         grid(ceil_div(call_.kv_length, kDeltaThreads), ceil_div(chunk.tiles, kDeltaTiles), chunk.heads), kDeltaThreads,
         0, params, fields);
}

void Builder::attention(const KernelInfo& kernel, const Chunk& chunk, int64_t number, bool programmatic) {
  if (choice_.precise())
    precise_attention(kernel);
  else
    scaled_attention(kernel, chunk, number, programmatic);
}

// V in E4M3.
void Builder::scaled_attention(const KernelInfo& kernel, const Chunk& chunk, int64_t number, bool programmatic) {
  AttentionParams params{};
  RunFields fields(params);
  set_attention(params, fields, kernel, chunk, number);
  fields.bind(params.v_map, map(byte_map(workspace_.key_row_bytes, workspace_.v_rows, workspace_.kv_bh,
                                         workspace_.key_row_bytes, kernel.v_row_bytes, kernel.head_dim),
                                kWorkspace, workspace_.v_fp8));
  fields.bind(params.v_scale, kWorkspace, workspace_.v_scale);
  fields.bind(params.v_mean, kWorkspace, workspace_.v_mean);
  if (call_.mode == k4b) fields.bind(params.delta_s, kWorkspace, workspace_.delta_s);
  launch_attention(kernel, params, fields, programmatic);
}

// The precise mode: V is read where it is.
void Builder::precise_attention(const KernelInfo& kernel) {
  Chunk chunk = workspace_.chunk;
  chunk.tiles = static_cast<int>(ceil_div(call_.q_length, kernel.block_m));
  AttentionParams params{};
  RunFields fields(params);
  set_attention(params, fields, kernel, chunk, 0);
  fields.bind(params.v_map, map(element_map(call_, call_.v, call_.kv_heads, call_.kv_length, kernel.block_n), kV));
  launch_attention(kernel, params, fields, programmatic_);
}

// Of the attention kernel's grid.
int64_t Builder::blocks_of(const Chunk& chunk) const {
  return std::min<int64_t>(int64_t(chunk.heads) * chunk.tiles, driver::multiprocessor_count(call_.device));
}

void Builder::set_attention(AttentionParams& params, RunFields& fields, const KernelInfo& kernel, const Chunk& chunk,
                            int64_t number) {
  bind_attention(params, fields, number);
  set_key_sizes(params);
  set_query_sizes(params);
  fields.bind(params.q_map, choice_.quantizes_q()
                                ? map(element_map(call_, call_.q, call_.q_heads, call_.q_length, kernel.block_m), kQ)
                                : map(byte_map(workspace_.columns, call_.q_length, workspace_.q_bh,
                                               workspace_.row_bytes, kernel.row_bytes, kernel.block_m),
                                      kWorkspace, workspace_.q_int8));
  fields.bind(params.k_map, map(byte_map(workspace_.columns, call_.kv_length, workspace_.kv_bh, workspace_.row_bytes,
                                         kernel.row_bytes, kernel.block_n),
                                kWorkspace, workspace_.k_int8));
  if (call_.has_lse) fields.bind(params.lse_shift, kWorkspace, workspace_.lse_shift);
  params.chunk = chunk;
  params.q_scale_rows = static_cast<int>(workspace_.q_scale_rows);
  params.k_scale_blocks = static_cast<int>(workspace_.k_scale_blocks);
  params.element = call_.element;
  fields.bind(params.prepared, kWorkspace, workspace_.prepared);
  params.prepared_blocks = head_share(call_.kv_length, choice_.head_dim()).blocks;
  params.scale = call_.scale;
  params.causal = causal_order(chunk, blocks_of(chunk));
  if (kernel.variant == Variant::rotating_prologue) fields.bind(params.choices, kWorkspace, workspace_.choices);
  if (call_.has_block_mask() && choice_.one_of_two()) fields.bind(params.dead, kWorkspace, workspace_.lists.skipped);
}

void Builder::launch_attention(const KernelInfo& kernel, const AttentionParams& params, const RunFields& fields,
                               bool programmatic) {
  launch(kernel.image, kernel.name, grid(blocks_of(params.chunk)), kernel.threads, kernel.shared_bytes, params, fields,
         {programmatic});
}

}  // namespace sm90
