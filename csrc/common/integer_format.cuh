// The integers of quantized Q and K: comfy_sage2/quantize/integer.py.
#pragma once

namespace common {

// Rotated values are nearly normal: in 4 bits a finer step then gains more than the few clamped values lose.
// `kPadded_`: rows hold channels past head_dim, as rotated ones do, zeros where they are not rotated.
template <int kBits_, bool kRotated_, bool kPadded_ = kRotated_>
struct IntegerFormat {
  static constexpr int kBits = kBits_;
  static constexpr bool kRotated = kRotated_, kPadded = kPadded_;
  static constexpr bool kSmoothQuery = kBits == 4;
  static constexpr bool kClipped = kBits == 4 && kRotated;
  static constexpr bool kQueryPerToken = kClipped;  // each token of Q has its scale, in every family
  static constexpr int kHighest = kBits == 8 ? 127 : 7;
  static constexpr int kLowest = kClipped ? -8 : -kHighest;
  static constexpr float kMaximum = kClipped ? 8.5f : kHighest;  // what the largest magnitude of a group is scaled to
};

// Which heads a kernel rotates: of rotate="auto" those that gain by it (common/rotation_choice.cuh).
enum class Rotates { never, always, by_head };
// Of a head that is rotated, or not, by such a kernel.
template <int kBits, Rotates kRotates, bool kRotated>
using FormatOf = IntegerFormat<kBits, kRotated, kRotates != Rotates::never>;

}  // namespace common
