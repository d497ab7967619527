// Where the elements of quantized Q, K and V lie in a tile. A tile is stored in the order in which the threads of a
// warp hold the operands of mma.sync, so the attention kernel copies it to shared memory as it is and reads 16 bytes a
// thread without bank conflicts. INT4 rows are treated as INT8 rows of half the bytes: the operand layouts agree.
#pragma once

#include "common/constants.h"
#include "sm80/params.h"

namespace sm80 {

constexpr int kMmaKBytes = 32;                     // bytes of a Q or K row in one mma
constexpr float kSmallestScale = 1.17549435e-38f;  // a group of zeros is not divided by zero

template <int kHeadDim, int kBits>
struct QkTile {
  static constexpr int kRowBytes = kHeadDim * kBits / 8;
  static constexpr int kSteps = kRowBytes / kMmaKBytes;

  // Offset of the four bytes that start at `byte` of a row. A operand: (16-row tile, step, lane, register).
  static __device__ __forceinline__ int query_offset(int row, int byte) {
    const int lane = (row % 8) * 4 + byte % 16 / 4;
    const int slot = row % 16 / 8 + 2 * (byte % kMmaKBytes / 16);
    return ((row / 16 * kSteps + byte / kMmaKBytes) * 32 + lane) * 16 + slot * 4;
  }
  // B operand: (pair of mma, lane, register). Pairs run over the steps of 8 keys, or over two groups of 8 keys.
  static __device__ __forceinline__ int key_offset(int key, int byte) {
    const int lane = (key % 8) * 4 + byte % 16 / 4;
    const int mma = key / 8 * kSteps + byte / kMmaKBytes;
    return (mma / 2 * 32 + lane) * 16 + mma % 2 * 8 + byte % kMmaKBytes / 16 * 4;
  }
};

// The accumulator of S gives a thread columns 8j + 2t and 8j + 2t + 1, the A operand of P V wants neighboring bytes. So
// the keys of V and of the key bias are permuted within 16: position 4t + i holds this key.
__host__ __device__ constexpr int key_at_position(int position) {
  return position / 16 * 16 + position % 4 / 2 * 8 + position % 16 / 4 * 2 + position % 2;
}

}  // namespace sm80
