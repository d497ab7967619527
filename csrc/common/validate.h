// What a call must fulfill in every build. A call that does not is refused with std::invalid_argument when its plan is
// made.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "attention_call.h"
#include "build_info.h"
#include "common/tile_lists.h"
#include "common/views.h"

namespace common {

constexpr int kMaxHeadDim = 256, kHeadDimMultiple = 8;
constexpr int64_t kMaxInt = 0x7fffffff;           // head indices are 32-bit in the kernels
constexpr int64_t kMaxLength = kMaxInt - 255;     // token indices too, up to the end of the last tile
constexpr int64_t kMaxTokens = int64_t(1) << 40;  // of all heads together: no byte count comes near to 2^63
constexpr int kVectorBytes = 16;                  // tokens start at a multiple of it

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

// One value of a field, and the name of what a build must have for it.
struct Choice {
  int value;
  const char *name, *shown;
};

// That a field has one of the values for which this build has kernels.
template <std::size_t kCount>
void require_choice(const char* field, int value, const Choice (&choices)[kCount],
                    const std::vector<std::string>& names, const BuildInfo& build) {
  std::string possible;
  for (const Choice& choice : choices) {
    if (std::find(names.begin(), names.end(), choice.name) == names.end()) continue;
    if (choice.value == value) return;
    possible += (possible.empty() ? "" : " or ") + std::string(choice.shown);
  }
  throw std::invalid_argument(std::string(field) + " must be " + possible + " on " + build.architecture + ", got " +
                              std::to_string(value));
}

// The strides of axes that have more than one element, which alone are used.
inline void require_aligned(const char* name, const TensorStrides& strides, const CallSignature& call, int64_t heads,
                            int64_t tokens) {
  const int64_t multiple = kVectorBytes / (call.element == kFloat ? 4 : 2);
  const auto require_multiple = [&](const char* axis, int64_t stride, int64_t size) {
    require(size == 1 || stride % multiple == 0, name, axis, " must be a multiple of ", std::to_string(multiple),
            " elements (", std::to_string(kVectorBytes), " bytes), got ", std::to_string(stride));
  };
  require_multiple("_batch_stride", strides.batch, call.batch);
  require_multiple("_head_stride", strides.head, heads);
  require_multiple("_token_stride", strides.token, tokens);
}

inline void validate(const CallSignature& call, const BuildInfo& build) {
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
  constexpr Choice kModes[] = {{k8b, "8b", "8 (8b)"}, {k4b, "4b", "4 (4b)"}, {kPrecise, "precise", "16 (precise)"}};
  require_choice("mode", call.mode, kModes, build.modes, build);
  require(call.mode != kPrecise || call.element != kFloat,
          "element must be 2 (fp16) or 3 (bf16) in mode 16 (precise), got ", std::to_string(call.element));
  constexpr Choice kFormats[] = {{kPvFp8, "fp8", "1 (fp8)"},
                                 {kPvFp16, "fp16", "2 (fp16)"},
                                 {kPvInt8, "int8", "3 (int8)"},
                                 {kPvMxfp8, "mxfp8", "4 (mxfp8)"}};
  if (call.mode == kPrecise) {
    require(call.pv == kPvOfBuild || call.pv == kPvFp16, "pv must be 0 or 2 (fp16) in mode 16 (precise), got ",
            std::to_string(call.pv));
  } else if (call.pv != kPvOfBuild) {
    require_choice("pv", call.pv, kFormats, build.pv_formats, build);
  }
  require(call.rotate || !call.rotate_by_head, "rotate_by_head must be False in a call without rotate");
  require(call.rotate || !call.rotate_as_given, "rotate_as_given must be False in a call without rotate");
  require(!call.rotate_by_head || !call.rotate_as_given, "rotate_as_given must be False in a call with rotate_by_head");
  constexpr Choice kAccumulators[] = {{32, "fp32", "32"}, {16, "fp16", "16"}};
  require_choice("pv_accumulator", call.pv_accumulator, kAccumulators, build.pv_accumulators, build);
  require((call.pv != kPvInt8 && call.pv != kPvMxfp8) || call.pv_accumulator == 32,
          "pv_accumulator must be 32 with pv 3 (int8) and 4 (mxfp8), got ", std::to_string(call.pv_accumulator));
  if (call.has_block_mask()) {
    const int64_t key_blocks = (call.kv_length + kListTile - 1) / kListTile;
    require(call.block_mask.key_blocks == key_blocks && key_blocks <= kMaxListTiles,
            "block_mask_key_blocks must be the blocks of ", std::to_string(kListTile), " keys of kv_length, ",
            std::to_string(key_blocks), " and at most ", std::to_string(kMaxListTiles), ", got ",
            std::to_string(call.block_mask.key_blocks));
  }
  if (call.is_slice()) {
    const int64_t end = call.first_token + call.slice_tokens;
    require_between("first_token", call.first_token, 0, call.kv_length - 1);
    require_between("slice_tokens", call.slice_tokens, 1, call.kv_length - call.first_token);
    require(call.first_token % kSliceMultiple == 0 && (end == call.kv_length || end % kSliceMultiple == 0),
            "a slice must begin and end at a multiple of ", std::to_string(kSliceMultiple),
            " tokens or at the last one, got ", std::to_string(call.first_token), " to ", std::to_string(end));
    require(call.mode == k8b && call.q_length == call.kv_length && call.kv_length >= kLeastSlicedTokens &&
                !call.has_mask() && !call.has_block_mask(),
            "slices must be of self-attention in mode 8 (8b) without masks of at least ",
            std::to_string(kLeastSlicedTokens), " tokens");
  } else {
    require_between("first_token", call.first_token, 0, 0);
  }
  // The kernels take the row maximum before they scale.
  require(call.scale > 0.f && std::isfinite(call.scale), "scale must be positive and finite, got ",
          std::to_string(call.scale));
  require_aligned("q", call.q, call, call.q_heads, call.q_length);
  require_aligned("k", call.k, call, call.kv_heads, call.kv_length);
  require_aligned("v", call.v, call, call.kv_heads, call.kv_length);
  require_aligned("out", call.out, call, call.q_heads, call.q_length);
}

}  // namespace common
