// Which keys an attention kernel masks, and what it adds to scores. Plain data, no CUDA headers: launch code and
// kernels include it.
#pragma once

namespace common {

// A set: a kernel may do several of these.
enum class MaskPolicy : unsigned {
  none = 0,
  causal = 1,       // no query sees the keys behind its own place
  key_bias = 2,     // adds a term that all queries of a block share: a mask that broadcasts over queries, or smooth Q
  row_bias = 4,     // adds a term of each query and key: any other mask
  padding = 8,      // skips the key tiles behind the last key that a mask for all queries and heads leaves
  block_list = 16,  // visits the active blocks of a block mask alone
};

constexpr MaskPolicy operator|(MaskPolicy a, MaskPolicy b) {
  return static_cast<MaskPolicy>(static_cast<unsigned>(a) | static_cast<unsigned>(b));
}
constexpr bool includes(MaskPolicy policy, MaskPolicy part) {
  return (static_cast<unsigned>(policy) & static_cast<unsigned>(part)) != 0;
}

}  // namespace common
