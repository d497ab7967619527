// The sizes of a call as its kernels take them. Plain data, no CUDA headers: launch code and kernels include it.
#pragma once

namespace common {

struct CallSizes {
  int q_heads, kv_heads, q_length, kv_length, head_dim;  // head_dim is a multiple of 8
};

}  // namespace common
