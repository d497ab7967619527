// The attention mask's terms of a step's scores, in units of log2, where it is the same for all queries (a padding
// mask): the warp reads them once.
#pragma once

#include "common/scores.cuh"
#include "sm90/tile_scheduler.cuh"

namespace sm90 {

constexpr int kTermsAtOnce = 4;  // keys of a thread whose terms are in registers together

// A thread's keys are 8j and 8j + 1 behind its first, `key_distance(i)` the i-th.
__device__ __forceinline__ constexpr int key_distance(int i) { return i / 2 * 8 + i % 2; }

// Where a head's mask is, in bytes.
struct HeadMask {
  const Mask& mask;
  const int element_bytes;
  const char* start;

  __device__ __forceinline__ HeadMask(const AttentionParams& params, const WorkTile& tile)
      : mask(params.mask),
        element_bytes(mask.element == kBool    ? 1
                      : mask.element == kFloat ? 4
                                               : 2) {
    const int batch = tile.head / params.q_heads, head = tile.head - batch * params.q_heads;
    start =
        static_cast<const char*>(mask.pointer) + (batch * mask.batch_stride + head * mask.head_stride) * element_bytes;
  }

  __device__ __forceinline__ i64 key_bytes() const { return mask.key_stride * element_bytes; }
};

// Of the element at an address, whose type is the second argument's.
template <class T>
__device__ __forceinline__ float term_at(const char* address, const T*) {
  return mask_term(*reinterpret_cast<const T*>(address));
}

// Of a mask for all queries. The warp's lanes hold the terms of a step's keys, two of each 64 keys a lane. With kEnds,
// keys that do not exist are masked; their scores have to be numbers then.
template <int kBlockN, bool kEnds = false>
class KeyTerms {
 public:
  // `first_key`: of the step.
  __device__ __forceinline__ KeyTerms(const AttentionParams& params, const WorkTile& tile, int first_key) {
    const HeadMask head_mask(params, tile);
    visit_mask(head_mask.mask, [&](const auto* type) {
#pragma unroll
      for (int i = 0; i < kBlockN / 32; ++i) {
        const int key = first_key + i / 2 * 64 + 2 * (threadIdx.x % 32) + i % 2;
        terms_[i] = term_at(head_mask.start + min(key, params.kv_length - 1) * head_mask.key_bytes(), type);
        if (kEnds && key >= params.kv_length) terms_[i] = kNegativeInfinity;
      }
    });
  }

  template <bool kLimited>
  __device__ __forceinline__ void load(int first, float (&terms)[2][kTermsAtOnce]) const {
#pragma unroll
    for (int i = 0; i < kTermsAtOnce; ++i) {
      const int pair = (first + i) / 2;
      terms[0][i] = terms[1][i] =
          __shfl_sync(0xffffffffu, terms_[pair / 8 * 2 + i % 2], pair % 8 * 4 + threadIdx.x % 4);
    }
  }

 private:
  float terms_[kBlockN / 32];
};

}  // namespace sm90
