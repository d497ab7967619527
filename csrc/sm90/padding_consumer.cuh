// A consumer warpgroup of kernels with a fused prologue that skip the keys behind the end of a padding mask.
#pragma once

#include "sm90/consumer.cuh"

namespace sm90 {

// Work tiles whose mask only ends the keys take the steps of a call without a mask; the others take the steps with
// terms. One loop with one kind of steps is slower, because ptxas orders those steps worse.
template <class Traits>
class PaddingConsumer {
 public:
  __device__ __forceinline__ PaddingConsumer(const AttentionParams& params, const SharedStorage<Traits>& storage)
      : pipeline_{params, storage} {}

  __device__ __forceinline__ void run() {
    const int places = places_of_work<Traits>(pipeline_.params);
    for (int place = blockIdx.x; place < places; place = next_place<Traits>(pipeline_.params, place)) {
      WorkTile tile = work_tile_at<Traits>(pipeline_.params, place);
      tile.template end_keys_at<Traits>(ld_shared_u32(pipeline_.storage.key_end(pipeline_.wait_for_q())));
      if (tile.key_end != 0)
        run_tile<false>(tile);
      else
        run_tile<true>(tile);
    }
  }

 private:
  template <bool kHasBias>
  __device__ __forceinline__ void run_tile(const WorkTile& tile) {
    Consumer<Traits, kHasBias> consumer(pipeline_.params, pipeline_.storage);
    consumer.tiles = pipeline_.tiles;
    consumer.steps = pipeline_.steps;
    consumer.run_tile(tile);
    pipeline_.tiles = consumer.tiles;
    pipeline_.steps = consumer.steps;
  }

  PipelineReader<Traits> pipeline_;
};

}  // namespace sm90
