// The integers of quantized Q and K: comfy_sage2/quantize/formats.py.
#pragma once

namespace common {

// Rotated values are nearly normal: in 4 bits a finer step then gains more than the few clamped values lose.
template <int kBits_, bool kRotated_>
struct IntegerFormat {
  static constexpr int kBits = kBits_;
  static constexpr bool kRotated = kRotated_;
  static constexpr bool kSmoothQuery = kBits == 4;
  static constexpr bool kClipped = kBits == 4 && kRotated;
  static constexpr bool kQueryPerToken = kClipped;  // each token of Q has its scale, in every family
  static constexpr int kHighest = kBits == 8 ? 127 : 7;
  static constexpr int kLowest = kClipped ? -8 : -kHighest;
  static constexpr float kMaximum = kClipped ? 8.5f : kHighest;  // what the largest magnitude of a group is scaled to
};

}  // namespace common
