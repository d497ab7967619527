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

void require_address(const char* name, uint64_t address) {
  require(address != 0 && address % kVectorBytes == 0, name, " must be an address and a multiple of ",
          std::to_string(kVectorBytes), " bytes, got ", std::to_string(address));
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

}  // namespace

BlockScorePlan::BlockScorePlan(const BlockScoreSignature& call, std::shared_ptr<const Kernels> kernels)
    : call_(call), kernels_(std::move(kernels)) {
  // What the attention kernels ask of q and k, and nothing else.
  CallSignature attention{};
  attention.q = call.q, attention.k = call.k;
  attention.batch = call.batch, attention.q_heads = call.q_heads, attention.kv_heads = call.kv_heads;
  attention.q_length = call.q_length, attention.kv_length = call.kv_length;
  attention.head_dim = call.head_dim, attention.element = call.element, attention.scale = call.scale;
  attention.mode = k8b, attention.pv_accumulator = 32, attention.device = call.device;
  validate(attention, kernels_->build);
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
  sums_ = arena.add(most_blocks_ * (key_rows_ / kScoreKeys) * score_step_bytes(channels_));
  workspace_bytes_ = arena.bytes();
}

void BlockScorePlan::run(uint64_t q, uint64_t k, uint64_t scores, uint64_t workspace, uint64_t stream) const {
  require_address("q", q);
  require_address("k", k);
  require_address("scores", scores);
  require_address("workspace", workspace);
  const driver::ContextGuard guard(driver::primary_context(call_.device));
  const std::string element = element_name(call_.element);
  const auto pools = [&](uint64_t tokens, const TensorStrides& strides, int64_t heads, int64_t length, int64_t rows,
                         int64_t to, float factor, bool centered) {
    PoolParams params{};
    params.tokens = {pointer<void>(tokens), strides.batch, strides.head, strides.token};
    params.center = centered ? pointer<float>(workspace, center_) : nullptr;
    params.pools = pointer<void>(workspace, to);
    params.heads = static_cast<int>(heads);
    params.length = static_cast<int>(length);
    params.head_dim = call_.head_dim;
    params.channels = channels_;
    params.pool_rows = static_cast<int>(rows);
    params.factor = factor;
    const int64_t bh = call_.batch * heads;
    if (centered)
      enqueue(kernels_->images, "token_pools", "pool_center_" + element, grid(bh), kPoolThreads, 0, stream, params);
    const int64_t blocks = ceil_div(rows, kPoolThreads / (channels_ / 8));
    enqueue(kernels_->images, "token_pools", "pool_tokens_" + element, grid(bh * blocks), kPoolThreads, 0, stream,
            params);
  };
  pools(k, call_.k, call_.kv_heads, call_.kv_length, key_rows_, key_pools_, 1.f, true);
  pools(q, call_.q, call_.q_heads, call_.q_length, query_rows_, query_pools_, call_.scale * kLog2E, false);

  BlockScoreParams params{};
  params.query_pools = pointer<void>(workspace, query_pools_);
  params.key_pools = pointer<void>(workspace, key_pools_);
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
  enqueue(kernels_->images, "block_scores", "block_scores_d" + std::to_string(channels_),
          grid(std::min(most_blocks_, resident)), kScoreThreads, score_shared_bytes(channels_), stream, params);
}

void make_block_lists(const BlockListCall& call, const driver::Images& images, uint64_t scores, uint64_t threshold,
                      uint64_t always, uint64_t dense, uint64_t lists, uint64_t stream) {
  require_between("batch", call.batch, 1, kMaxInt);
  require_between("heads", call.heads, 1, kMaxInt);
  require_between("query_blocks", call.query_blocks, 1, kMaxInt);
  require_between("key_blocks", call.key_blocks, 1, kMaxListTiles);
  require_between("batch * heads", call.batch * call.heads, 1, kMaxInt);
  require_between("batch * heads * query_blocks", call.batch * call.heads * call.query_blocks, 1,
                  kMaxInt - kListsPerBlock);
  require_between("count", call.count, threshold == 0 ? 1 : 0, threshold == 0 ? call.key_blocks : 0);
  require_address("scores", scores);
  require_address("lists", lists);
  BlockListParams params{};
  params.scores = pointer<const float>(scores);
  params.threshold = pointer<const float>(threshold);
  params.always = pointer<const unsigned char>(always);
  params.dense = pointer<const unsigned char>(dense);
  params.lists = pointer<short>(lists);
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
