// The plan of one attention call of the sm90 family: what is launched, and in which order. Statistics, quantization and
// attention follow each other; K and V of short sequences are prepared in one pass, and a call with 4-bit scores is
// computed in parts whose smooth-Q correction fits its share of the workspace.
#include <algorithm>
#include <memory>
#include <utility>

#include "attention_call.h"
#include "common/validate.h"
#include "driver.h"
#include "families.h"
#include "kernels.h"
#include "plan.h"
#include "sm90/launch_builder.h"
#include "sm90/workspace.h"

namespace sm90 {

constexpr int kProgrammaticLaunchVersion = 12030;  // the first driver that captures such launches in CUDA graphs

Builder::Builder(const CallSignature& call, const Workspace& workspace, const driver::Images& images, bool in_phases)
    : LaunchBuilder(call, workspace, images),
      choice_(call_, in_phases),
      programmatic_(driver::version() >= kProgrammaticLaunchVersion) {}

void Builder::prepare() {
  if (call_.has_block_mask()) prepare_lists(ListForm::in_order, choice_.one_of_two());
  if (choice_.one_pass_keys()) {
    one_pass();
    if (choice_.quantizes_q()) return;  // the attention kernel does
  } else if (call_.first_token == 0) {
    statistics();
  }
  quantize();
}

void Builder::attend() {
  if (call_.mode == k4b)
    attend_in_parts();
  else
    attention(workspace_.chunk, 0, programmatic_);
}

void Builder::attend_in_parts() {
  Chunk chunk = workspace_.chunk;
  int64_t launches = 0;
  for (int64_t head = 0; head < workspace_.q_bh; head += workspace_.chunk.heads) {
    chunk.first_head = static_cast<int>(head);
    chunk.heads = static_cast<int>(std::min<int64_t>(workspace_.chunk.heads, workspace_.q_bh - head));
    for (int64_t tile = 0; tile < workspace_.query_tiles; tile += workspace_.chunk.tiles) {
      chunk.first_tile = static_cast<int>(tile);
      chunk.tiles = static_cast<int>(std::min<int64_t>(workspace_.chunk.tiles, workspace_.query_tiles - tile));
      delta(chunk);
      attention(chunk, launches++, false);
    }
  }
}

// With a block mask two kernels may be launched, of which the one that is not the call's ends at once.
void Builder::attention(const Chunk& chunk, int64_t number, bool programmatic) {
  if (!call_.has_block_mask() || choice_.one_of_two()) attention(choice_.dense_kernel(), chunk, number, programmatic);
  if (call_.has_block_mask()) attention(choice_.block_list_kernel(), chunk, number, programmatic);
}

namespace {

class AttentionPlan final : public Plan {
 public:
  // Smooth Q's correction is computed of K; the precise mode reads V where it is.
  AttentionPlan(const CallSignature& call, std::shared_ptr<const Kernels> kernels, const Workspace& workspace)
      : Plan(call, std::move(kernels), workspace.bytes, only(kK, call.mode == k4b) | only(kV, call.mode == kPrecise)),
        workspace_(workspace) {}

 private:
  LaunchList launches(bool in_phases) const override {
    return Builder(call(), workspace_, kernels().images, in_phases).build();
  }

  const Workspace workspace_;
};

}  // namespace

std::unique_ptr<Plan> make_plan(const CallSignature& call, std::shared_ptr<const Kernels> kernels) {
  validate(call, kernels->build);
  return std::make_unique<AttentionPlan>(call, std::move(kernels), Workspace(call));
}

}  // namespace sm90
