// The attention mask's terms of a step's scores in the precise mode. A mask for all queries is in KeyTerms; few
// registers hold the terms of one that differs from row to row.
#pragma once

#include "sm90/key_terms.cuh"

namespace sm90 {

// `load` gives the terms of a thread's keys from the i-th on, in its two rows. With kLimited, some of the step's keys
// may not exist: their terms may be anything.
struct NoTerms {
  template <bool kLimited>
  __device__ __forceinline__ void load(int, float (&terms)[2][kTermsAtOnce]) const {
#pragma unroll
    for (int i = 0; i < kTermsAtOnce; ++i) terms[0][i] = terms[1][i] = 0.f;
  }
};

// Of a mask with rows of its own for the queries. The branch for the element type keeps a group's terms apart from the
// next ones: all at once need too many registers.
class RowTerms {
 public:
  // `first_key`: of the thread.
  __device__ __forceinline__ RowTerms(const AttentionParams& params, const WorkTile& tile, int row, int first_key)
      : mask_(params, tile), last_(params.kv_length - 1 - first_key) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int query = min(tile.first_row + row + 8 * i, params.q_length - 1);
      first_[i] = mask_.start + (query * mask_.mask.query_stride * mask_.element_bytes + first_key * mask_.key_bytes());
    }
  }

  template <bool kLimited>
  __device__ __forceinline__ void load(int first, float (&terms)[2][kTermsAtOnce]) const {
    visit_mask(mask_.mask, [&](const auto* type) {
#pragma unroll
      for (int i = 0; i < kTermsAtOnce; ++i) {
        const i64 place =
            (kLimited ? min(key_distance(first + i), last_) : key_distance(first + i)) * mask_.key_bytes();
#pragma unroll
        for (int row = 0; row < 2; ++row) terms[row][i] = term_at(first_[row] + place, type);
      }
    });
  }

 private:
  const HeadMask mask_;
  const int last_;
  const char* first_[2];
};

}  // namespace sm90
