// The selection of key blocks in Python.
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "binding.h"
#include "block_selection.h"
#include "common/constants.h"

namespace py = pybind11;

namespace {

using Strides = std::array<int64_t, 3>;  // of batch, head and token
TensorStrides strides_of(const Strides& strides) { return {strides[0], strides[1], strides[2]}; }

BlockScorePlan block_score_plan(std::shared_ptr<const Kernels> kernels, int64_t batch, int64_t q_heads,
                                int64_t kv_heads, int64_t q_length, int64_t kv_length, int head_dim, int element,
                                const Strides& q_strides, const Strides& k_strides, float scale, int device,
                                bool block_means) {
  return BlockScorePlan({strides_of(q_strides), strides_of(k_strides), batch, q_heads, kv_heads, q_length, kv_length,
                         head_dim, element, block_means, scale, device},
                        std::move(kernels));
}

PooledTailPlan pooled_tail_plan(std::shared_ptr<const Kernels> kernels, int64_t batch, int64_t q_heads,
                                int64_t kv_heads, int64_t q_length, int64_t kv_length, int head_dim, int element,
                                const Strides& q_strides, const Strides& k_strides, const Strides& v_strides,
                                const Strides& out_strides, const std::array<int64_t, 2>& list_strides, float scale,
                                int device) {
  return PooledTailPlan(
      {strides_of(q_strides), strides_of(k_strides), strides_of(v_strides), strides_of(out_strides), list_strides[0],
       list_strides[1], batch, q_heads, kv_heads, q_length, kv_length, head_dim, element, scale, device},
      std::move(kernels));
}

void run_tail(const PooledTailPlan& plan, uint64_t q, uint64_t k, uint64_t v, uint64_t out, uint64_t lse,
              uint64_t lists, uint64_t workspace, uint64_t stream) {
  plan.run({q, k, v, out, lse, lists, workspace}, stream);
}

void block_lists(const Kernels& kernels, int64_t batch, int64_t heads, int64_t query_blocks, int64_t key_blocks,
                 uint64_t stream, int device, uint64_t scores, uint64_t lists, int64_t count, uint64_t threshold,
                 uint64_t counts, uint64_t forced, uint64_t always, uint64_t dense, uint64_t active, uint64_t bits,
                 bool is_union) {
  make_block_lists({batch, heads, query_blocks, key_blocks, count, is_union, device}, kernels.images,
                   {scores, threshold, counts, forced, always, dense, active, lists, bits}, stream);
}

void row_sample(const Kernels& kernels, int64_t batch, int64_t heads, int head_dim, int element,
                const Strides& q_strides, int64_t heads_of_group, int64_t spread_rows, int64_t unlike,
                int64_t pools_of_part, int device, uint64_t q, uint64_t spread, uint64_t pools, uint64_t tokens,
                uint64_t rows, uint64_t stream) {
  sample_rows({strides_of(q_strides), batch, heads, head_dim, element, heads_of_group, spread_rows, unlike,
               pools_of_part, device},
              kernels.images, {q, spread, pools, tokens, rows}, stream);
}

template <class Params>
void set_counts(Params& params, const std::vector<int>& counts) {
  if (counts.size() > common::kMostCuts)
    throw std::invalid_argument("counts must be at most " + std::to_string(common::kMostCuts) + ", got " +
                                std::to_string(counts.size()));
  std::copy(counts.begin(), counts.end(), params.counts);
  params.cuts = static_cast<int>(counts.size());
}

void row_errors(const Kernels& kernels, int element, int head_dim, int q_heads, int group, int rows, int q_length,
                int kv_length, int first_head, int heads, const Strides& out_strides,
                const std::array<int64_t, 2>& last_strides, const Strides& q_strides, const std::vector<int>& counts,
                float popular, float scale, int mean_rows, int device, uint64_t outs, uint64_t last_outs, uint64_t lses,
                uint64_t last_lses, uint64_t q, uint64_t tokens, uint64_t scores, uint64_t always, uint64_t compared,
                uint64_t center, uint64_t key_means, uint64_t value_means, uint64_t forced, uint64_t totals,
                uint64_t norms, uint64_t stream) {
  common::RowParams params{};
  params.out_block_stride = out_strides[0];
  params.out_head_stride = out_strides[1];
  params.out_row_stride = out_strides[2];
  params.last_head_stride = last_strides[0];
  params.last_row_stride = last_strides[1];
  params.q = {nullptr, q_strides[0], q_strides[1], q_strides[2]};
  params.first_head = first_head;
  params.heads = heads;
  params.q_heads = q_heads;
  params.group = group;
  params.rows = rows;
  params.head_dim = head_dim;
  params.q_length = q_length;
  params.kv_length = kv_length;
  params.mean_rows = mean_rows;
  params.popular = popular;
  params.scale = scale * common::kLog2E;
  set_counts(params, counts);
  measure_rows(params, element, device, kernels.images,
               {outs, last_outs, lses, last_lses, q, tokens, scores, always, compared, center, key_means, value_means,
                forced, totals, norms},
               stream);
}

void chosen_cuts(const Kernels& kernels, int heads, int rows, int unlike, const std::vector<int>& counts, float bound,
                 float tail_cost, bool has_tail, int device, uint64_t norms, uint64_t compared_by_tail, uint64_t chosen,
                 uint64_t by_tail, uint64_t errors, uint64_t compared_errors, uint64_t stream) {
  common::CutParams params{};
  params.heads = heads;
  params.rows = rows;
  params.unlike = unlike;
  params.has_tail = has_tail;
  params.bound = bound;
  params.tail_cost = tail_cost;
  set_counts(params, counts);
  choose_cuts(params, device, kernels.images, {norms, compared_by_tail, chosen, by_tail, errors, compared_errors},
              stream);
}

}  // namespace

void bind_block_selection(py::module_& module, KernelsClass& kernels) {
  using namespace py::literals;
  const py::kw_only keywords;
  const py::call_guard<py::gil_scoped_release> without_gil;
  kernels
      .def("block_score_plan", &block_score_plan, keywords, "batch"_a, "q_heads"_a, "kv_heads"_a, "q_length"_a,
           "kv_length"_a, "head_dim"_a, "element"_a, "q_strides"_a, "k_strides"_a, "scale"_a, "device"_a,
           "block_means"_a = false,
           "Decide how scores of blocks are computed; strides are of batch, head and token, in elements. Needs no "
           "driver. ValueError for a call that these kernels cannot read.")
      .def("pooled_tail_plan", &pooled_tail_plan, keywords, "batch"_a, "q_heads"_a, "kv_heads"_a, "q_length"_a,
           "kv_length"_a, "head_dim"_a, "element"_a, "q_strides"_a, "k_strides"_a, "v_strides"_a, "out_strides"_a,
           "list_strides"_a, "scale"_a, "device"_a,
           "Decide how the tail of a call with block lists is added; strides as for block_score_plan, those of the "
           "lists of batch and head. Needs no driver. ValueError for a call that these kernels cannot read.")
      .def(
          "block_lists", &block_lists, keywords, "batch"_a, "heads"_a, "query_blocks"_a, "key_blocks"_a, "stream"_a,
          "device"_a, "scores"_a = 0, "lists"_a = 0, "count"_a = 0, "threshold"_a = 0, "counts"_a = 0, "forced"_a = 0,
          "always"_a = 0, "dense"_a = 0, "active"_a = 0, "bits"_a = 0, "is_union"_a = false, without_gil,
          "Enqueue the making of block lists or bits from scores: by a threshold of each head, or the `count` highest "
          "of each row, or as many as `counts` has of the head; or of lists from bits, `active`. Tensors are "
          "addresses, "
          "as csrc/common/block_selection.h has them. ValueError for sizes and addresses that do not fit, RuntimeError "
          "for a failure of the driver.")
      .def(
          "row_sample", &row_sample, keywords, "batch"_a, "heads"_a, "head_dim"_a, "element"_a, "q_strides"_a,
          "heads_of_group"_a, "spread_rows"_a, "unlike"_a, "pools_of_part"_a, "device"_a, "q"_a, "spread"_a, "pools"_a,
          "tokens"_a, "rows"_a, "stream"_a, without_gil,
          "Enqueue the choice of the rows on which errors are measured: SampleParams of csrc/common/block_selection.h.")
      .def("row_errors", &row_errors, keywords, "element"_a, "head_dim"_a, "q_heads"_a, "group"_a, "rows"_a,
           "q_length"_a, "kv_length"_a, "first_head"_a, "heads"_a, "out_strides"_a, "last_strides"_a, "q_strides"_a,
           "counts"_a, "popular"_a, "scale"_a, "mean_rows"_a, "device"_a, "outs"_a, "last_outs"_a, "lses"_a,
           "last_lses"_a, "q"_a, "tokens"_a, "scores"_a, "always"_a, "compared"_a, "center"_a, "key_means"_a,
           "value_means"_a, "forced"_a, "totals"_a, "norms"_a, "stream"_a, without_gil,
           "Enqueue the measurement of what rows of some heads lose: RowParams of csrc/common/block_selection.h.")
      .def("chosen_cuts", &chosen_cuts, keywords, "heads"_a, "rows"_a, "unlike"_a, "counts"_a, "bound"_a, "tail_cost"_a,
           "has_tail"_a, "device"_a, "norms"_a, "compared_by_tail"_a, "chosen"_a, "by_tail"_a, "errors"_a,
           "compared_errors"_a, "stream"_a, without_gil,
           "Enqueue the choice of how many blocks each head computes: CutParams of csrc/common/block_selection.h.");
  py::class_<BlockScorePlan>(module, "BlockScorePlan", py::module_local(),
                             "Scores of blocks of one call, made by `Kernels.block_score_plan`. Safe to run from "
                             "several threads.")
      .def_property_readonly("workspace_bytes", &BlockScorePlan::workspace_bytes,
                             "Bytes of scratch memory that a run needs.")
      .def(
          "run", &BlockScorePlan::run, "q"_a, "k"_a, "scores"_a, "workspace"_a, "stream"_a, without_gil,
          "Enqueue the kernels; all arguments are addresses, or the stream's handle. ValueError for an address that is "
          "0 or misplaced, RuntimeError for a failure of the driver.");
  py::class_<PooledTailPlan>(module, "PooledTailPlan", py::module_local(),
                             "The tail of one call, made by `Kernels.pooled_tail_plan`. Safe to run from several "
                             "threads.")
      .def_property_readonly("workspace_bytes", &PooledTailPlan::workspace_bytes,
                             "Bytes of scratch memory that a run needs.")
      .def_property_readonly("mean_rows", &PooledTailPlan::mean_rows, "Rows of each head of the means of K and V.")
      .def_property_readonly(
          "means_offsets",
          [](const PooledTailPlan& plan) {
            return std::array<int64_t, 3>{plan.center_offset(), plan.key_means_offset(), plan.value_means_offset()};
          },
          "Where `run_means` writes in the workspace: what it takes from K, the means of K and those of V.")
      .def("run_means", &PooledTailPlan::run_means, "k"_a, "v"_a, "workspace"_a, "stream"_a, without_gil,
           "Enqueue the kernels that make the means of K and V alone.")
      .def("run", &run_tail, "q"_a, "k"_a, "v"_a, "out"_a, "lse"_a, "lists"_a, "workspace"_a, "stream"_a, without_gil,
           "Enqueue the kernels, which correct out and lse in place; all arguments are addresses, or the stream's "
           "handle. ValueError for an address that is 0 or misplaced, RuntimeError for a failure of the driver.");
}
