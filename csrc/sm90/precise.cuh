// Attention of the precise mode for Hopper: int8 scores, P and V in fp16 or bf16, FP32 accumulators. One producer
// warpgroup streams tiles, the consumer warpgroups own 64 query rows each. The block stays on its multiprocessor and
// walks over work tiles, heads outermost so that K and V stay in L2.
#pragma once

#include "sm90/precise_consumer.cuh"
#include "sm90/producer.cuh"

namespace sm90 {

template <class Shape, class T, bool kCausal, bool kBiased>
__device__ __forceinline__ void precise_kernel(const AttentionParams& params) {
  extern __shared__ unsigned char shared[];
  const SharedStorage<Shape> storage{(shared_address(shared) + Shape::kAlignment - 1) & ~(Shape::kAlignment - 1u)};
  if (threadIdx.x == 0) begin_pipelines(params, storage);
  __syncthreads();
  griddepcontrol_wait();
  fence_proxy_async_global();
  if (threadIdx.x < 128) {
    warpgroup_reg_dealloc<Shape::kProducerRegisters>();
    if (threadIdx.x == 0) {
      Producer<Shape, kCausal> producer{params, storage};
      if constexpr (Shape::kListed)
        producer.run_listed();
      else
        producer.run();
    }
  } else {
    warpgroup_reg_alloc<Shape::kConsumerRegisters>();
    PreciseConsumer<Shape, T, kCausal, kBiased> consumer(params, storage);
    if constexpr (Shape::kListed)
      consumer.run_listed();
    else
      consumer.run();
  }
}

}  // namespace sm90
