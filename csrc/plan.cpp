#include "plan.h"

#include <cstdio>
#include <stdexcept>
#include <utility>

#include "driver.h"

namespace {

constexpr uint64_t kAlignment = 16;  // kernels read and write vectors of this size
constexpr OperandSet kInputs = only(kQ) | only(kK) | only(kV);
constexpr OperandSet kAligned = kInputs | only(kOut) | only(kWorkspace);
constexpr const char* kPhaseNames[] = {"the whole call", "the preparation", "the attention phase"};

Operand first_of(OperandSet operands) {
  int index = 0;
  while (!(operands >> index & 1)) ++index;
  return static_cast<Operand>(index);
}

std::string hexadecimal(uint64_t address) {
  char text[2 + 16 + 1];
  std::snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(address));
  return text;
}

}  // namespace

Plan::Plan(const CallSignature& call, std::shared_ptr<const Kernels> kernels, int64_t workspace_bytes,
           OperandSet attention_reads)
    : call_(call), kernels_(std::move(kernels)), workspace_bytes_(workspace_bytes), attention_reads_(attention_reads) {
  const OperandSet of_both = only(kWorkspace, workspace_bytes != 0) | only(kMask, call.has_mask());
  used_[kPreparation] = of_both | kInputs | only(kBlockMask, call.has_block_mask()) |
                        only(kRotatedHeads, call.rotate_as_given) | only(kNonfinite, call.is_slice());
  used_[kAttentionPhase] = of_both | attention_reads | only(kOut) | only(kLse, call.has_lse);
  used_[kWholeCall] = used_[kPreparation] | used_[kAttentionPhase];
  known_ = used_[kWholeCall] | only(kWorkspace) | only(kNonfinite) | only(kInvalidBlocks, call.has_block_mask()) |
           only(kRotatedHeads, call.rotate_by_head);
}

std::string Plan::description() const {
  const auto number = [](int64_t value) { return std::to_string(value); };
  std::string text = kernels_->build.architecture + " plan: mode " + number(call_.mode) + ", element " +
                     number(call_.element) + ", batch " + number(call_.batch) + ", heads " + number(call_.q_heads) +
                     " and " + number(call_.kv_heads) + ", lengths " + number(call_.q_length) + " and " +
                     number(call_.kv_length) + ", head_dim " + number(call_.head_dim);
  if (call_.rotate)
    text += call_.rotate_by_head ? ", rotated by the head" : call_.rotate_as_given ? ", rotated as given" : ", rotated";
  if (call_.smooth_v) text += ", smooth V";
  if (call_.causal) text += ", causal";
  if (call_.has_mask()) text += ", mask of element " + number(call_.mask.element);
  if (call_.has_block_mask()) text += ", block mask";
  if (call_.has_lse) text += ", LSE";
  if (call_.is_slice())
    text += ", slice of " + number(call_.slice_tokens) + " tokens from " + number(call_.first_token) + " on";
  if (call_.pv != kPvOfBuild) text += ", P and V in format " + number(call_.pv);
  if (call_.pv_accumulator != 32) text += ", accumulators of " + number(call_.pv_accumulator) + " bits";
  return text + ", device " + number(call_.device) + ", workspace of " + number(workspace_bytes_) + " bytes";
}

void Plan::check(const OperandAddresses& addresses, uint64_t phase) const {
  if (phase > kAttentionPhase) {
    throw std::invalid_argument("phase must be 0 (the whole call), 1 (preparation) or 2 (attention), got " +
                                std::to_string(phase));
  }
  if (call_.is_slice() && phase != kPreparation)
    throw std::invalid_argument("phase must be 1 (preparation) for the plan of a slice, got " + std::to_string(phase));
  OperandSet given = 0;
  for (int index = 0; index < kOperands; ++index)
    given |= only(static_cast<Operand>(index), addresses[static_cast<std::size_t>(index)] != 0);
  if (const OperandSet missing = used_[phase] & ~given) {
    throw std::invalid_argument(std::string(kOperandNames[first_of(missing)]) +
                                " must be an address, got 0: " + kPhaseNames[phase] + " of this plan uses it");
  }
  if (const OperandSet unknown = given & ~known_) {
    const Operand operand = first_of(unknown);
    throw std::invalid_argument(std::string(kOperandNames[operand]) + " must be 0, got " +
                                hexadecimal(addresses[operand]) + ": this plan was made for a call without it");
  }
  for (OperandSet rest = kAligned & used_[phase]; rest; rest &= rest - 1) {
    const Operand operand = first_of(rest);
    if (addresses[operand] % kAlignment != 0) {
      throw std::invalid_argument(std::string(kOperandNames[operand]) + " must be a multiple of " +
                                  std::to_string(kAlignment) + " bytes, got " + hexadecimal(addresses[operand]));
    }
  }
}

const Plan::Made& Plan::made(bool in_phases, const OperandAddresses& addresses) const {
  Made& made = made_[in_phases];
  if (made.is_ready.load(std::memory_order_acquire)) return made;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (made.is_ready.load(std::memory_order_relaxed)) return made;
  made.context = driver::primary_context(call_.device);
  const driver::ContextGuard guard(made.context);
  LaunchList list = launches(in_phases);
  list.encode_maps(addresses);
  made.launches = std::move(list);
  made.is_ready.store(true, std::memory_order_release);
  return made;
}

void Plan::run(const OperandAddresses& addresses, uint64_t stream, uint64_t phase) const {
  check(addresses, phase);
  const Made& ready = made(phase != kWholeCall, addresses);
  const driver::ContextGuard guard(ready.context);
  ready.launches.run(addresses, driver::stream_of(stream), static_cast<Phase>(phase));
}
