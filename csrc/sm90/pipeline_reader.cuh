// The consumers' side of the pipelines, for attention kernels of all modes: what a consumer warpgroup reads beside Q
// and a stage's tiles, and how it gives both back.
#pragma once

#include "sm90/key_list.cuh"
#include "sm90/ptx.cuh"
#include "sm90/shared_storage.cuh"
#include "sm90/tile_scheduler.cuh"

namespace sm90 {

template <class Traits>
struct PipelineReader {
  static constexpr int kScales = Traits::kBlockN / kScaleBlock;

  const AttentionParams& params;
  const SharedStorage<Traits>& storage;
  unsigned tiles = 0, steps = 0;  // work tiles and stages that are behind this thread

  // Waits for Q of the next work tile. Returns its buffer.
  __device__ __forceinline__ int wait_for_q() const {
    const PipelineState<kQBuffers> q(tiles);
    mbarrier_wait(storage.q_full(q.index), q.phase);
    return q.index;
  }

  // Waits for the next stage, which the next call of `take_stage` gives.
  __device__ __forceinline__ void wait_for_stage() const {
    const PipelineState<Traits::kStages> stage(steps);
    mbarrier_wait(storage.full(stage.index), stage.phase);
  }
  __device__ __forceinline__ int take_stage() { return steps++ % Traits::kStages; }

  // The first lanes of each warp arrive, as many as the mbarrier counts.
  template <int kArrivals>
  __device__ __forceinline__ void release(unsigned empty_barrier) const {
    constexpr int kLanes = kArrivals / Traits::kConsumerWarps;
    if (kLanes >= 32 || threadIdx.x % 32 < kLanes) mbarrier_arrive(empty_barrier);
  }
  __device__ __forceinline__ void release_stage(int stage) const { release<Traits::kArrivals>(storage.empty(stage)); }
  __device__ __forceinline__ void release_q(int buffer) const { release<Traits::kQArrivals>(storage.q_empty(buffer)); }

  // The key tile in a stage. Block-list kernels read it there; the others know it.
  __device__ __forceinline__ int key_tile_of(int stage, int known) const {
    if constexpr (Traits::kBlockList)
      return ld_shared_s32_by_lane_0(storage.key_tile(stage));
    else
      return known;
  }

  // The K scales of the thread's columns; `lane` is its place in the quad. In the precise mode the lanes that say that
  // the stage is free read them for all. `lane` is a reference, because with a value the compiler forms other
  // addresses.
  __device__ __forceinline__ void load_k_scale(int stage, const int& lane, float (&k_scale)[kScales]) const {
#pragma unroll
    for (int i = 0; i < kScales; ++i) {
      if constexpr (Traits::kPrecise) {
        const int reader = threadIdx.x % 32;
        float scale = 0.f;
        if (reader < kScalesPerBlock) scale = ld_shared(storage.k_scale(stage) + 4 * (i * kScalesPerBlock + reader));
        k_scale[i] = __shfl_sync(0xffffffffu, scale, lane);
      } else {
        k_scale[i] = ld_shared(storage.k_scale(stage) + 4 * (i * kScalesPerBlock + lane));
      }
    }
  }

  // Whether a score of these blocks has an additive term, the same in all threads of a warpgroup: a K scale is negative
  // where the mask may change a score of its block, and smooth Q changes all.
  __device__ __forceinline__ bool is_biased(const float (&k_scale)[kScales]) const {
    bool biased = !Traits::kPrecise && !Traits::kFewKeys && params.delta_s != nullptr;
#pragma unroll
    for (int i = 0; i < kScales; ++i) biased |= __float_as_int(k_scale[i]) < 0;
    return __any_sync(0xffffffffu, biased);
  }

  // Calls `visit(place, work tile)` for each work tile of the block. A place is what `work_tile_at` takes, with a block
  // list the index of the work tile.
  template <class Visitor>
  __device__ __forceinline__ void for_each_work_tile(const Visitor& visit) const {
    if constexpr (Traits::kBlockList) {
      for (int2 work = wait_for_work(); work.x != kNoWork; work = wait_for_work()) visit(work.x, block_list_tile(work));
    } else {
      const int places = places_of_work<Traits>(params);
      for (int place = blockIdx.x; place < places; place = next_place<Traits>(params, place))
        visit(place, work_tile_at<Traits>(params, place));
    }
  }

  // With a block list: index and number of key tiles of the work tile whose Q comes next; without an index there is
  // none.
  __device__ __forceinline__ int2 wait_for_work() const {
    const unsigned work = storage.work(wait_for_q());
    return Traits::kPrecise ? ld_shared_v2_s32_by_lane_0(work) : ld_shared_v2_s32(work);
  }
  __device__ __forceinline__ WorkTile block_list_tile(int2 work) const {
    WorkTile tile = WorkTile::decode<Traits>(params, work.x);
    tile.key_tiles = work.y;
    return tile;
  }
};

}  // namespace sm90
