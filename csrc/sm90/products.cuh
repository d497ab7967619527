// The two matrix products of a step, for one consumer warpgroup: int8 scores, and values in E4M3. Addresses are those
// of shared memory.
#pragma once

#include "sm90/tiles.h"
#include "sm90/wgmma.cuh"

namespace sm90 {

// S = Q K^T of 64 queries and the keys of a step.
template <class Traits>
__device__ __forceinline__ void issue_score_product(int (&scores)[Traits::kBlockN / 2], unsigned q_address,
                                                    unsigned k_address) {
  const u64 q = matrix_descriptor<Traits::kRowBytes>(q_address);
  const u64 k = matrix_descriptor<Traits::kRowBytes>(k_address);
  constexpr int kStepsPerBox = Traits::kRowBytes / 32;
#pragma unroll
  for (int step = 0; step < Traits::kHeadDim / 32; ++step) {
    const int box = step / kStepsPerBox, within = (step % kStepsPerBox) * 2;
    WgmmaS8<Traits::kBlockN>::issue(scores, q + box * (Traits::kBlockM * Traits::kRowBytes / 16) + within,
                                    k + box * (Traits::kBlockN * Traits::kRowBytes / 16) + within, step > 0);
  }
  wgmma_commit_group();
}

// P V for kColumns rows of V^T. `p`: as pack_probabilities gives it.
template <class Traits, int kColumns>
__device__ __forceinline__ void issue_value_product(float (&result)[kColumns / 2],
                                                    const unsigned (&p)[Traits::kBlockN / 32][4], unsigned v_address) {
  constexpr int kStepsPerBox = Traits::VTile::kRowBytes / 32;
  const u64 v = matrix_descriptor<Traits::VTile::kRowBytes>(v_address);
#pragma unroll
  for (int step = 0; step < Traits::kBlockN / 32; ++step) {
    const int box = step / kStepsPerBox, within = (step % kStepsPerBox) * 2;
    WgmmaE4m3<kColumns>::issue(result, p[step],
                               v + box * (Traits::VTile::kRows * Traits::VTile::kRowBytes / 16) + within, step > 0);
  }
  wgmma_commit_group();
}

// The second level: O = O * rescale + P V in FP32 (paper section 3.4).
template <int kCount>
__device__ __forceinline__ void accumulate(float (&total)[kCount], const float (&part)[kCount],
                                           const float (&rescale)[2]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) total[i] = fmaf(total[i], rescale[(i / 2) % 2], part[i]);
}

}  // namespace sm90
