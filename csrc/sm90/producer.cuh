// The producer warpgroup of the attention kernel: one thread streams Q, K and V^T tiles into shared memory with TMA.
#pragma once

#include "sm90/ptx.cuh"
#include "sm90/shared_storage.cuh"
#include "sm90/tile_scheduler.cuh"

namespace sm90 {

// A stage holds the K tile of one step and the V tile of the step before: the consumers multiply those two at the same
// time. So a work tile of n key tiles takes n + 1 stages, the first without V, the last without K. Keys come from the
// last tile down, because the ragged or causal one needs masking and is best done outside the consumers' loop.
template <class Shape, bool kCausal>
struct Producer {
  const AttentionParams& params;
  const SharedStorage<Shape>& storage;
  unsigned tiles = 0, steps = 0;

  __device__ __forceinline__ void load_q(const WorkTile& tile) {
    const PipelineState<kQBuffers> state(tiles++);
    const unsigned full = storage.q_full(state.index);
    const int channel_bytes = params.head_dim * 4;
    const i64 channels = i64(tile.kv_head) * params.head_dim;
    mbarrier_wait(storage.q_empty(state.index), state.phase ^ 1);
    arrive_and_expect_tx(full, Shape::kQBytes + 4 * kBlockM + 2 * channel_bytes);
    bulk_copy_g2s(storage.q_scale(state.index), params.q_scale + i64(tile.head) * params.q_scale_rows + tile.first_row,
                  4 * kBlockM, full);
    bulk_copy_g2s(storage.v_scale(state.index), params.v_scale + channels, channel_bytes, full);
    bulk_copy_g2s(storage.v_mean(state.index), params.v_mean + channels, channel_bytes, full);
#pragma unroll
    for (int box = 0; box < Shape::kColumnBoxes; ++box)
      tma_load_3d(storage.q(state.index) + box * kBlockM * Shape::kRowBytes, &params.q_map, full,
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
#pragma unroll
    for (int box = 0; box < Shape::kKeyBoxes; ++box)
      tma_load_3d(storage.v(stage) + box * Shape::kVRows * Shape::kKeyBytes, &params.v_map, storage.full(stage),
                  key_tile * Shape::kBlockN + box * Shape::kKeyBytes, 0, tile.kv_head);
  }

  __device__ __forceinline__ void run() {
    constexpr int kKBytes = Shape::kKBytes + Shape::kScaleBytes, kVBytes = Shape::kBlockN * Shape::kHeadDim;
    const int work = params.chunk.heads * params.chunk.tiles;
    for (int index = blockIdx.x; index < work; index += gridDim.x) {
      const WorkTile tile = WorkTile::decode<Shape, kCausal>(params, index);
      load_q(tile);
      for (int key_tile = tile.key_tiles - 1; key_tile >= -1; --key_tile) {
        const bool with_k = key_tile >= 0, with_v = key_tile + 1 < tile.key_tiles;
        const PipelineState<Shape::kStages> stage(steps++);
        mbarrier_wait(storage.empty(stage.index), stage.phase ^ 1);
        arrive_and_expect_tx(storage.full(stage.index), (with_k ? kKBytes : 0) + (with_v ? kVBytes : 0));
        if (with_k) load_k(tile, key_tile, stage.index);
        if (with_v) load_v(tile, key_tile + 1, stage.index);
      }
    }
  }
};

}  // namespace sm90
