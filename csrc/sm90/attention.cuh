// Attention on int8 scores and E4M3 probabilities for Hopper (SageAttention2-8b, paper algorithm 1 with two-level
// accumulation). One producer warpgroup streams Q, K and V^T tiles; two consumer warpgroups own 64 query rows each. The
// block stays on its multiprocessor and takes work tiles (128 query rows of one head) in turn, heads outermost so that
// K and V stay in L2.
#pragma once

#include "sm90/padding_consumer.cuh"
#include "sm90/warpgroups.cuh"

namespace sm90 {

// Rows of ones and zeros below each V^T buffer; the copies never touch them. Every 8-row group is one swizzle pattern,
// and a row of equal bytes is the same swizzled or not.
template <class Traits>
__device__ __forceinline__ void write_row_of_ones(unsigned char* base) {
  constexpr int kBytes = Traits::VTile::kOnesRows * Traits::VTile::kRowBytes;
  constexpr unsigned char kOne = 0x38;  // 1.0 in E4M3
  for (int i = threadIdx.x; i < Traits::kStages * Traits::VTile::kBoxes * kBytes; i += Traits::kThreads) {
    const int stage = i / (Traits::VTile::kBoxes * kBytes), box = i / kBytes % Traits::VTile::kBoxes, byte = i % kBytes;
    unsigned char* rows = base + Traits::kVOffset + stage * Traits::VTile::kBytes +
                          (box * Traits::VTile::kRows + Traits::kHeadDim) * Traits::VTile::kRowBytes;
    rows[byte] = byte < Traits::VTile::kRowBytes ? kOne : 0;
  }
  fence_proxy_async_shared();
}

template <class Traits>
__device__ __forceinline__ void attention_kernel(const AttentionParams& params) {
  extern __shared__ unsigned char shared[];
  const unsigned start = (shared_address(shared) + Traits::kAlignment - 1) & ~(Traits::kAlignment - 1u);
  unsigned char* aligned = shared + (start - shared_address(shared));
  const SharedStorage<Traits> storage{start};
  if (threadIdx.x == 0) begin_pipelines(params, storage);
  write_row_of_ones<Traits>(aligned);
  if constexpr (Traits::kKeyEndFromProducer)
    run_warpgroups<Traits, PaddingConsumer<Traits>>(params, storage);
  else
    run_warpgroups<Traits, Consumer<Traits>>(params, storage);
}

}  // namespace sm90
