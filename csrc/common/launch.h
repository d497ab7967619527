// What the launch code of all families shares: sizes, scratch memory, grids, and one call's launches.
#pragma once

#include <cstdint>
#include <string>

#include "attention_call.h"
#include "common/validate.h"
#include "common/views.h"
#include "driver.h"

namespace common {

constexpr int64_t kDeltaBytes = int64_t(256) << 20;  // of smooth Q's correction at a time
constexpr int64_t kMaxGridX = kMaxInt, kMaxGridYZ = 65535;

constexpr int64_t ceil_div(int64_t value, int64_t divisor) { return (value + divisor - 1) / divisor; }
constexpr int64_t round_up(int64_t value, int64_t multiple) { return ceil_div(value, multiple) * multiple; }

// The head_dim of the kernels that run a call: its channels are filled up with zeros.
constexpr int padded_head_dim(int head_dim) { return head_dim <= 64 ? 64 : head_dim <= 128 ? 128 : 256; }

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

// Throws std::invalid_argument for a grid that no launch can have.
inline driver::Extent grid(int64_t x, int64_t y = 1, int64_t z = 1) {
  require(x <= kMaxGridX && y <= kMaxGridYZ && z <= kMaxGridYZ, "the call is too large for one launch: it takes ",
          std::to_string(x), " x ", std::to_string(y), " x ", std::to_string(z), " blocks, at most ",
          std::to_string(kMaxGridX), " x ", std::to_string(kMaxGridYZ), " x ", std::to_string(kMaxGridYZ),
          " are possible");
  return {static_cast<unsigned>(x), static_cast<unsigned>(y), static_cast<unsigned>(z)};
}

template <typename Type>
Type* pointer(uint64_t address) {
  return reinterpret_cast<Type*>(static_cast<uintptr_t>(address));
}
inline Strided strided(const TensorView& view) {
  return {pointer<void>(view.pointer), view.batch_stride, view.head_stride, view.token_stride};
}
inline Mask mask_of(const MaskView& view) {
  return {pointer<const void>(view.pointer),
          view.batch_stride,
          view.head_stride,
          view.query_stride,
          view.key_stride,
          view.element,
          0};
}

// As it stands in the kernels' names.
inline const char* element_name(int element) {
  return element == kHalf ? "fp16" : element == kBfloat16 ? "bf16" : "fp32";
}

// Launches kernels of one call on its stream.
class Launcher {
 protected:
  explicit Launcher(const AttentionCall& call) : call_(call), stream_(driver::stream_of(call.stream)) {}

  // What lies at an offset of the scratch memory.
  template <typename Type>
  Type* at(int64_t offset) const {
    return pointer<Type>(call_.workspace + static_cast<uint64_t>(offset));
  }

  template <typename Params>
  void launch(const std::string& cubin, const std::string& kernel, driver::Extent grid, int threads, int shared_bytes,
              Params& params, driver::LaunchOptions options = {}) const {
    void* arguments[] = {&params};
    driver::launch(driver::kernel(cubin.c_str(), kernel.c_str(), shared_bytes), grid, {static_cast<unsigned>(threads)},
                   shared_bytes, stream_, arguments, options);
  }

  const AttentionCall& call_;

 private:
  const CUstream stream_;
};

}  // namespace common
