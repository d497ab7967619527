// The arithmetic of sizes, grids and scratch memory.
#pragma once

#include <cstdint>
#include <string>

#include "common/validate.h"
#include "driver.h"

namespace common {

constexpr int64_t kMaxGridX = kMaxInt, kMaxGridYZ = 65535;

constexpr int64_t ceil_div(int64_t value, int64_t divisor) { return (value + divisor - 1) / divisor; }
constexpr int64_t round_up(int64_t value, int64_t multiple) { return ceil_div(value, multiple) * multiple; }

// The head_dim of the kernels that run a call: its channels are filled up with zeros.
constexpr int padded_head_dim(int head_dim) { return head_dim <= 64 ? 64 : head_dim <= 128 ? 128 : 256; }

// Throws std::invalid_argument for a grid that no launch can have.
inline driver::Extent grid(int64_t x, int64_t y = 1, int64_t z = 1) {
  require(x <= kMaxGridX && y <= kMaxGridYZ && z <= kMaxGridYZ, "the call is too large for one launch: it takes ",
          std::to_string(x), " x ", std::to_string(y), " x ", std::to_string(z), " blocks, at most ",
          std::to_string(kMaxGridX), " x ", std::to_string(kMaxGridYZ), " x ", std::to_string(kMaxGridYZ),
          " are possible");
  return {static_cast<unsigned>(x), static_cast<unsigned>(y), static_cast<unsigned>(z)};
}

// Gives out parts of a call's scratch memory, as offsets in bytes.
class Arena {
 public:
  int64_t add(int64_t size) {
    const int64_t offset = bytes_;
    bytes_ += round_up(size, kAlignment);
    return offset;
  }
  int64_t bytes() const { return bytes_; }

 private:
  static constexpr int64_t kAlignment = 256;
  int64_t bytes_ = 0;
};

}  // namespace common
