// What TMA reads for the attention kernels, as the driver wants it described: tensors of the caller in 16 bits, and
// rows of bytes in the workspace. A box is what one load brings; its rows are swizzled as the kernels read them.
// Addresses are no part of it: each run puts them in (launch_list.h).
#pragma once

#include <cstdint>

#include "attention_call.h"
#include "driver.h"
#include "sm90/tiles.h"

namespace sm90 {

// A tensor of the caller: channels, tokens, heads, batches. The stride of an axis of one element may be anything.
inline driver::MapDescription element_map(const CallSignature& call, const TensorStrides& strides, int64_t heads,
                                          int64_t tokens, int box_rows) {
  const auto byte_stride = [](int64_t elements, int64_t size) {
    constexpr int kElementBytes = 2, kSmallest = 16;
    return static_cast<uint64_t>(size > 1 ? elements * kElementBytes : kSmallest);
  };
  return {
      driver::MapElement::uint16,
      4,
      {static_cast<uint64_t>(call.head_dim), static_cast<uint64_t>(tokens), static_cast<uint64_t>(heads),
       static_cast<uint64_t>(call.batch)},
      {byte_stride(strides.token, tokens), byte_stride(strides.head, heads), byte_stride(strides.batch, call.batch)},
      {kElementBox, static_cast<uint32_t>(box_rows), 1, 1},
      driver::MapSwizzle::bytes_128};
}

// Rows of `columns` bytes in the workspace, `row_bytes` apart.
inline driver::MapDescription byte_map(int64_t columns, int64_t rows, int64_t bh, int64_t row_bytes, int box_columns,
                                       int box_rows) {
  return {driver::MapElement::uint8,
          3,
          {static_cast<uint64_t>(columns), static_cast<uint64_t>(rows), static_cast<uint64_t>(bh)},
          {static_cast<uint64_t>(row_bytes), static_cast<uint64_t>(rows * row_bytes)},
          {static_cast<uint32_t>(box_columns), static_cast<uint32_t>(box_rows), 1},
          box_columns == 128 ? driver::MapSwizzle::bytes_128 : driver::MapSwizzle::bytes_64};
}

}  // namespace sm90
