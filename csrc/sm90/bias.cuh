// The additive terms of a work tile's scores: smoothed Q's correction (paper equation 3) and the attention mask.
#pragma once

#include "common/scores.cuh"
#include "sm90/softmax.cuh"
#include "sm90/tile_scheduler.cuh"

namespace sm90 {

template <bool kHasBias>
class Bias;

template <>
class Bias<false> {
 public:
  __device__ __forceinline__ Bias(const AttentionParams&, const WorkTile&, int) {}
  template <class Visitor>
  __device__ __forceinline__ void visit(const Visitor& visitor) const {
    visitor([](int, int) { return 0.f; });
  }
};

// `visit` calls back with a function of (row 0 or 1, key) for the mask's element type, in units of log2.
template <>
class Bias<true> {
 public:
  __device__ __forceinline__ Bias(const AttentionParams& params, const WorkTile& tile, int row)
      : mask_(params.mask), delta_(params.delta_s ? params.delta_s + i64(tile.delta_row) * params.kv_length : nullptr) {
    const int batch = tile.head / params.q_heads, head = tile.head - batch * params.q_heads;
    const i64 first = batch * mask_.batch_stride + head * mask_.head_stride;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int query = min(tile.first_row + row + 8 * i, params.q_length - 1);
      offset_[i] = first + query * mask_.query_stride;
    }
  }

  template <class Visitor>
  __device__ __forceinline__ void visit(const Visitor& visitor) const {
    switch (mask_.element) {
      case kNone:
        return visitor([this](int, int key) { return delta(key); });
      case kBool:
        return visitor(term<bool>());
      case kHalf:
        return visitor(term<__half>());
      case kBfloat16:
        return visitor(term<__nv_bfloat16>());
      default:
        return visitor(term<float>());
    }
  }

 private:
  __device__ __forceinline__ float delta(int key) const { return delta_ ? __ldg(delta_ + key) : 0.f; }
  template <class T>
  __device__ __forceinline__ auto term() const {
    return [this](int row, int key) {
      return delta(key) + mask_term(static_cast<const T*>(mask_.pointer)[offset_[row] + key * mask_.key_stride]);
    };
  }

  const Mask& mask_;
  const float* delta_;
  i64 offset_[2];
};

}  // namespace sm90
