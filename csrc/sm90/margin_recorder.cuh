// Records the block score margins of a work tile, in the kernels of Variant::block_margins.
#pragma once

#include "common/block_margins.cuh"
#include "sm90/tile_scheduler.cuh"

namespace sm90 {

template <bool kTracksMargins>
class MarginRecorder;

template <>
class MarginRecorder<false> {
 public:
  __device__ __forceinline__ void begin(const AttentionParams&, const WorkTile&, int) {}
};

template <>
class MarginRecorder<true> {
 public:
  // `row`: of the work tile; the thread also holds the row 8 further.
  __device__ __forceinline__ void begin(const AttentionParams& params, const WorkTile& tile, int row) {
    const int query = tile.first_row + row;
    margins_ = margins_of_queries(params.gaps, tile.head, query, params.q_length, params.kv_length);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      exists_[i] = query + 8 * i < params.q_length;
      maximum_[i] = kNegativeInfinity;
    }
  }

  // `first_key`: of the step. `largest`: of this thread's scores in it, and `maximum` that of their rows so far.
  __device__ __forceinline__ void record(int first_key, const float (&largest)[2], const float (&maximum)[2]) const {
    raise_margin(margins_ + first_key / kListTile, fmaxf(margin_of_row(largest[0], maximum[0], exists_[0]),
                                                         margin_of_row(largest[1], maximum[1], exists_[1])));
  }
  // The same for a softmax that does not keep these maxima.
  __device__ __forceinline__ void record(int first_key, const float (&largest)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) maximum_[i] = fmaxf(maximum_[i], quad_max(largest[i]));
    record(first_key, largest, maximum_);
  }

 private:
  float* margins_;
  bool exists_[2];
  float maximum_[2];  // of the rows' scores so far
};

}  // namespace sm90
