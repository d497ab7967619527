// The shared memory of an attention block: the stages of its pipelines and their mbarriers.
#pragma once

#include "sm90/tiles.h"

namespace sm90 {

// Shared-memory addresses.
template <class Traits>
struct SharedStorage {
  unsigned base;

  __device__ __forceinline__ unsigned q(int i) const { return base + i * Traits::kQBytes; }
  __device__ __forceinline__ unsigned k(int i) const { return base + Traits::kKOffset + i * Traits::kKBytes; }
  __device__ __forceinline__ unsigned v(int i) const { return base + Traits::kVOffset + i * Traits::VTile::kBytes; }
  __device__ __forceinline__ unsigned k_scale(int i) const {
    return base + Traits::kScaleOffset + i * Traits::kScaleBytes;
  }
  __device__ __forceinline__ unsigned q_scale(int i) const {
    return base + Traits::kFactorOffset + i * Traits::kFactorBytes;
  }
  __device__ __forceinline__ unsigned v_scale(int i) const { return q_scale(i) + 4 * kBlockM; }
  __device__ __forceinline__ unsigned v_mean(int i) const { return v_scale(i) + Traits::kChannelBytes; }
  __device__ __forceinline__ unsigned barrier(int i) const { return base + Traits::kBarrierOffset + 8 * i; }
  __device__ __forceinline__ unsigned q_full(int i) const { return barrier(i); }
  __device__ __forceinline__ unsigned q_empty(int i) const { return barrier(kQBuffers + i); }
  __device__ __forceinline__ unsigned full(int i) const { return barrier(2 * kQBuffers + i); }
  __device__ __forceinline__ unsigned empty(int i) const { return barrier(2 * kQBuffers + Traits::kStages + i); }
  // With a fused prologue: Q as the caller has it.
  __device__ __forceinline__ unsigned elements() const { return base + Traits::kElementOffset; }
  __device__ __forceinline__ unsigned elements_full() const { return base + Traits::kElementBarrierOffset; }
  __device__ __forceinline__ unsigned elements_empty() const { return elements_full() + 8; }
  // Where the producer says at which key a padding mask ends.
  __device__ __forceinline__ unsigned key_end(int i) const { return base + Traits::kKeyEndOffset + 4 * i; }
  // With a block list.
  __device__ __forceinline__ unsigned work(int i) const { return base + Traits::kWorkOffset + i * Traits::kWorkBytes; }
  __device__ __forceinline__ unsigned key_tile(int i) const { return base + Traits::kKeyTileOffset + 4 * i; }
};

// The stage of the count-th use of a pipeline and the parity of its mbarrier's phase.
template <int kStages>
struct PipelineState {
  int index, phase;
  __device__ __forceinline__ explicit PipelineState(unsigned count)
      : index(count % kStages), phase(count / kStages % 2) {}
};

}  // namespace sm90
