// An architecture whose calls launch one kernel with one tensor map, for the tests of the binding.
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

#include "attention_call.h"
#include "families.h"
#include "kernels.h"
#include "launch_list.h"
#include "plan.h"

namespace {

struct Params {
  int64_t length;
  const void* lse;
  TensorMap map;
};

class TestPlan final : public Plan {
 public:
  TestPlan(const CallSignature& call, std::shared_ptr<const Kernels> kernels)
      : Plan(call, std::move(kernels), 16 * call.batch, only(kK, call.mode == k4b)) {}

 private:
  LaunchList launches(bool) const override {
    LaunchList list;
    Params params{};
    RunFields fields(params);
    params.length = call().q_length;
    fields.bind(params.lse, kLse, 8);
    fields.bind(params.map,
                list.add_map({driver::MapElement::fp16,
                              2,
                              {static_cast<uint64_t>(call().head_dim), static_cast<uint64_t>(call().q_length)},
                              {static_cast<uint64_t>(2 * call().q.token)},
                              {64, 128},
                              driver::MapSwizzle::bytes_128},
                             kWorkspace, 0));
    const unsigned processors = static_cast<unsigned>(driver::multiprocessor_count(call().device));
    const int shared_bytes = 1000 * call().mode;
    const CUfunction kernel = kernels().images.kernel("test_image", "test_kernel", shared_bytes);
    list.add(kAttentionPhase, kernel, {processors, 2}, 384, shared_bytes, params, fields, {call().causal});
    return list;
  }
};

std::unique_ptr<Plan> make_plan(const CallSignature& call, std::shared_ptr<const Kernels> kernels) {
  if (call.head_dim > 256) {
    throw std::invalid_argument("head_dim must be at most 256, got " + std::to_string(call.head_dim));
  }
  return std::make_unique<TestPlan>(call, std::move(kernels));
}

}  // namespace

const Family kFamilies[] = {{"sm99", "of the tests", make_plan}};
const std::size_t kFamilyCount = 1;
