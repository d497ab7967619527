// Rows of a finished work tile: normalize, undo V's scale and centering, write, and the log-sum-exp.
#pragma once

#include "sm90/bias.cuh"
#include "sm90/ptx.cuh"

namespace sm90 {

// `kLean`: no row is without keys, and values that are not finite are looked for once a row. Elsewhere ptxas's order of
// the loop is worse for either (E039, E040).
template <bool kLean>
class Epilogue {
 public:
  // `sum0`, `sum1`: the row sums of 448 * P in the quad's first thread. `v_scale`, `v_mean`: shared-memory addresses.
  __device__ __forceinline__ Epilogue(const AttentionParams& params, const WorkTile& tile, int row, int lane,
                                      const float (&maximum)[2], float sum0, float sum1, unsigned v_scale,
                                      unsigned v_mean)
      : params_(params), tile_(tile), lane_(lane), v_scale_(v_scale), v_mean_(v_mean) {
    const float sums[2] = {sum0, sum1};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      query_[i] = tile.first_row + row + 8 * i;
      const float sum = __shfl_sync(0xffffffff, sums[i], threadIdx.x & 28);
      weight_[i] = sum == 0.f ? 0.f : 1.f / sum;  // a row whose keys are all masked: zeros
      mean_weight_[i] = sum == 0.f ? 0.f : 1.f;
      if (params.lse && lane == 0 && query_[i] < params.q_length) {
        const i64 index = i64(tile.head) * params.q_length + query_[i];
        params.lse[index] = (maximum[i] + log2f(sum) - kLog2OfPScale) * kLn2 + params.lse_shift[index];
      }
    }
  }

  // Channels from `first_channel` on; the accumulator's last eight columns may be the row sum, beyond head_dim.
  template <int kCount>
  __device__ __forceinline__ void store(const float (&accumulator)[kCount], int first_channel) const {
    switch (params_.element) {
      case kHalf:
        return store_as<__half>(accumulator, first_channel);
      case kBfloat16:
        return store_as<__nv_bfloat16>(accumulator, first_channel);
      default:
        return store_as<float>(accumulator, first_channel);
    }
  }

 private:
  template <class T, int kCount>
  __device__ __forceinline__ void store_as(const float (&accumulator)[kCount], int first_channel) const {
    const int batch = tile_.head / params_.q_heads, head = tile_.head - batch * params_.q_heads;
    T* out = static_cast<T*>(params_.out.pointer) + batch * params_.out.batch_stride + head * params_.out.head_stride;
    float largest = 0.f;
    T* rows[2] = {out + query_[0] * params_.out.token_stride, out + query_[1] * params_.out.token_stride};
#pragma unroll
    for (int block = 0; block < kCount / 16; ++block) {
      const int channel = first_channel + 32 * block + 8 * lane_;
      if (channel < params_.head_dim) {
        const float4 s0 = ld_shared_v4(v_scale_ + 4 * channel), s1 = ld_shared_v4(v_scale_ + 4 * channel + 16);
        const float4 m0 = ld_shared_v4(v_mean_ + 4 * channel), m1 = ld_shared_v4(v_mean_ + 4 * channel + 16);
        const float scale[8] = {s0.x, s0.y, s0.z, s0.w, s1.x, s1.y, s1.z, s1.w};
        const float mean[8] = {m0.x, m0.y, m0.z, m0.w, m1.x, m1.y, m1.z, m1.w};
#pragma unroll
        for (int row = 0; row < 2; ++row) {
          float x[8];
#pragma unroll
          for (int i = 0; i < 8; ++i)
            x[i] = fmaf(accumulator[16 * block + i / 2 * 4 + 2 * row + i % 2], weight_[row] * scale[i],
                        kLean ? mean[i] : mean[i] * mean_weight_[row]);
          if (query_[row] < params_.q_length) {
            store_vec8(rows[row] + channel, x);
            if constexpr (kLean)
              largest = max_nan(largest, amax_of(x));
            else
              note_nonfinite<T>(amax_of(x));
          }
        }
      }
    }
    if constexpr (kLean) note_nonfinite<T>(largest);
  }

  __device__ __forceinline__ float amax_of(const float (&x)[8]) const {
    float largest = 0.f;
#pragma unroll
    for (float y : x) largest = max_nan(largest, fabsf(y));
    return largest;
  }
  template <class T>
  __device__ __forceinline__ void note_nonfinite(float largest) const {
    if (params_.nonfinite && is_nonfinite_as<T>(largest)) *params_.nonfinite = 1;
  }

  const AttentionParams& params_;
  const WorkTile& tile_;
  const int lane_;
  const unsigned v_scale_, v_mean_;
  int query_[2];
  float weight_[2], mean_weight_[2];
};

}  // namespace sm90
