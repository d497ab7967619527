// The producer warpgroup of the precise mode: one thread streams int8 Q and K tiles and V's tiles with TMA, V's from
// the caller's tensor as it is.
#pragma once

#include "sm90/precise_tiles.h"
#include "sm90/ptx.cuh"
#include "sm90/shared_storage.cuh"
#include "sm90/tile_scheduler.cuh"

namespace sm90 {

// Stages as those of `Producer`: K of one step with V of the step before.
template <class Shape, bool kCausal>
struct PreciseProducer {
  const AttentionParams& params;
  const SharedStorage<Shape>& storage;
  unsigned tiles = 0, steps = 0;

  __device__ __forceinline__ void load_q(const WorkTile& tile) {
    const PipelineState<kQBuffers> state(tiles++);
    const unsigned full = storage.q_full(state.index);
    mbarrier_wait(storage.q_empty(state.index), state.phase ^ 1);
    arrive_and_expect_tx(full, Shape::kQBytes + Shape::kFactorBytes);
    bulk_copy_g2s(storage.q_scale(state.index), params.q_scale + i64(tile.head) * params.q_scale_rows + tile.first_row,
                  Shape::kFactorBytes, full);
#pragma unroll
    for (int box = 0; box < Shape::kColumnBoxes; ++box)
      tma_load_3d(storage.q(state.index) + box * Shape::kBlockM * Shape::kRowBytes, &params.q_map, full,
                  box * Shape::kRowBytes, tile.first_row, tile.head);
  }

  __device__ __forceinline__ void load_k(const WorkTile& tile, int key_tile, int stage) {
    const unsigned full = storage.full(stage);
    const i64 block = i64(tile.kv_head) * params.k_scale_blocks + key_tile * (Shape::kBlockN / kScaleBlock);
    bulk_copy_g2s(storage.k_scale(stage), params.k_scale + block * kScalesPerBlock, Shape::kScaleBytes, full);
#pragma unroll
    for (int box = 0; box < Shape::kColumnBoxes; ++box)
      tma_load_3d(storage.k(stage) + box * Shape::kBlockN * Shape::kRowBytes, &params.k_map, full,
                  box * Shape::kRowBytes, key_tile * Shape::kBlockN, tile.kv_head);
  }

  __device__ __forceinline__ void load_v(const WorkTile& tile, int key_tile, int stage) {
    const int batch = tile.kv_head / params.kv_heads, head = tile.kv_head - batch * params.kv_heads;
#pragma unroll
    for (int box = 0; box < Shape::kValueBoxes; ++box)
      tma_load_4d(storage.v(stage) + box * Shape::kValueBoxBytes, &params.v_map, storage.full(stage), box * kValueBox,
                  key_tile * Shape::kBlockN, head, batch);
  }

  __device__ __forceinline__ void run() {
    constexpr int kKBytes = Shape::kKBytes + Shape::kScaleBytes;
    const int work = params.chunk.heads * params.chunk.tiles;
    for (int index = blockIdx.x; index < work; index += gridDim.x) {
      const WorkTile tile = WorkTile::decode<Shape, kCausal>(params, index);
      load_q(tile);
      for (int key_tile = tile.key_tiles - 1; key_tile >= -1; --key_tile) {
        const bool with_k = key_tile >= 0, with_v = key_tile + 1 < tile.key_tiles;
        const PipelineState<Shape::kStages> stage(steps++);
        mbarrier_wait(storage.empty(stage.index), stage.phase ^ 1);
        arrive_and_expect_tx(storage.full(stage.index), (with_k ? kKBytes : 0) + (with_v ? Shape::kVBytes : 0));
        if (with_k) load_k(tile, key_tile, stage.index);
        if (with_v) load_v(tile, key_tile + 1, stage.index);
      }
    }
  }
};

}  // namespace sm90
