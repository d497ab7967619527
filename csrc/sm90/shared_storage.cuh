// The shared memory of an attention block: the stages of its pipelines and their mbarriers.
#pragma once

#include "sm90/tiles.h"

namespace sm90 {

// Shared-memory addresses.
template <class Shape>
struct SharedStorage {
  unsigned base;

  __device__ __forceinline__ unsigned q(int i) const { return base + i * Shape::kQBytes; }
  __device__ __forceinline__ unsigned k(int i) const { return base + Shape::kKOffset + i * Shape::kKBytes; }
  __device__ __forceinline__ unsigned v(int i) const { return base + Shape::kVOffset + i * Shape::kVBytes; }
  __device__ __forceinline__ unsigned k_scale(int i) const {
    return base + Shape::kScaleOffset + i * Shape::kScaleBytes;
  }
  __device__ __forceinline__ unsigned q_scale(int i) const {
    return base + Shape::kFactorOffset + i * Shape::kFactorBytes;
  }
  __device__ __forceinline__ unsigned v_scale(int i) const { return q_scale(i) + 4 * kBlockM; }
  __device__ __forceinline__ unsigned v_mean(int i) const { return v_scale(i) + Shape::kChannelBytes; }
  __device__ __forceinline__ unsigned barrier(int i) const { return base + Shape::kBarrierOffset + 8 * i; }
  __device__ __forceinline__ unsigned q_full(int i) const { return barrier(i); }
  __device__ __forceinline__ unsigned q_empty(int i) const { return barrier(kQBuffers + i); }
  __device__ __forceinline__ unsigned full(int i) const { return barrier(2 * kQBuffers + i); }
  __device__ __forceinline__ unsigned empty(int i) const { return barrier(2 * kQBuffers + Shape::kStages + i); }
  // Of a QuantizingShape: Q as it is.
  __device__ __forceinline__ unsigned elements() const { return base + Shape::kElementOffset; }
  __device__ __forceinline__ unsigned elements_full() const { return base + Shape::kElementBarrierOffset; }
  __device__ __forceinline__ unsigned elements_empty() const { return elements_full() + 8; }
  // Of a PaddingShape.
  __device__ __forceinline__ unsigned key_end(int i) const { return base + Shape::kKeyEndOffset + 4 * i; }
  // Of a ListedShape.
  __device__ __forceinline__ unsigned work(int i) const { return base + Shape::kWorkOffset + i * Shape::kWorkBytes; }
  __device__ __forceinline__ unsigned key_tile(int i) const { return base + Shape::kKeyTileOffset + 4 * i; }
};

// The stage of the count-th use of a pipeline and the parity of its mbarrier's phase.
template <int kStages>
struct PipelineState {
  int index, phase;
  __device__ __forceinline__ explicit PipelineState(unsigned count)
      : index(count % kStages), phase(count / kStages % 2) {}
};

}  // namespace sm90
