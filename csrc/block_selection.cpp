#include "block_selection.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "common/block_selection.h"
#include "common/constants.h"
#include "common/grid.h"
#include "common/launch_builder.h"
#include "common/validate.h"
#include "driver.h"
#include "kernels.h"

namespace {

using namespace common;

constexpr int64_t kMostScoreBlocks = 512;  // thread blocks with scratch memory of their own

void require_address(const char* name, uint64_t address, int64_t multiple = kVectorBytes) {
  require(address != 0 && address % multiple == 0, name, " must be an address and a multiple of ",
          std::to_string(multiple), " bytes, got ", std::to_string(address));
}

template <class Type>
Type* pointer(uint64_t address, int64_t offset = 0) {
  return reinterpret_cast<Type*>(static_cast<uintptr_t>(address + static_cast<uint64_t>(offset)));
}

template <class Params>
void enqueue(const driver::Images& images, const char* cubin, const std::string& kernel, driver::Extent grid,
             int threads, int shared_bytes, uint64_t stream, Params params) {
  void* arguments[] = {&params};
  driver::launch(images.kernel(cubin, kernel, shared_bytes), grid, {static_cast<unsigned>(threads)}, shared_bytes,
                 driver::stream_of(stream), arguments);
}

// What the attention kernels ask of a call's tensors; a signature without v and out has strides of 0 for them.
CallSignature attention_of(const TensorStrides& q, const TensorStrides& k, const TensorStrides& v,
                           const TensorStrides& out, int64_t batch, int64_t q_heads, int64_t kv_heads, int64_t q_length,
                           int64_t kv_length, int head_dim, int element, float scale) {
  CallSignature call{};
  call.q = q, call.k = k, call.v = v, call.out = out;
  call.batch = batch, call.q_heads = q_heads, call.kv_heads = kv_heads;
  call.q_length = q_length, call.kv_length = kv_length;
  call.head_dim = head_dim, call.element = element, call.scale = scale;
  call.mode = k8b, call.pv_accumulator = 32;
  return call;
}

// Makes the sub-pools of a tensor (batch, heads, length, head_dim).
struct Pooling {
  int64_t batch, heads, length, rows;
  int head_dim, element;

  // `center`: 0, or where the vector goes that is taken from them.
  void enqueue_on(const driver::Images& images, uint64_t stream, uint64_t tokens, const TensorStrides& strides,
                  uint64_t center, uint64_t pools, float factor) const {
    const int channels = padded_head_dim(head_dim);
    const std::string name = element_name(element);
    PoolParams params{};
    params.tokens = {pointer<void>(tokens), strides.batch, strides.head, strides.token};
    params.center = pointer<float>(center);
    params.pools = pointer<void>(pools);
    params.heads = static_cast<int>(heads);
    params.length = static_cast<int>(length);
    params.head_dim = head_dim;
    params.channels = channels;
    params.pool_rows = static_cast<int>(rows);
    params.factor = factor;
    if (center)
      enqueue(images, "token_pools", "pool_center_" + name, grid(batch * heads), kPoolThreads, 0, stream, params);
    const int64_t blocks = ceil_div(rows, kPoolThreads / (channels / 8));
    enqueue(images, "token_pools", "pool_tokens_" + name, grid(batch * heads * blocks), kPoolThreads, 0, stream,
            params);
  }
};

void enqueue_means(const driver::Images& images, uint64_t stream, int64_t bh, const BlockMeanParams& params) {
  const int64_t blocks = ceil_div(params.mean_rows, kPoolThreads / (params.channels / 8));
  enqueue(images, "token_pools", "block_means", grid(bh * blocks), kPoolThreads, 0, stream, params);
}

}  // namespace

BlockScorePlan::BlockScorePlan(const BlockScoreSignature& call, std::shared_ptr<const Kernels> kernels)
    : call_(call), kernels_(std::move(kernels)) {
  validate(attention_of(call.q, call.k, {}, {}, call.batch, call.q_heads, call.kv_heads, call.q_length, call.kv_length,
                        call.head_dim, call.element, call.scale),
           kernels_->build);
  channels_ = padded_head_dim(call.head_dim);
  query_rows_ = round_up(ceil_div(call.q_length, kPoolTokens), score_rows(channels_));
  key_rows_ = round_up(ceil_div(call.kv_length, kPoolTokens), kScoreKeys);
  const int64_t q_bh = call.batch * call.q_heads, kv_bh = call.batch * call.kv_heads;
  works_ = q_bh * (query_rows_ / score_rows(channels_));
  require_between("the work items of the scores of blocks", works_, 1, kMaxInt - kMostScoreBlocks);
  most_blocks_ = std::min(works_, kMostScoreBlocks);
  Arena arena;
  center_ = arena.add(kv_bh * channels_ * 4);
  query_pools_ = arena.add(q_bh * query_rows_ * channels_ * 2);
  key_pools_ = arena.add(kv_bh * key_rows_ * channels_ * 2);
  block_means_ = arena.add(call.block_means ? kv_bh * key_rows_ * channels_ * 2 : 0);
  sums_ = arena.add(most_blocks_ * (key_rows_ / kScoreKeys) * score_step_bytes(channels_));
  workspace_bytes_ = arena.bytes();
}

void BlockScorePlan::run(uint64_t q, uint64_t k, uint64_t scores, uint64_t workspace, uint64_t stream) const {
  require_address("q", q);
  require_address("k", k);
  require_address("scores", scores);
  require_address("workspace", workspace);
  const driver::ContextGuard guard(driver::primary_context(call_.device));
  const driver::Images& images = kernels_->images;
  const Pooling of_k{call_.batch, call_.kv_heads, call_.kv_length, key_rows_, call_.head_dim, call_.element};
  const Pooling of_q{call_.batch, call_.q_heads, call_.q_length, query_rows_, call_.head_dim, call_.element};
  of_k.enqueue_on(images, stream, k, call_.k, workspace + static_cast<uint64_t>(center_),
                  workspace + static_cast<uint64_t>(key_pools_), 1.f);
  // A mean in the place of each of its block's sub-pools: their exponentials add up to the block's.
  if (call_.block_means) {
    enqueue_means(images, stream, call_.batch * call_.kv_heads,
                  {pointer<void>(workspace, key_pools_), pointer<void>(workspace, block_means_),
                   static_cast<int>(call_.kv_length), channels_, static_cast<int>(key_rows_),
                   static_cast<int>(key_rows_ / kPoolsOfBlock), kPoolsOfBlock, 0});
  }
  of_q.enqueue_on(images, stream, q, call_.q, 0, workspace + static_cast<uint64_t>(query_pools_), call_.scale * kLog2E);

  BlockScoreParams params{};
  params.query_pools = pointer<void>(workspace, query_pools_);
  params.key_pools = pointer<void>(workspace, call_.block_means ? block_means_ : key_pools_);
  params.sums = pointer<void>(workspace, sums_);
  params.scores = pointer<float>(scores);
  params.q_heads = static_cast<int>(call_.q_heads);
  params.kv_heads = static_cast<int>(call_.kv_heads);
  params.q_length = static_cast<int>(call_.q_length);
  params.kv_length = static_cast<int>(call_.kv_length);
  params.query_rows = static_cast<int>(query_rows_);
  params.key_rows = static_cast<int>(key_rows_);
  params.query_blocks = static_cast<int>(ceil_div(call_.q_length, kListTile));
  params.key_blocks = static_cast<int>(ceil_div(call_.kv_length, kListTile));
  params.works = static_cast<int>(works_);
  const int64_t resident = int64_t(kScoreBlocksOfSm) * driver::multiprocessor_count(call_.device);
  enqueue(images, "block_scores", "block_scores_d" + std::to_string(channels_), grid(std::min(most_blocks_, resident)),
          kScoreThreads, score_shared_bytes(channels_), stream, params);
}

void make_block_lists(const BlockListCall& call, const driver::Images& images, const BlockListOperands& operands,
                      uint64_t stream) {
  const bool is_by_count = operands.threshold == 0 && operands.counts == 0 && operands.active == 0;
  require_between("batch", call.batch, 1, kMaxInt);
  require_between("heads", call.heads, 1, kMaxInt);
  require_between("query_blocks", call.query_blocks, 1, kMaxInt);
  require_between("key_blocks", call.key_blocks, 1, kMaxListTiles);
  require_between("batch * heads", call.batch * call.heads, 1, kMaxInt);
  require_between("batch * heads * query_blocks", call.batch * call.heads * call.query_blocks, 1,
                  kMaxInt - kListsPerBlock);
  require_between("count", call.count, is_by_count ? 1 : 0, is_by_count ? call.key_blocks : 0);
  if (operands.active == 0) require_address("scores", operands.scores);
  if (operands.bits == 0) require_address("lists", operands.lists);
  BlockListParams params{};
  params.scores = pointer<const float>(operands.scores);
  params.threshold = pointer<const float>(operands.threshold);
  params.counts = pointer<const int>(operands.counts);
  params.forced = pointer<const unsigned char>(operands.forced);
  params.always = pointer<const unsigned char>(operands.always);
  params.dense = pointer<const unsigned char>(operands.dense);
  params.active = pointer<const unsigned>(operands.active);
  params.lists = pointer<short>(operands.lists);
  params.bits = pointer<unsigned>(operands.bits);
  params.list_batch = call.is_union ? 1 : static_cast<int>(call.batch);
  params.batch = static_cast<int>(call.batch);
  params.heads = static_cast<int>(call.heads);
  params.query_blocks = static_cast<int>(call.query_blocks);
  params.key_blocks = static_cast<int>(call.key_blocks);
  params.count = static_cast<int>(call.count);
  const driver::ContextGuard guard(driver::primary_context(call.device));
  const int64_t number = int64_t(params.list_batch) * params.heads * params.query_blocks;
  enqueue(images, "block_lists", "block_lists", grid(ceil_div(number, kListsPerBlock)), kPrepareListsThreads,
          bitmap_bytes(params.key_blocks), stream, params);
}

void sample_rows(const RowSampleCall& call, const driver::Images& images, const RowSampleOperands& operands,
                 uint64_t stream) {
  require_address("q", operands.q);
  require_address("spread", operands.spread, sizeof(i64));
  require_address("tokens", operands.tokens);
  require_address("rows", operands.rows);
  if (call.unlike > 0) require_address("pools", operands.pools, sizeof(i64));
  require_between("heads_of_group", call.heads_of_group, 1, kMaxInt);
  require_between("spread_rows + unlike", call.spread_rows + call.unlike, 1, kMostRows);
  require_between("pools_of_part", call.pools_of_part, call.unlike > 0 ? 1 : 0, kMaxInt);
  SampleParams params{};
  params.q = {pointer<void>(operands.q), call.q.batch, call.q.head, call.q.token};
  params.spread = pointer<const i64>(operands.spread);
  params.pools = pointer<const i64>(operands.pools);
  params.tokens = pointer<int>(operands.tokens);
  params.rows = pointer<void>(operands.rows);
  params.heads = static_cast<int>(call.heads);
  params.head_dim = call.head_dim;
  params.heads_of_group = static_cast<int>(call.heads_of_group);
  params.spread_rows = static_cast<int>(call.spread_rows);
  params.unlike = static_cast<int>(call.unlike);
  params.pools_of_part = static_cast<int>(call.pools_of_part);
  const driver::ContextGuard guard(driver::primary_context(call.device));
  enqueue(images, "row_errors", std::string("row_sample_") + element_name(call.element),
          grid(call.batch * call.heads * (call.unlike + 1)), kSampleThreads, 0, stream, params);
}

void measure_rows(RowParams params, int element, int device, const driver::Images& images,
                  const RowErrorOperands& operands, uint64_t stream) {
  require_between("rows", params.rows, 1, kMostRows);
  require_between("heads", params.heads, 1, kMaxInt);
  if (params.kv_length >= kListTile) require_address("outs", operands.outs);
  if (params.kv_length % kListTile) require_address("last_outs", operands.last_outs);
  if (params.cuts > 0) require_address("scores", operands.scores);
  require_address("q", operands.q);
  require_address("tokens", operands.tokens);
  require_address("norms", operands.norms);
  params.outs = pointer<const void>(operands.outs);
  params.last_outs = pointer<const void>(operands.last_outs);
  params.lses = pointer<const float>(operands.lses);
  params.last_lses = pointer<const float>(operands.last_lses);
  params.q.pointer = pointer<void>(operands.q);
  params.tokens = pointer<const int>(operands.tokens);
  params.scores = pointer<const float>(operands.scores);
  params.always = pointer<const unsigned char>(operands.always);
  params.compared = pointer<const unsigned>(operands.compared);
  params.center = pointer<const float>(operands.center);
  params.key_means = pointer<const void>(operands.key_means);
  params.value_means = pointer<const void>(operands.value_means);
  params.forced = pointer<unsigned char>(operands.forced);
  params.totals = pointer<float>(operands.totals);
  params.norms = pointer<float>(operands.norms);
  params.key_blocks = static_cast<int>(ceil_div(params.kv_length, kListTile));
  const int channels = padded_head_dim(params.head_dim);
  const driver::ContextGuard guard(driver::primary_context(device));
  enqueue(images, "row_errors", "row_masses", grid(params.heads), kMassThreads, 0, stream, params);
  const std::string name = std::string("row_errors_") + element_name(element) + "_d" + std::to_string(channels);
  enqueue(images, "row_errors", name, grid(int64_t(params.heads) * params.rows), channels,
          row_shared_bytes(channels, params.key_blocks), stream, params);
}

void choose_cuts(CutParams params, int device, const driver::Images& images, const CutOperands& operands,
                 uint64_t stream) {
  require_between("heads", params.heads, 1, kMaxInt);
  require_address("norms", operands.norms);
  if (params.cuts > 0) {
    require_address("chosen", operands.chosen);
    require_address("errors", operands.errors);
  }
  if (params.has_tail) require_address("by_tail", operands.by_tail);
  params.norms = pointer<const float>(operands.norms);
  params.compared_by_tail = pointer<const unsigned char>(operands.compared_by_tail);
  params.chosen = pointer<int>(operands.chosen);
  params.by_tail = pointer<unsigned char>(operands.by_tail);
  params.errors = pointer<float>(operands.errors);
  params.compared_errors = pointer<float>(operands.compared_errors);
  const driver::ContextGuard guard(driver::primary_context(device));
  enqueue(images, "row_errors", "chosen_cuts", grid(params.heads), kChoiceThreads, 0, stream, params);
}

PooledTailPlan::PooledTailPlan(const PooledTailSignature& call, std::shared_ptr<const Kernels> kernels)
    : call_(call), kernels_(std::move(kernels)) {
  validate(attention_of(call.q, call.k, call.v, call.out, call.batch, call.q_heads, call.kv_heads, call.q_length,
                        call.kv_length, call.head_dim, call.element, call.scale),
           kernels_->build);
  channels_ = padded_head_dim(call.head_dim);
  key_blocks_ = ceil_div(call.kv_length, kListTile);
  require_between("the key blocks of kv_length", key_blocks_, 1, kMaxListTiles);
  key_rows_ = key_blocks_ * kPoolsOfBlock;
  mean_rows_ = round_up(key_blocks_, kTailMultiple);
  const int64_t kv_bh = call.batch * call.kv_heads;
  works_ = call.batch * call.q_heads * ceil_div(call.q_length, kTailQueries);
  Arena arena;
  center_ = arena.add(kv_bh * channels_ * 4);
  pools_ = arena.add(kv_bh * key_rows_ * channels_ * 2);
  key_means_ = arena.add(kv_bh * mean_rows_ * channels_ * 2);
  value_means_ = arena.add(kv_bh * mean_rows_ * channels_ * 2);
  workspace_bytes_ = arena.bytes();
}

void PooledTailPlan::run_means(uint64_t k, uint64_t v, uint64_t workspace, uint64_t stream) const {
  require_address("k", k);
  require_address("v", v);
  require_address("workspace", workspace);
  const driver::ContextGuard guard(driver::primary_context(call_.device));
  const driver::Images& images = kernels_->images;
  const Pooling pooling{call_.batch, call_.kv_heads, call_.kv_length, key_rows_, call_.head_dim, call_.element};
  const auto means = [&](uint64_t tokens, const TensorStrides& strides, uint64_t center, int64_t to) {
    // V's sub-pools take the place of K's, of which the means are made by then.
    const uint64_t pools = workspace + static_cast<uint64_t>(pools_);
    pooling.enqueue_on(images, stream, tokens, strides, center, pools, 1.f);
    enqueue_means(images, stream, call_.batch * call_.kv_heads,
                  {pointer<void>(pools), pointer<void>(workspace, to), static_cast<int>(call_.kv_length), channels_,
                   static_cast<int>(key_rows_), static_cast<int>(mean_rows_), 1, 0});
  };
  means(k, call_.k, workspace + static_cast<uint64_t>(center_), key_means_);
  means(v, call_.v, 0, value_means_);
}

void PooledTailPlan::run(const PooledTailOperands& operands, uint64_t stream) const {
  require_address("q", operands.q);
  require_address("out", operands.out);
  require_address("lse", operands.lse);
  require_address("lists", operands.lists);
  run_means(operands.k, operands.v, operands.workspace, stream);
  const driver::ContextGuard guard(driver::primary_context(call_.device));
  const auto strided = [](uint64_t address, const TensorStrides& strides) {
    return Strided{pointer<void>(address), strides.batch, strides.head, strides.token};
  };
  TailParams params{};
  params.q = strided(operands.q, call_.q);
  params.out = strided(operands.out, call_.out);
  params.lse = pointer<float>(operands.lse);
  params.center = pointer<const float>(operands.workspace, center_);
  params.key_means = pointer<const void>(operands.workspace, key_means_);
  params.value_means = pointer<const void>(operands.workspace, value_means_);
  params.lists = pointer<const short>(operands.lists);
  params.list_batch_stride = call_.list_batch_stride;
  params.list_head_stride = call_.list_head_stride;
  params.q_heads = static_cast<int>(call_.q_heads);
  params.kv_heads = static_cast<int>(call_.kv_heads);
  params.q_length = static_cast<int>(call_.q_length);
  params.kv_length = static_cast<int>(call_.kv_length);
  params.head_dim = call_.head_dim;
  params.mean_rows = static_cast<int>(mean_rows_);
  params.query_blocks = static_cast<int>(ceil_div(call_.q_length, kListTile));
  params.key_blocks = static_cast<int>(key_blocks_);
  params.factor = call_.scale * kLog2E;
  const std::string name = std::string("pooled_tail_") + element_name(call_.element) + "_d" + std::to_string(channels_);
  enqueue(kernels_->images, "pooled_tail", name, grid(works_), kTailThreads,
          tail_shared_bytes(channels_, params.key_blocks), stream, params);
}
