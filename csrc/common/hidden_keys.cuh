// Keys that a mask hides from every query and head of a batch entry (comfy_sage2/reference/hidden_keys.py): they enter
// no mean and no scale.
#pragma once

#include "common/scores.cuh"

namespace common {

__device__ __forceinline__ bool hides(bool attend) { return !attend; }
__device__ __forceinline__ bool hides(__half additive) { return __half2float(additive) <= -65504.f; }
template <class T>
__device__ __forceinline__ bool hides(T additive) {
  return mask_term(additive) <= kLowestTerm;
}

// Of a batch entry.
class HiddenKeys {
 public:
  __device__ __forceinline__ HiddenKeys(const Mask& mask, int batch)
      : mask_(&mask), start_(batch * mask.batch_stride), some_(is_for_all(mask)) {}

  // Of a mask for all queries and heads.
  static __device__ __forceinline__ bool is_for_all(const Mask& mask) {
    return mask.element != kNone && mask.head_stride == 0 && mask.query_stride == 0;
  }

  // Whether there may be some.
  __device__ __forceinline__ bool any() const { return some_; }
  // A mask that hides all keys hides none: `shown` of them are left.
  __device__ __forceinline__ void all_but(int shown) { some_ = some_ && shown != 0; }
  __device__ __forceinline__ bool has(int key) const {
    return some_ &&
           visit_mask(*mask_, [&](const auto* elements) { return hides(elements[start_ + key * mask_->key_stride]); });
  }

  // How many of the keys from `first` to `end` are left. For all threads of a block of kThreads together.
  template <int kThreads>
  __device__ __forceinline__ int count_shown(int first, int end) const {
    if (!some_) return max(end - first, 0);
    int shown = 0;
    for (int base = first; base < end; base += kThreads) {
      const int key = base + threadIdx.x;
      shown += __syncthreads_count(key < end && !has(key));
    }
    return shown;
  }

 private:
  const Mask* mask_;
  i64 start_;
  bool some_;
};

// In its place in kernels of calls without such a mask: all of it folds away.
struct NoHiddenKeys {
  __device__ __forceinline__ NoHiddenKeys() {}
  __device__ __forceinline__ NoHiddenKeys(const Mask&, int) {}
  static __device__ __forceinline__ constexpr bool any() { return false; }
  static __device__ __forceinline__ void all_but(int) {}
  static __device__ __forceinline__ constexpr bool has(int) { return false; }
};

}  // namespace common
