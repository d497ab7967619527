// The selection of key blocks in Python.
#include <pybind11/stl.h>

#include <array>
#include <cstdint>
#include <memory>
#include <utility>

#include "binding.h"
#include "block_selection.h"

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
                 uint64_t scores, uint64_t lists, uint64_t stream, int device, int64_t count, uint64_t threshold,
                 uint64_t always, uint64_t dense, bool is_union) {
  make_block_lists({batch, heads, query_blocks, key_blocks, count, is_union, device}, kernels.images, scores, threshold,
                   always, dense, lists, stream);
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
      .def("block_lists", &block_lists, keywords, "batch"_a, "heads"_a, "query_blocks"_a, "key_blocks"_a, "scores"_a,
           "lists"_a, "stream"_a, "device"_a, "count"_a = 0, "threshold"_a = 0, "always"_a = 0, "dense"_a = 0,
           "is_union"_a = false, without_gil,
           "Enqueue the making of block lists from scores: by a threshold of each head, or the `count` highest of each "
           "row. Tensors are addresses, as csrc/common/block_selection.h has them. ValueError for sizes and addresses "
           "that do not fit, RuntimeError for a failure of the driver.");
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
      .def("run", &run_tail, "q"_a, "k"_a, "v"_a, "out"_a, "lse"_a, "lists"_a, "workspace"_a, "stream"_a, without_gil,
           "Enqueue the kernels, which correct out and lse in place; all arguments are addresses, or the stream's "
           "handle. ValueError for an address that is 0 or misplaced, RuntimeError for a failure of the driver.");
}
