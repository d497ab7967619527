// The producer warpgroup of the attention kernels: one thread streams int8 Q and K tiles into shared memory with TMA,
// and V^T in E4M3 or, in the precise mode, V from the caller's tensor. With a block list, a second thread streams V in
// the precise mode.
#pragma once

#include "sm90/kernel_traits.h"
#include "sm90/key_list.cuh"
#include "sm90/key_order.cuh"
#include "sm90/ptx.cuh"
#include "sm90/shared_storage.cuh"
#include "sm90/tile_scheduler.cuh"

namespace sm90 {

// For one thread of the block. The others may use the barriers after the next __syncthreads.
template <class Traits>
__device__ __forceinline__ void begin_pipelines(const AttentionParams& params, const SharedStorage<Traits>& storage) {
  prefetch_tma_descriptor(&params.q_map);
  prefetch_tma_descriptor(&params.k_map);
  prefetch_tma_descriptor(&params.v_map);
  for (int i = 0; i < kQBuffers; ++i) {
    mbarrier_init(storage.q_full(i), 1);
    mbarrier_init(storage.q_empty(i), Traits::kQArrivals);
  }
  if constexpr (Traits::kFusedPrologue) {
    mbarrier_init(storage.elements_full(), 1);
    mbarrier_init(storage.elements_empty(), Traits::kConsumerWarps);
  }
  for (int i = 0; i < Traits::kStages; ++i) {
    mbarrier_init(storage.full(i), Traits::kProducers);
    mbarrier_init(storage.empty(i), Traits::kArrivals);
  }
  fence_barrier_init();
}

// A stage holds the K tile of one step and the V tile of the step before: the consumers multiply those two at the same
// time. So a work tile of n key tiles takes n + 1 stages, the first without V, the last without K.
template <class Traits>
struct Producer {
  const AttentionParams& params;
  const SharedStorage<Traits>& storage;
  unsigned tiles = 0, steps = 0;

  // Q as the caller has it, for consumers that quantize it.
  __device__ __forceinline__ void load_elements(const WorkTile& tile) {
    const unsigned full = storage.elements_full();
    const int batch = tile.head / params.q_heads, head = tile.head - batch * params.q_heads;
    mbarrier_wait(storage.elements_empty(), tiles % 2 ^ 1);
    arrive_and_expect_tx(full, Traits::kElementBytes);
#pragma unroll
    for (int box = 0; box < Traits::kElementBoxes; ++box)
      tma_load_4d(storage.elements() + box * Traits::kBlockM * kElementBoxBytes, &params.q_map, full, box * kElementBox,
                  tile.first_row, head, batch);
  }

  // Waits until the fused KV prologue has written a head's K and V with their scales.
  __device__ __forceinline__ void wait_until_prepared(int kv_head) const {
    BlocksOver blocks;
    do {
      blocks = __builtin_bit_cast(BlocksOver, ld_acquire_u64(&params.prepared[kv_head].blocks));
    } while (blocks.k < params.prepared_blocks || blocks.v < params.prepared_blocks);
    fence_proxy_async_global();
  }

  // The end of a prepared head's keys: behind the last one that the mask leaves, if it changes none of those before;
  // else 0.
  __device__ __forceinline__ int end_of_keys(int kv_head) const {
    const KeysLeft keys = __builtin_bit_cast(KeysLeft, ld_acquire_u64(&params.prepared[kv_head].keys));
    return keys.end == keys.unchanged ? keys.end : 0;
  }

  // `index`: of the work tile, which block-list kernels pass on to the consumers. Sets the end of the keys in kernels
  // whose producer says it.
  __device__ __forceinline__ void load_q(WorkTile& tile, int index) {
    if constexpr (Traits::kFusedPrologue) {
      load_elements(tile);
      wait_until_prepared(tile.kv_head);
    }
    if constexpr (Traits::kKeyEndFromProducer) tile.template end_keys_at<Traits>(end_of_keys(tile.kv_head));
    const PipelineState<kQBuffers> state(tiles++);
    const unsigned full = storage.q_full(state.index);
    const int channel_bytes = !Traits::kPrecise ? params.head_dim * 4 : 0;
    const i64 channels = i64(tile.kv_head) * params.head_dim;
    mbarrier_wait(storage.q_empty(state.index), state.phase ^ 1);
    if constexpr (Traits::kBlockList) st_shared_v2_s32(storage.work(state.index), make_int2(index, tile.key_tiles));
    if constexpr (Traits::kKeyEndFromProducer) st_shared_s32(storage.key_end(state.index), tile.key_end);
    constexpr int kQuantizedBytes = Traits::kFusedPrologue ? 0 : Traits::kQBytes + 4 * Traits::kBlockM;
    arrive_and_expect_tx(full, kQuantizedBytes + 2 * channel_bytes);
    if constexpr (!Traits::kFusedPrologue)
      bulk_copy_g2s(storage.q_scale(state.index),
                    params.q_scale + i64(tile.head) * params.q_scale_rows + tile.first_row, 4 * Traits::kBlockM, full);
    if constexpr (!Traits::kPrecise) {
      bulk_copy_g2s(storage.v_scale(state.index), params.v_scale + channels, channel_bytes, full);
      bulk_copy_g2s(storage.v_mean(state.index), params.v_mean + channels, channel_bytes, full);
    }
    if constexpr (!Traits::kFusedPrologue) {
#pragma unroll
      for (int box = 0; box < Traits::kColumnBoxes; ++box)
        tma_load_3d(storage.q(state.index) + box * Traits::kBlockM * Traits::kRowBytes, &params.q_map, full,
                    box * Traits::kRowBytes, tile.first_row, tile.head);
    }
  }

  __device__ __forceinline__ void load_k(const WorkTile& tile, int key_tile, int stage) {
    const unsigned full = storage.full(stage);
    const i64 block = i64(tile.kv_head) * params.k_scale_blocks + key_tile * (Traits::kBlockN / kScaleBlock);
    bulk_copy_g2s(storage.k_scale(stage), params.k_scale + block * kScalesPerBlock, Traits::kScaleBytes, full);
#pragma unroll
    for (int box = 0; box < Traits::kColumnBoxes; ++box)
      tma_load_3d(storage.k(stage) + box * Traits::kBlockN * Traits::kRowBytes, &params.k_map, full,
                  box * Traits::kRowBytes, key_tile * Traits::kBlockN, tile.kv_head);
  }

  __device__ __forceinline__ void load_v(const WorkTile& tile, int key_tile, int stage) {
    if constexpr (!Traits::kPrecise) {
#pragma unroll
      for (int box = 0; box < Traits::VTile::kBoxes; ++box)
        tma_load_3d(storage.v(stage) + box * Traits::VTile::kRows * Traits::VTile::kRowBytes, &params.v_map,
                    storage.full(stage), key_tile * Traits::kBlockN + box * Traits::VTile::kRowBytes, 0, tile.kv_head);
    } else {
      const int head = tile.kv_head - tile.batch * params.kv_heads;
#pragma unroll
      for (int box = 0; box < Traits::VTile::kBoxes; ++box)
        tma_load_4d(storage.v(stage) + box * Traits::VTile::kBoxBytes, &params.v_map, storage.full(stage),
                    box * kElementBox, key_tile * Traits::kBlockN, head, tile.batch);
    }
  }

  static constexpr int kKStageBytes = Traits::kKBytes + Traits::kScaleBytes;

  __device__ __forceinline__ int wait_for_empty() {
    const PipelineState<Traits::kStages> stage(steps++);
    mbarrier_wait(storage.empty(stage.index), stage.phase ^ 1);
    return stage.index;
  }

  // The K tile of one step and the V tile of the step before; without the one at the end, without the other at the
  // beginning.
  __device__ __forceinline__ void fill_stage(const WorkTile& tile, bool with_k, int k_tile, bool with_v, int v_tile) {
    const int stage = wait_for_empty();
    if constexpr (Traits::kBlockList) st_shared_s32(storage.key_tile(stage), k_tile);
    arrive_and_expect_tx(storage.full(stage), (with_k ? kKStageBytes : 0) + (with_v ? Traits::VTile::kCopiedBytes : 0));
    if (with_k) load_k(tile, k_tile, stage);
    if (with_v) load_v(tile, v_tile, stage);
  }

  __device__ __forceinline__ void run_dense() {
    const int places = places_of_work<Traits>(params);
    for (int place = blockIdx.x; place < places; place = next_place<Traits>(params, place)) {
      WorkTile tile = work_tile_at<Traits>(params, place);
      load_q(tile, place);
      const KeyOrder<Traits> order(params, tile);
      int v_tile = 0;
      for (int left = tile.key_tiles - 1; left >= -1; --left) {
        const int k_tile = order[left];
        fill_stage(tile, left >= 0, k_tile, left + 1 < tile.key_tiles, v_tile);
        v_tile = k_tile;
      }
    }
    if constexpr (Traits::kFusedPrologue)
      griddepcontrol_wait();  // so that the end of this kernel is that of the prologue, too
  }

  __device__ __forceinline__ void load_keys_and_values(WorkTile& tile, const KeyList<Traits>& keys) {
    int v_tile = 0, k_tile = tile.key_tiles > 0 ? keys[0] : 0;
    for (int step = 0; step <= tile.key_tiles && tile.key_tiles > 0; ++step) {
      int next = 0;
      if (step + 1 < tile.key_tiles) next = keys[step + 1];  // read while the stage is waited for
      asm volatile("" : "+r"(tile.kv_head));  // so that addresses are computed again, not kept: there are few registers
      fill_stage(tile, step < tile.key_tiles, k_tile, step > 0, v_tile);
      v_tile = k_tile;
      k_tile = next;
    }
  }
  // Calls `fill` with each key tile of a list and the stage for it.
  template <class Fill>
  __device__ __forceinline__ void walk(WorkTile tile, const KeyList<Traits>& keys, const Fill& fill) {
    int next = keys[0];
#pragma unroll 1
    for (int step = 0; step < keys.size(); ++step) {
      asm volatile("" : "+r"(tile.kv_head), "+r"(step));  // as above; nor is the loop unrolled
      const int key_tile = next;
      next = keys[min(step + 1, keys.size() - 1)];
      fill(tile, key_tile, wait_for_empty());
    }
  }
  // The K tiles alone: the last stage has none.
  __device__ __forceinline__ void load_keys(const WorkTile& tile, const KeyList<Traits>& keys) {
    if (keys.size() == 0) return;
    walk(tile, keys, [&](const WorkTile& tile, int key_tile, int stage) {
      st_shared_s32(storage.key_tile(stage), key_tile);
      arrive_and_expect_tx(storage.full(stage), kKStageBytes);
      load_k(tile, key_tile, stage);
    });
    mbarrier_arrive(storage.full(wait_for_empty()));
  }
  // The V tiles alone: the first stage has none.
  __device__ __forceinline__ void load_values(const WorkTile& tile, const KeyList<Traits>& keys) {
    if (keys.size() == 0) return;
    mbarrier_arrive(storage.full(wait_for_empty()));
    walk(tile, keys, [&](const WorkTile& tile, int key_tile, int stage) {
      arrive_and_expect_tx(storage.full(stage), Traits::VTile::kCopiedBytes);
      load_v(tile, key_tile, stage);
    });
  }

  // Block lists make work tiles unequal, so a block takes its next one when it is free. The consumers get its index
  // with its Q. A work tile with an empty list has no stages.
  __device__ __forceinline__ void run_block_list() {
    const int work = params.chunk.heads * params.chunk.tiles;
    int index = blockIdx.x;
    while (index < work) {
      WorkTile tile = WorkTile::decode<Traits>(params, index);
      const KeyList<Traits> keys(params, tile);
      tile.key_tiles = keys.size();
      load_q(tile, index);
      if constexpr (Traits::kProducers == 1)
        load_keys_and_values(tile, keys);
      else
        load_keys(tile, keys);
      index = gridDim.x + atomicAdd(params.lists.next, 1);  // the consumers are some stages behind
    }
    const PipelineState<kQBuffers> state(tiles);
    mbarrier_wait(storage.q_empty(state.index), state.phase ^ 1);
    st_shared_v2_s32(storage.work(state.index), make_int2(kNoWork, 0));
    mbarrier_arrive(storage.q_full(state.index));
  }
  // The loop of the thread that loads V: it reads the index of a work tile as the consumers do.
  __device__ __forceinline__ void run_block_list_values() {
    while (true) {
      const PipelineState<kQBuffers> buffer(tiles++);
      mbarrier_wait(storage.q_full(buffer.index), buffer.phase);
      const int index = ld_shared_v2_s32(storage.work(buffer.index)).x;
      mbarrier_arrive(storage.q_empty(buffer.index));
      if (index == kNoWork) return;
      const WorkTile tile = WorkTile::decode<Traits>(params, index);
      load_values(tile, KeyList<Traits>(params, tile));
    }
  }

  __device__ __forceinline__ void run() {
    if constexpr (Traits::kBlockList)
      run_block_list();
    else
      run_dense();
  }
};

}  // namespace sm90
