// The finished rows of a warp: the output is divided by the row sums, V's offset, scale and mean are undone, and the
// log-sum-exp is computed.
#pragma once

#include "sm80/item.cuh"
#include "sm80/softmax.cuh"
#include "sm80/values.cuh"

namespace sm80 {

template <class Pv, int kHeadDim, int kTiles>
class Epilogue {
 public:
  __device__ __forceinline__ Epilogue(const AttentionParams& params, const WarpQueries& warp,
                                      const Rows (&rows)[kTiles], const Output<Pv, kHeadDim, kTiles>& output)
      : p(params), warp(warp), rows(rows), output(output) {}

  __device__ __forceinline__ void store() const {
    if constexpr (!Pv::kScaled) return store_as<typename Pv::Element>();
    switch (p.sizes.element) {
      case kHalf:
        return store_as<__half>();
      case kBfloat16:
        return store_as<__nv_bfloat16>();
      default:
        return store_as<float>();
    }
  }

 private:
  template <class T>
  __device__ __forceinline__ void store_as() const {
    const int batch = warp.item.bh / p.sizes.q_heads, head = warp.item.bh - batch * p.sizes.q_heads;
    T* out = static_cast<T*>(p.out.pointer) + batch * p.out.batch_stride + head * p.out.head_stride;
    float inverse[kTiles][2], attended[kTiles][2];  // a row of masked keys has the sum 0 and gives zeros
    float offset[kTiles][2];                        // what V's offset added to the output
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const float sum = quad_sum(output.row_sum[tile][row]);
        attended[tile][row] = sum == 0.f ? 0.f : 1.f;
        inverse[tile][row] = sum == 0.f ? 0.f : 1.f / sum;
        if constexpr (Pv::kOfKeyBlock) {
          const float2 of_tile = output.value_sum[tile];
          offset[tile][row] = Pv::kVOffset * quad_sum(row == 0 ? of_tile.x : of_tile.y);
        }
        const int query = warp.first_query(tile) + 8 * row;
        if (p.lse && warp.lane % 4 == 0 && query < p.sizes.q_length) {
          const i64 at = i64(warp.item.bh) * p.sizes.q_length + query;
          float logarithm = rows[tile].base[row] + log2f(sum);
          if constexpr (Pv::kOfKeyBlock) logarithm -= Pv::kLog2OfUnit;
          p.lse[at] = logarithm * kLn2 + p.lse_shift[at];
        }
      }
    }
    float largest = 0.f;
#pragma unroll
    for (int n = 0; n < kHeadDim / 8; ++n) {
      const int channel = 8 * n + 2 * (warp.lane % 4);
      float2 scale, mean;
      if constexpr (Pv::kScaled) {
        scale = *reinterpret_cast<const float2*>(p.v_scale + i64(warp.item.kv_bh) * kHeadDim + channel);
        mean = *reinterpret_cast<const float2*>(p.v_mean + i64(warp.item.kv_bh) * kHeadDim + channel);
      }
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
        for (int row = 0; row < 2; ++row) {
          const int query = warp.first_query(tile) + 8 * row;
          if (query >= p.sizes.q_length || channel >= p.sizes.head_dim) continue;
          T* to = out + query * p.out.token_stride + channel;
          float x = output.value[tile][n][2 * row], y = output.value[tile][n][2 * row + 1];
          if constexpr (Pv::kOfKeyBlock) {
            x -= offset[tile][row];
            y -= offset[tile][row];
          }
          x *= inverse[tile][row];
          y *= inverse[tile][row];
          if constexpr (Pv::kScaled) {
            x = x * scale.x + attended[tile][row] * mean.x;
            y = y * scale.y + attended[tile][row] * mean.y;
          }
          if constexpr (Pv::kMayExceed) {
            x = within_range<T>(x);
            y = within_range<T>(y);
          }
          store_pair(to, x, y);
          largest = max_nan(largest, max_nan(fabsf(x), fabsf(y)));
        }
      }
    }
    if (p.nonfinite && is_nonfinite_as<T>(largest)) *p.nonfinite = 1;
  }

  const AttentionParams& p;
  const WarpQueries& warp;
  const Rows (&rows)[kTiles];
  const Output<Pv, kHeadDim, kTiles>& output;
};

}  // namespace sm80
