// Which calls prepare K and V in one pass, and how a cluster of blocks shares a head then. It depends on the shape of
// one head alone: calls are computed in parts of their heads, too, and give the same bits. Plain data, no CUDA headers.
#pragma once

#include "common/grid.h"
#include "sm90/params.h"

namespace sm90 {

struct HeadShare {
  int units;   // of a block's share
  int blocks;  // of a cluster
};

// `head_dim` is that of the kernels. Few large blocks are faster than many small ones.
constexpr HeadShare head_share(int64_t kv_length, int head_dim) {
  const int64_t unit = unit_tokens(head_dim), units = kv_length > unit ? kMostUnits : 1;
  return {static_cast<int>(units), static_cast<int>(ceil_div(kv_length, units * unit))};
}
constexpr bool fits_one_pass(int64_t kv_length, int head_dim) {
  return kv_length <= int64_t(kMostUnits) * kMaxClusterBlocks * unit_tokens(head_dim);
}

}  // namespace sm90
