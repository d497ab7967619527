// Keys that a mask hides from every query and head of a batch entry (comfy_sage2/reference/hidden_keys.py): they enter
// no mean and no scale.
#pragma once

#include "common/scores.cuh"
#include "common/type_traits.cuh"

namespace common {

// An element of a mask as what it adds to a score.
__device__ __forceinline__ float mask_value(const Mask& mask, i64 index) {
  return visit_mask(mask, [&](const auto* elements) {
    if constexpr (is_same_v<decltype(elements), const bool*>)
      return elements[index] ? 0.f : kNegativeInfinity;
    else
      return to_float(elements[index]);
  });
}
// Of such a value: where it is fp16's lowest number, or where its term is the lowest.
__device__ __forceinline__ bool hides(const Mask& mask, float value) {
  return mask.element == kHalf ? value <= -65504.f : mask_term(value) <= kLowestTerm;
}

// Of a batch entry.
class HiddenKeys {
 public:
  __device__ __forceinline__ HiddenKeys(const Mask& mask, int batch)
      : mask_(&mask), batch_(batch), some_(is_for_all(mask)) {}

  // Of a mask for all queries and heads.
  static __device__ __forceinline__ bool is_for_all(const Mask& mask) {
    return mask.element != kNone && mask.head_stride == 0 && mask.query_stride == 0;
  }

  // Whether there may be some.
  __device__ __forceinline__ bool any() const { return some_; }
  // A mask that hides all keys hides none: `shown` of them are left.
  __device__ __forceinline__ void all_but(int shown) { some_ = some_ && shown != 0; }
  __device__ __forceinline__ bool has(int key) const { return some_ && hides(*mask_, value(key)); }
  __device__ __forceinline__ float value(int key) const {
    return mask_value(*mask_, batch_ * mask_->batch_stride + key * mask_->key_stride);
  }
  // Bits of the 32 keys from `first` on, but of those from `end` on. For a warp together.
  __device__ __forceinline__ unsigned bits(int first, int end) const {
    const int key = first + threadIdx.x % 32;
    return __ballot_sync(0xffffffffu, key < end && has(key));
  }

 private:
  const Mask* mask_;
  int batch_;
  bool some_;
};

// In its place in kernels of calls without such a mask: all of it folds away.
struct NoHiddenKeys {
  __device__ __forceinline__ NoHiddenKeys() {}
  __device__ __forceinline__ NoHiddenKeys(const Mask&, int) {}
  static __device__ __forceinline__ constexpr bool any() { return false; }
  static __device__ __forceinline__ void all_but(int) {}
  static __device__ __forceinline__ constexpr bool has(int) { return false; }
  static __device__ __forceinline__ constexpr unsigned bits(int, int) { return 0; }
};

}  // namespace common
