// Q's operands from shared memory, and a warp's integer scores with mma.sync: bit for bit what wgmma gives, in the same
// registers. For the rare step that needs its scores after they were replaced.
#pragma once

#include "sm90/ptx.cuh"

namespace sm90 {

// Where TMA's swizzle puts a byte of a tile that starts at a multiple of 1024 bytes.
template <int kRowBytes>
__device__ __forceinline__ unsigned swizzled(unsigned tile, int row, int byte) {
  static_assert(kRowBytes == 128 || kRowBytes == 64, "rows of 64 or 128 bytes");
  constexpr unsigned kMask = kRowBytes / 16 - 1;  // 16-byte units of a row
  const unsigned offset = row * kRowBytes + byte;
  return tile + (offset ^ ((offset >> 7 & kMask) << 4));
}

// The A operand of 32 channels: 16 query rows from `first_row` of the Q tile on.
template <class Traits>
__device__ __forceinline__ void load_q_operand(unsigned (&a)[4], unsigned q, int first_row, int step) {
  constexpr int kRowBytes = Traits::kRowBytes;
  const int row = first_row + threadIdx.x % 32 / 4, byte = step * 32 % kRowBytes + threadIdx.x % 4 * 4;
  const unsigned box = q + step * 32 / kRowBytes * (Traits::kBlockM * kRowBytes);
#pragma unroll
  for (int i = 0; i < 4; ++i) a[i] = ld_shared_u32(swizzled<kRowBytes>(box, row + i % 2 * 8, byte + i / 2 * 16));
}

// Scores += Q K^T of 32 channels, with all keys of the K tile.
template <class Traits>
__device__ __forceinline__ void mma_step(int (&scores)[Traits::kBlockN / 2], const unsigned (&a)[4], unsigned k,
                                         int step) {
  constexpr int kRowBytes = Traits::kRowBytes;
  const int row = threadIdx.x % 32 / 4, byte = step * 32 % kRowBytes + threadIdx.x % 4 * 4;
  const unsigned box = k + step * 32 / kRowBytes * (Traits::kBlockN * kRowBytes);
#pragma unroll
  for (int j = 0; j < Traits::kBlockN / 8; ++j) {
    const unsigned b0 = ld_shared_u32(swizzled<kRowBytes>(box, 8 * j + row, byte));
    const unsigned b1 = ld_shared_u32(swizzled<kRowBytes>(box, 8 * j + row, byte + 16));
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+r"(scores[4 * j]), "+r"(scores[4 * j + 1]), "+r"(scores[4 * j + 2]), "+r"(scores[4 * j + 3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

template <class Traits>
__device__ __forceinline__ void mma_scores(int (&scores)[Traits::kBlockN / 2],
                                           const unsigned (&q)[Traits::kHeadDim / 32][4], unsigned k) {
#pragma unroll
  for (int& score : scores) score = 0;
#pragma unroll
  for (int step = 0; step < Traits::kHeadDim / 32; ++step) mma_step<Traits>(scores, q[step], k, step);
}

}  // namespace sm90
