// The roles of a block's warpgroups, for attention kernels of all modes.
#pragma once

#include "sm90/producer.cuh"

namespace sm90 {

template <class Shape, class Role>
__device__ __forceinline__ void run_role(Role& role) {
  if constexpr (Shape::kListed)
    role.run_listed();
  else
    role.run();
}

// Behind `begin_pipelines`: the first warpgroup produces, the others consume.
template <class Shape, bool kCausal, class Consumer>
__device__ __forceinline__ void run_warpgroups(const AttentionParams& params, const SharedStorage<Shape>& storage) {
  __syncthreads();
  // A kernel that quantizes Q runs beside the one pass: its producer waits for each head, and at the end for the pass.
  if constexpr (!Shape::kQuantizesQ) griddepcontrol_wait();
  if constexpr (Shape::kOneOfTwo != OneOfTwo::never) {
    const bool is_one_of_two = Shape::kOneOfTwo == OneOfTwo::all || params.dead;
    if (is_one_of_two && (*params.dead != 0) != Shape::kListed) return;  // the call is the other kernel's
  }
  fence_proxy_async_global();
  if (threadIdx.x < 128) {
    warpgroup_reg_dealloc<Shape::kProducerRegisters>();
    if (threadIdx.x == 0) {
      Producer<Shape, kCausal> producer{params, storage};
      run_role<Shape>(producer);
    }
    if constexpr (Shape::kProducers == 2) {
      if (threadIdx.x == 32) Producer<Shape, kCausal>{params, storage}.run_listed_values();
    }
  } else {
    warpgroup_reg_alloc<Shape::kConsumerRegisters>();
    Consumer consumer(params, storage);
    run_role<Shape>(consumer);
  }
}

}  // namespace sm90
