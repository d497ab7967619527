// Rows of a finished work tile of the precise mode: normalize, write, and the log-sum-exp.
#pragma once

#include "common/elements.cuh"
#include "sm90/precise_softmax.cuh"
#include "sm90/tile_scheduler.cuh"

namespace sm90 {

// The quad's threads hold two neighboring channels of each of four groups of eight, in one word a group; after this,
// each thread holds all words of the group with its own number in the quad. Rows and columns of a 4 x 4 matrix change
// places.
__device__ __forceinline__ void transpose_in_quad(unsigned (&words)[4]) {
  const bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const unsigned received = __shfl_xor_sync(0xffffffffu, odd ? words[i] : words[i + 1], 1);
    (odd ? words[i] : words[i + 1]) = received;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const unsigned received = __shfl_xor_sync(0xffffffffu, upper ? words[i] : words[i + 2], 2);
    (upper ? words[i] : words[i + 2]) = received;
  }
}

template <class T>
class PreciseEpilogue {
 public:
  // `row`, and row + 8: the thread's rows of the work tile.
  __device__ __forceinline__ PreciseEpilogue(const AttentionParams& params, const WorkTile& tile, int row,
                                             const PreciseRowState<T>& state)
      : params_(params), tile_(tile) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float sum = state.sum[i];
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      query_[i] = tile.first_row + row + 8 * i;
      weight_[i] = sum == 0.f ? 0.f : 1.f / sum;  // a row whose keys are all masked: zeros
      if (params.lse && threadIdx.x % 4 == 0 && query_[i] < params.q_length) {
        const i64 index = i64(tile.head) * params.q_length + query_[i];
        params.lse[index] = (log2f(sum) - state.offset[i]) * kLn2 + params.lse_shift[index];
      }
    }
  }

  template <int kCount>
  __device__ __forceinline__ void store(const float (&accumulator)[kCount]) const {
    const int batch = tile_.head / params_.q_heads, head = tile_.head - batch * params_.q_heads;
    T* out = static_cast<T*>(params_.out.pointer) + batch * params_.out.batch_stride + head * params_.out.head_stride;
#pragma unroll
    for (int block = 0; block < kCount / 16; ++block) {
      const int channel = 32 * block + 8 * (threadIdx.x % 4);
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        unsigned words[4];
        float largest = 0.f;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float x = within_range<T>(accumulator[16 * block + 4 * i + 2 * row] * weight_[row]);
          const float y = within_range<T>(accumulator[16 * block + 4 * i + 2 * row + 1] * weight_[row]);
          largest = max_nan(largest, max_nan(fabsf(x), fabsf(y)));
          words[i] = pack_pair(x, y, T());
        }
        transpose_in_quad(words);
        if (query_[row] >= params_.q_length) continue;
        if (params_.nonfinite && is_nonfinite_as<T>(largest)) *params_.nonfinite = 1;
        if (channel < params_.head_dim)
          *reinterpret_cast<uint4*>(out + query_[row] * params_.out.token_stride + channel) =
              make_uint4(words[0], words[1], words[2], words[3]);
      }
    }
  }

 private:
  const AttentionParams& params_;
  const WorkTile tile_;
  int query_[2];
  float weight_[2];
};

}  // namespace sm90
