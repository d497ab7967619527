// How kernels see tensors and masks. Plain data, no CUDA headers: launch code and kernels include it.
#pragma once

namespace common {

using i64 = long long;

// Same numbers as in attention_call.h.
enum Element { kNone = 0, kBool = 1, kHalf = 2, kBfloat16 = 3, kFloat = 4 };

// In elements; the last dimension is contiguous and starts at a multiple of 16 bytes.
struct Strided {
  void* pointer;
  i64 batch_stride, head_stride, token_stride;
};

struct Mask {  // strides are 0 where the mask broadcasts
  const void* pointer;
  i64 batch_stride, head_stride, query_stride, key_stride;
  int element;
  int padding;  // 0: named, so that a kernel's parameters are the same bytes on every platform
};

}  // namespace common
