// What a call must fulfill in every build. A call that does not is refused with std::invalid_argument before anything
// is allocated or launched.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "attention_call.h"
#include "common/tile_lists.h"
#include "common/views.h"

namespace common {

constexpr int kMaxHeadDim = 256, kHeadDimMultiple = 8;
constexpr int64_t kMaxInt = 0x7fffffff;           // head indices are 32-bit in the kernels
constexpr int64_t kMaxLength = kMaxInt - 255;     // token indices too, up to the end of the last tile
constexpr int64_t kMaxTokens = int64_t(1) << 40;  // of all heads together: no byte count comes near to 2^63

// The message is put together only when it is needed.
template <typename... Parts>
void require(bool holds, const Parts&... parts) {
  if (holds) return;
  std::string message;
  (message.append(parts), ...);
  throw std::invalid_argument(message);
}

inline void require_between(const char* name, int64_t value, int64_t least, int64_t most) {
  if (value < least || value > most) {
    throw std::invalid_argument(std::string(name) + " must be from " + std::to_string(least) + " to " +
                                std::to_string(most) + ", got " + std::to_string(value));
  }
}

// What the kernels of a build can do beside mode 8b with FP32 accumulators.
struct Features {
  bool mode_4b, precise, fp16_accumulator;
};

inline void validate(const AttentionCall& call, Features features) {
  constexpr const char* kHere = " on " KERNEL_ARCHITECTURE ", got ";
  require_between("batch", call.batch, 1, kMaxInt);
  require_between("q_heads", call.q_heads, 1, kMaxInt);
  require_between("kv_heads", call.kv_heads, 1, kMaxInt);
  require_between("q_length", call.q_length, 1, kMaxLength);
  require_between("kv_length", call.kv_length, 1, kMaxLength);
  require_between("batch * q_heads", call.batch * call.q_heads, 1, kMaxInt);
  require_between("batch * q_heads * the longer of q_length and kv_length",
                  call.batch * call.q_heads * std::max(call.q_length, call.kv_length), 1, kMaxTokens);
  require(call.q_heads % call.kv_heads == 0, "q_heads must be a multiple of kv_heads, got ",
          std::to_string(call.q_heads), " and ", std::to_string(call.kv_heads));
  require(call.head_dim >= kHeadDimMultiple && call.head_dim <= kMaxHeadDim && call.head_dim % kHeadDimMultiple == 0,
          "head_dim must be a multiple of 8 from 8 to 256, got ", std::to_string(call.head_dim));
  require(call.element == kHalf || call.element == kBfloat16 || call.element == kFloat,
          "element must be 2 (fp16), 3 (bf16) or 4 (fp32), got ", std::to_string(call.element));
  require(call.mask.element >= kNone && call.mask.element <= kFloat,
          "mask_element must be 0 (no mask), 1 (bool), 2 (fp16), 3 (bf16) or 4 (fp32), got ",
          std::to_string(call.mask.element));
  require(call.mode == k8b || (call.mode == k4b && features.mode_4b) || (call.mode == kPrecise && features.precise),
          "mode must be 8", features.mode_4b ? ", 4 (4b)" : "", features.precise ? ", 16 (precise)" : "", kHere,
          std::to_string(call.mode));
  require(call.phase == kWholeCall || call.phase == kPreparation || call.phase == kAttentionPhase,
          "phase must be 0 (the whole call), 1 (preparation) or 2 (attention), got ", std::to_string(call.phase));
  require(call.mode != kPrecise || call.element != kFloat,
          "element must be 2 (fp16) or 3 (bf16) in mode 16 (precise), ", "got ", std::to_string(call.element));
  require(call.mode != kPrecise || call.pv_accumulator == 32, "pv_accumulator must be 32 in mode 16 (precise), got ",
          std::to_string(call.pv_accumulator));
  require(call.pv_accumulator == 32 || (call.pv_accumulator == 16 && features.fp16_accumulator),
          "pv_accumulator must be 32", features.fp16_accumulator ? " or 16" : "", kHere,
          std::to_string(call.pv_accumulator));
  if (call.tiles.key_tiles != 0) {
    const int64_t key_tiles = (call.kv_length + kListTile - 1) / kListTile;
    require(call.tiles.key_tiles == key_tiles && key_tiles <= kMaxListTiles, "tiles_key_tiles must be the tiles of ",
            std::to_string(kListTile), " keys of kv_length, ", std::to_string(key_tiles), " and at most ",
            std::to_string(kMaxListTiles), ", got ", std::to_string(call.tiles.key_tiles));
  }
  require(call.gaps == 0 || (call.tiles.key_tiles == 0 && call.mask.element == kNone && !call.causal),
          "gaps must be 0 in a call with tile lists, a mask or causal order");
  // The kernels take the row maximum before they scale.
  require(call.scale > 0.f && std::isfinite(call.scale), "scale must be positive and finite, got ",
          std::to_string(call.scale));
}

}  // namespace common
