// Reading rows of q, k and v in pieces of eight channels.
#pragma once

#include "common/elements.cuh"
#include "sm80/params.h"

namespace sm80 {

// A block of threads reads rows of kHeadDim channels, eight channels a thread.
template <int kHeadDim, int kThreads>
struct RowPieces {
  static constexpr int kPieces = kHeadDim / 8;            // threads of a row
  static constexpr int kRowsAtOnce = kThreads / kPieces;  // rows of a pass
  static __device__ __forceinline__ int channel() { return threadIdx.x % kPieces * 8; }
  static __device__ __forceinline__ int row() { return threadIdx.x / kPieces; }
};

// Vec8 elements of a row from `channel` on; zeros past head_dim.
template <class T>
__device__ __forceinline__ void load_piece(float (&to)[8], const T* row, int channel, const Sizes& sizes) {
  if (channel < sizes.head_dim) {
    load_vec8(row + channel, to);
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) to[i] = 0.f;
  }
}

template <class T>
__device__ __forceinline__ const T* head_start(const Strided& tensor, int bh, int heads) {
  const int batch = bh / heads, head = bh - batch * heads;
  return static_cast<const T*>(tensor.pointer) + batch * tensor.batch_stride + head * tensor.head_stride;
}

}  // namespace sm80
