// A consumer warpgroup of kernels that leave out what a padding mask hides.
#pragma once

#include "sm90/consumer.cuh"

namespace sm90 {

// Work tiles whose mask does nothing but end the keys have the steps of a call without a mask; the others those with
// terms. In one loop over work tiles with one kind of steps, ptxas's order of these is worse.
template <class Traits>
class PaddingConsumer {
 public:
  __device__ __forceinline__ PaddingConsumer(const AttentionParams& params, const SharedStorage<Traits>& storage)
      : params_(params), storage_(storage) {}

  __device__ __forceinline__ void run() {
    const int places = places_of_work<Traits>(params_);
    for (int place = blockIdx.x; place < places; place = next_place<Traits>(params_, place)) {
      WorkTile tile = work_tile_at<Traits>(params_, place);
      const PipelineState<kQBuffers> q(tiles_);
      mbarrier_wait(storage_.q_full(q.index), q.phase);
      tile.end_keys_at<Traits>(ld_shared_u32(storage_.key_end(q.index)));
      if (tile.key_end != 0)
        run_tile<false>(tile);
      else
        run_tile<true>(tile);
    }
  }

 private:
  template <bool kHasBias>
  __device__ __forceinline__ void run_tile(const WorkTile& tile) {
    Consumer<Traits, kHasBias> consumer(params_, storage_);
    consumer.tiles = tiles_;
    consumer.steps = steps_;
    consumer.run_tile(tile);
    tiles_ = consumer.tiles;
    steps_ = consumer.steps;
  }

  const AttentionParams& params_;
  const SharedStorage<Traits>& storage_;
  unsigned tiles_ = 0, steps_ = 0;  // work tiles and stages that are behind this thread
};

}  // namespace sm90
