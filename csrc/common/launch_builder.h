// What the launch code of all families shares: block lists in scratch memory, and one call's launches.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include "attention_call.h"
#include "common/call_sizes.h"
#include "common/constants.h"
#include "common/grid.h"
#include "common/rotates.h"
#include "common/tile_lists.h"
#include "common/views.h"
#include "driver.h"
#include "launch_list.h"

namespace common {

constexpr int64_t kDeltaBytes = int64_t(256) << 20;  // of smooth Q's correction at a time

inline CallSizes sizes_of(const CallSignature& call) {
  return {static_cast<int>(call.q_heads), static_cast<int>(call.kv_heads), static_cast<int>(call.q_length),
          static_cast<int>(call.kv_length), call.head_dim};
}

// The prepared block lists of a call in its scratch memory, as offsets in bytes. Heads and entries of the batch that
// share their lists need less than there is: which do, the size does not depend on.
struct ListSpace {
  int64_t query_blocks = 0, key_blocks = 0, launches = 0;
  int64_t entries = 0, counts = 0, next = 0, skipped = 0;

  ListSpace() = default;
  // For so many launches of the attention kernel that count the work tiles they took.
  ListSpace(const CallSignature& call, int64_t of_attention, Arena& arena)
      : query_blocks(ceil_div(call.q_length, kListTile)),
        key_blocks(call.block_mask.key_blocks),
        launches(of_attention) {
    if (key_blocks == 0) return;
    const int64_t lists = call.batch * call.q_heads * query_blocks;
    entries = arena.add(lists * key_blocks * 2);
    counts = arena.add(lists * 4);
    next = arena.add(launches * 4);
    skipped = arena.add(4);
  }
};

// As it stands in the kernels' names.
inline const char* element_name(int element) {
  return element == kHalf ? "fp16" : element == kBfloat16 ? "bf16" : "fp32";
}

inline Rotates rotates(const CallSignature& call) {
  if (call.rotate_by_head) return Rotates::by_head;
  if (call.rotate_as_given) return Rotates::as_given;
  return call.rotate ? Rotates::always : Rotates::never;
}
// Whether the mask, the same for all queries and heads, may hide keys (common/hidden_keys.cuh).
inline bool may_hide_keys(const CallSignature& call) {
  return call.has_mask() && call.mask.head_stride == 0 && call.mask.query_stride == 0;
}

// Whether a block of queries has a block of keys at its own place.
inline bool has_diagonal(const CallSignature& call) { return call.causal || call.q_length == call.kv_length; }

// Makes the launches of one call, for the current context. `Workspace`: how the family divides its scratch memory.
// Kernels of both families name alike what they take of a call; the functions bind_... fill in these fields.
template <class Workspace>
class LaunchBuilder {
 public:
  LaunchList build() {
    phase_ = kPreparation;
    prepare();
    phase_ = kAttentionPhase;
    attend();
    return std::move(list_);
  }

 protected:
  LaunchBuilder(const CallSignature& call, const Workspace& workspace, const driver::Images& images)
      : call_(call), workspace_(workspace), sizes_(sizes_of(call)), images_(images) {}
  ~LaunchBuilder() = default;

  virtual void prepare() = 0;
  virtual void attend() = 0;

  template <class Params>
  void launch(const std::string& cubin, const std::string& kernel, driver::Extent grid, int threads, int shared_bytes,
              const Params& params, const RunFields& fields, driver::LaunchOptions options = {}) {
    list_.add(phase_, images_.kernel(cubin, kernel, shared_bytes), grid, threads, shared_bytes, params, fields,
              options);
  }
  int map(const driver::MapDescription& description, Operand operand, int64_t offset = 0) {
    return list_.add_map(description, operand, offset);
  }

  // `first_token`: where the operand begins.
  void bind(Strided& field, RunFields& fields, Operand operand, const TensorStrides& strides,
            int64_t first_token = 0) const {
    field = {nullptr, strides.batch, strides.head, strides.token};
    fields.bind(field.pointer, operand, -first_token * strides.token * (call_.element == kFloat ? 4 : 2));
  }
  void bind_mask(Mask& field, RunFields& fields) const {
    const MaskLayout& mask = call_.mask;
    field = {nullptr, mask.batch_stride, mask.head_stride, mask.query_stride, mask.key_stride, mask.element, 0};
    fields.bind(field.pointer, kMask);
  }

  template <class Params>
  void bind_statistics(Params& params, RunFields& fields) const {
    bind(params.k, fields, kK, call_.k);
    bind(params.v, fields, kV, call_.v);
    fields.bind(params.k_mean, kWorkspace, workspace_.k_mean);
    fields.bind(params.v_mean, kWorkspace, workspace_.v_mean);
    fields.bind(params.v_scale, kWorkspace, workspace_.v_scale);
    params.smooth_v = call_.smooth_v;
  }

  template <class Params>
  void bind_quantization(Params& params, RunFields& fields) const {
    bind(params.q, fields, kQ, call_.q, call_.first_token);
    bind(params.k, fields, kK, call_.k, call_.first_token);
    bind(params.v, fields, kV, call_.v, call_.first_token);
    if (call_.is_slice()) fields.bind(params.too_large, kNonfinite);
    fields.bind(params.k_mean, kWorkspace, workspace_.k_mean);
    fields.bind(params.v_mean, kWorkspace, workspace_.v_mean);
    fields.bind(params.q_scale, kWorkspace, workspace_.q_scale);
    fields.bind(params.k_scale, kWorkspace, workspace_.k_scale);
    if (call_.mode == k4b) fields.bind(params.q_mean, kWorkspace, workspace_.q_mean);
    if (call_.has_lse) fields.bind(params.lse_shift, kWorkspace, workspace_.lse_shift);
    params.scale = call_.scale;
  }

  template <class Params>
  void bind_delta(Params& params, RunFields& fields) const {
    bind(params.k, fields, kK, call_.k);
    fields.bind(params.k_mean, kWorkspace, workspace_.k_mean);
    fields.bind(params.q_mean, kWorkspace, workspace_.q_mean);
    params.scale = call_.scale * kLog2E;
  }

  // `number`: of the call's launches of this attention kernel.
  template <class Params>
  void bind_attention(Params& params, RunFields& fields, int64_t number) const {
    fields.bind(params.q_scale, kWorkspace, workspace_.q_scale);
    fields.bind(params.k_scale, kWorkspace, workspace_.k_scale);
    bind_mask(params.mask, fields);
    bind(params.out, fields, kOut, call_.out);
    fields.bind(params.lse, kLse);
    fields.bind(params.nonfinite, kNonfinite);
    if (call_.has_block_mask()) bind_lists(params.lists, fields, number);
  }

  // Tokens of which statistics are computed, and the place of those that are quantized among blocks of so many.
  int counted_tokens() const { return static_cast<int>(call_.is_slice() ? call_.slice_tokens : call_.kv_length); }
  int first_block(int64_t tokens) const { return static_cast<int>(call_.first_token / tokens); }
  int blocks(int64_t length, int64_t tokens) const {
    return static_cast<int>(ceil_div(call_.is_slice() ? call_.slice_tokens : length, tokens));
  }

  // Adds what makes the lists that attention kernels walk; with `flags_skipped` it says whether they skip a block.
  void prepare_lists(ListForm form, bool flags_skipped = false) {
    const BlockMaskLayout& mask = call_.block_mask;
    const ListSpace& space = workspace_.lists;
    PrepareListsParams params{};
    RunFields fields(params);
    fields.bind(params.lists, kBlockMask);
    params.batch_stride = mask.batch_stride;
    params.head_stride = mask.head_stride;
    fields.bind(params.entries, kWorkspace, space.entries);
    fields.bind(params.counts, kWorkspace, space.counts);
    fields.bind(params.next, kWorkspace, space.next);
    if (flags_skipped) fields.bind(params.dead, kWorkspace, space.skipped);
    fields.bind(params.invalid, kInvalidBlocks);
    params.batches = static_cast<int>(mask.batch_stride == 0 ? 1 : call_.batch);
    params.heads = static_cast<int>(listed_heads());
    params.query_blocks = static_cast<int>(space.query_blocks);
    params.key_tiles = static_cast<int>(space.key_blocks);
    params.causal = call_.causal;
    params.launches = static_cast<int>(space.launches);
    params.form = form;
    params.has_diagonal = has_diagonal(call_);
    if (flags_skipped) launch("tile_lists", "clear_dead_tiles", grid(1), 1, 0, params, fields);
    const int64_t lists = int64_t(params.batches) * params.heads * params.query_blocks;
    launch("tile_lists", "prepare_tile_lists", grid(ceil_div(lists, kListsPerBlock)), kPrepareListsThreads,
           bitmap_bytes(params.key_tiles), params, fields);
  }

  const CallSignature& call_;
  const Workspace& workspace_;
  const CallSizes sizes_;

 private:
  void bind_lists(PreparedLists& lists, RunFields& fields, int64_t number) const {
    const ListSpace& space = workspace_.lists;
    fields.bind(lists.entries, kWorkspace, space.entries);
    fields.bind(lists.counts, kWorkspace, space.counts);
    fields.bind(lists.next, kWorkspace, space.next + 4 * number);
    lists.batch_lists = static_cast<int>(call_.block_mask.batch_stride == 0 ? 0 : listed_heads() * space.query_blocks);
    lists.head_lists = static_cast<int>(call_.block_mask.head_stride == 0 ? 0 : space.query_blocks);
    lists.key_tiles = static_cast<int>(space.key_blocks);
    lists.causal = call_.causal;
  }
  int64_t listed_heads() const { return call_.block_mask.head_stride == 0 ? 1 : call_.q_heads; }

  const driver::Images& images_;
  LaunchList list_;
  Phase phase_ = kPreparation;
};

}  // namespace common
