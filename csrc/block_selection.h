// Selection of key blocks, as launches of its own: scores of blocks from Q and K, block lists from scores, and the tail
// for what the lists leave out.
#pragma once

#include <cstdint>
#include <memory>

#include "attention_call.h"
#include "common/block_selection.h"
#include "kernels.h"

// A call that scores of blocks are wanted of. A causal order, masks and whatever else it has play no part.
struct BlockScoreSignature {
  TensorStrides q, k;
  int64_t batch, q_heads, kv_heads, q_length, kv_length;
  int head_dim, element;  // as CallSignature has them
  bool block_means;       // the mean of a key block stands for its tokens, not the sub-pools'
  float scale;
  int device;
};

// How the scores of one signature are computed. Safe to use from several threads at once.
class BlockScorePlan {
 public:
  // Needs no driver. Throws std::invalid_argument for a call that the kernels cannot read.
  BlockScorePlan(const BlockScoreSignature& call, std::shared_ptr<const Kernels> kernels);

  // Scratch memory that a run needs.
  int64_t workspace_bytes() const { return workspace_bytes_; }

  // Enqueues the kernels. `scores`: float (batch, q_heads, blocks of queries, of keys). Throws std::invalid_argument
  // for an address that is 0 or misplaced, and std::runtime_error for a failure of the driver.
  void run(uint64_t q, uint64_t k, uint64_t scores, uint64_t workspace, uint64_t stream) const;

 private:
  BlockScoreSignature call_;
  std::shared_ptr<const Kernels> kernels_;
  int channels_;
  int64_t query_rows_, key_rows_;  // sub-pools, with those that fill the last tile
  int64_t works_, most_blocks_;
  // Offsets in bytes.
  int64_t center_, query_pools_, key_pools_, block_means_, sums_;
  int64_t workspace_bytes_;
};

// Block lists and bits from scores of blocks, or lists from bits; common/block_selection.h says what the tensors hold.
struct BlockListCall {
  int64_t batch, heads, query_blocks, key_blocks;
  int64_t count;  // of the highest scores of a row; 0: by the threshold or the counts
  bool is_union;  // one list for the whole batch
  int device;
};

// 0 where one is not given.
struct BlockListOperands {
  uint64_t scores, threshold, counts, forced, always, dense, active, lists, bits;
};

// Enqueues the kernel. Throws std::invalid_argument for sizes or addresses that do not fit, and std::runtime_error for
// a failure of the driver.
void make_block_lists(const BlockListCall& call, const driver::Images& images, const BlockListOperands& operands,
                      uint64_t stream);

// Rows of each head on which its error is measured, as SampleParams has them.
struct RowSampleCall {
  TensorStrides q;
  int64_t batch, heads;
  int head_dim, element;
  int64_t heads_of_group, spread_rows, unlike, pools_of_part;
  int device;
};
struct RowSampleOperands {
  uint64_t q, spread, pools, tokens, rows;
};

// The kernels of a choice throw as make_block_lists does.
void sample_rows(const RowSampleCall& call, const driver::Images& images, const RowSampleOperands& operands,
                 uint64_t stream);

// What these rows of some heads lose, as RowParams has it; `params` is complete but for its pointers.
struct RowErrorOperands {
  uint64_t outs, last_outs, lses, last_lses, q, tokens, scores, always, compared, center, key_means, value_means;
  uint64_t forced, totals, norms;
};
void measure_rows(common::RowParams params, int element, int device, const driver::Images& images,
                  const RowErrorOperands& operands, uint64_t stream);

struct CutOperands {
  uint64_t norms, compared_by_tail, chosen, by_tail, errors, compared_errors;
};
void choose_cuts(common::CutParams params, int device, const driver::Images& images, const CutOperands& operands,
                 uint64_t stream);

// A call with block lists whose output a tail is added to.
struct PooledTailSignature {
  TensorStrides q, k, v, out;
  int64_t list_batch_stride, list_head_stride;  // as BlockMaskLayout has them
  int64_t batch, q_heads, kv_heads, q_length, kv_length;
  int head_dim, element;
  float scale;
  int device;
};

// The addresses that a run takes.
struct PooledTailOperands {
  uint64_t q, k, v, out, lse, lists, workspace;
};

// How the tail of one signature is added. Safe to use from several threads at once.
class PooledTailPlan {
 public:
  // Needs no driver. Throws std::invalid_argument for a call that the kernels cannot read.
  PooledTailPlan(const PooledTailSignature& call, std::shared_ptr<const Kernels> kernels);

  // Scratch memory that a run needs.
  int64_t workspace_bytes() const { return workspace_bytes_; }

  // Enqueues the kernels, which correct out and lse in place. Throws as BlockScorePlan::run.
  void run(const PooledTailOperands& operands, uint64_t stream) const;

  // Enqueues those that write the means of K and V and what was taken from K's to the workspace, at these offsets.
  void run_means(uint64_t k, uint64_t v, uint64_t workspace, uint64_t stream) const;
  int64_t center_offset() const { return center_; }
  int64_t key_means_offset() const { return key_means_; }
  int64_t value_means_offset() const { return value_means_; }
  int64_t mean_rows() const { return mean_rows_; }

 private:
  PooledTailSignature call_;
  std::shared_ptr<const Kernels> kernels_;
  int channels_;
  int64_t key_blocks_, key_rows_, mean_rows_, works_;
  // Offsets in bytes.
  int64_t center_, pools_, key_means_, value_means_;
  int64_t workspace_bytes_;
};
