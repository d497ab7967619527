// Which kernels compute a call of the sm90 family, and what they are called.
#pragma once

#include <string>

#include "attention_call.h"
#include "common/launch_builder.h"
#include "sm90/kernel_table.h"
#include "sm90/one_pass.h"
#include "sm90/tiles.h"

namespace sm90 {

class KernelChoice {
 public:
  // in_phases: of a call whose phases are launched by themselves.
  KernelChoice(const CallSignature& call, bool in_phases)
      : call_(call),
        in_phases_(in_phases),
        head_dim_(padded_head_dim(call.head_dim)),
        element_(element_name(call.element)) {}

  int head_dim() const { return head_dim_; }
  bool precise() const { return call_.mode == kPrecise; }

  // Whether statistics of kernels that choose rotations, or leave out hidden keys, prepare the call; and whether its Q
  // and K are quantized by kernels that may rotate heads or leave out hidden keys.
  bool has_choices() const { return call_.rotate_by_head || may_hide_keys(call_); }
  bool may_rotate() const { return rotates(call_) != Rotates::never; }
  bool quantizes_by_head() const { return may_rotate() || may_hide_keys(call_); }

  // Whether one launch makes of K and V all that there is to be made.
  bool one_pass_keys() const {
    return call_.mode != k4b && call_.element != kFloat && fits_one_pass(call_.kv_length, head_dim_);
  }
  // Whether the attention kernel quantizes Q: of whole calls alone, since others may have lost Q before it is launched.
  bool quantizes_q() const { return !in_phases_ && is_of_few_keys(); }

  std::string one_pass_name() const { return prepares("one_pass", statistics_way(may_rotate())); }
  std::string statistics_name() const {
    const std::string kind = precise() ? "statistics_k" : "statistics";
    return kind + statistics_way(call_.rotate_by_head) + element_;
  }
  std::string quantize_q_name() const { return prepares("quantize_q", choosing_way(may_rotate())); }
  std::string quantize_name() const {
    return prepares("quantize" + std::to_string(score_bits(call_.mode)), choosing_way(quantizes_by_head()));
  }
  std::string delta_name() const { return (may_hide_keys(call_) ? "delta_hiding_" : "delta_") + element_; }

  const KernelInfo& block_list_kernel() const {
    return kernel_for(biased() ? MaskPolicy::block_list | kAnyBias : MaskPolicy::block_list, Variant::standard);
  }
  const KernelInfo& dense_kernel() const {
    const bool with_bias = biased();
    const Variant standard =
        call_.has_block_mask() && has_dense_fallback() ? Variant::dense_fallback : Variant::standard;
    if (call_.causal) return kernel_for(with_bias ? MaskPolicy::causal | kAnyBias : MaskPolicy::causal, standard);
    if (quantizes_q())
      return kernel_for(with_bias ? MaskPolicy::key_bias | MaskPolicy::padding : MaskPolicy::none,
                        may_rotate() ? Variant::rotating_prologue : Variant::fused_prologue);
    if (is_of_few_keys() && with_bias)  // the bits of the whole call
      return kernel_for(MaskPolicy::key_bias | MaskPolicy::padding, Variant::after_prologue);
    const bool narrow = !precise() && head_dim_ == 64 && !wide();
    return kernel_for(with_bias ? kAnyBias | MaskPolicy::padding : MaskPolicy::none,
                      narrow ? Variant::narrow : standard);
  }
  // Whether this call with a block mask is the dense kernel's if no block is skipped (DenseFallback,
  // sm90/kernel_traits.h).
  bool one_of_two() const { return has_dense_fallback() || !dense_kernel().has_tile_of(block_list_kernel()); }

 private:
  bool biased() const { return call_.mode == k4b || call_.has_mask(); }

  // As it stands in the kernels' names: of those that quantize, and of those that compute statistics.
  static const char* choosing_way(bool chooses) { return chooses ? "_choosing_" : "_"; }
  const char* statistics_way(bool chooses) const { return may_hide_keys(call_) ? "_hiding_" : choosing_way(chooses); }
  // The name of one that prepares tensors of this call.
  std::string prepares(const std::string& kind, const char* way) const {
    return kind + way + element_ + "_d" + std::to_string(head_dim_);
  }

  // Whether there are so few keys that kernels for them are faster: at head_dim 64 where a step of 192 keys takes more
  // keys that do not exist.
  bool few_keys() const {
    const bool narrower = head_dim_ != 64 || round_up(call_.kv_length, kTileN) < round_up(call_.kv_length, kWideTileN);
    return call_.kv_length <= kMaxShortKv && narrower;
  }
  // Whether a step takes kWideTileN keys at head_dim 64.
  bool wide() const { return call_.mode == k8b && !call_.causal && call_.mask.query_stride == 0 && !few_keys(); }
  bool is_of_few_keys() const {
    return call_.mode == k8b && few_keys() && head_dim_ <= 128 && call_.element != kFloat &&
           call_.mask.query_stride == 0 && !call_.causal && rotates(call_) != Rotates::always && !call_.has_lse &&
           !call_.has_block_mask();
  }

  PvElement pv_element() const {
    if (!precise()) return PvElement::e4m3;
    return call_.element == kHalf ? PvElement::fp16 : PvElement::bf16;
  }
  const KernelInfo& kernel_for(MaskPolicy mask, Variant variant) const {
    return kernel_of(pv_element(), head_dim_, mask, variant);
  }
  // Whether such calls have a dense kernel that is launched beside a block-list kernel alone.
  bool has_dense_fallback() const { return precise() && head_dim_ == 256 && !biased(); }

  const CallSignature& call_;
  const bool in_phases_;
  const int head_dim_;
  const std::string element_;
};

}  // namespace sm90
