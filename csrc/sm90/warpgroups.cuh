// The roles of a block's warpgroups, for attention kernels of all modes.
#pragma once

#include "sm90/pipeline_reader.cuh"
#include "sm90/producer.cuh"

namespace sm90 {

// Behind `begin_pipelines`: the first warpgroup produces, the others consume.
template <class Traits, class Consumer>
__device__ __forceinline__ void run_warpgroups(const AttentionParams& params, const SharedStorage<Traits>& storage) {
  __syncthreads();
  // A kernel with a fused prologue runs beside it: its producer waits for each head, and at the end for the prologue.
  if constexpr (!Traits::kFusedPrologue) griddepcontrol_wait();
  if constexpr (Traits::kDenseFallback != DenseFallback::never) {
    // `dead` says whether the block mask skips a block: then the block-list kernel works, else its dense fallback.
    const bool is_one_of_two = Traits::kDenseFallback == DenseFallback::always || params.dead;
    if (is_one_of_two && (*params.dead != 0) != Traits::kBlockList) return;
  }
  fence_proxy_async_global();
  if (threadIdx.x < 128) {
    warpgroup_reg_dealloc<Traits::kProducerRegisters>();
    if (threadIdx.x == 0) {
      Producer<Traits> producer{params, storage};
      producer.run();
    }
    if constexpr (Traits::kProducers == 2) {
      if (threadIdx.x == 32) Producer<Traits>{params, storage}.run_block_list_values();
    }
  } else {
    warpgroup_reg_alloc<Traits::kConsumerRegisters>();
    Consumer consumer(params, storage);
    consumer.run();
  }
}

}  // namespace sm90
