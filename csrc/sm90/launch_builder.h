// The launches of one call of the family. launch.cpp decides what is launched and in which order;
// launch_preparation.cpp and launch_attention.cpp have a function for each kernel, which fills in its parameters, its
// grid and its shared memory. Which of the kernels that do the same it is, and its name, kernel_choice.h says.
#pragma once

#include <cstdint>

#include "attention_call.h"
#include "common/launch_builder.h"
#include "driver.h"
#include "sm90/kernel_choice.h"
#include "sm90/one_pass.h"
#include "sm90/params.h"
#include "sm90/workspace.h"

namespace sm90 {

class Builder final : public LaunchBuilder<Workspace> {
 public:
  // in_phases: as Plan::launches has it.
  Builder(const CallSignature& call, const Workspace& workspace, const driver::Images& images, bool in_phases);

 private:
  // In launch.cpp. `number`: of the call's launches of an attention kernel.
  void prepare() override;
  void attend() override;
  void attend_in_parts();
  void attention(const Chunk& chunk, int64_t number, bool programmatic);

  // In launch_preparation.cpp.
  void one_pass();
  void statistics();
  void quantize();
  template <class Params>
  void one_pass(Params params, const HeadShare& share);
  template <class Params>
  void statistics(Params params);
  template <class Params>
  void quantize(Params params, bool only_q);
  int statistics_cluster() const;
  void set_statistics(StatisticsParams& params, RunFields& fields, int cluster_blocks) const;
  void set_statistics(ChoosingStatisticsParams& params, RunFields& fields, int cluster_blocks) const;
  void set_quantization(QuantizeParams& params, RunFields& fields) const;
  void set_quantization(ChoosingQuantizeParams& params, RunFields& fields) const;

  // In launch_attention.cpp.
  void delta(const Chunk& chunk);
  template <class Params>
  void delta(const Chunk& chunk, Params params);
  void attention(const KernelInfo& kernel, const Chunk& chunk, int64_t number, bool programmatic);
  void scaled_attention(const KernelInfo& kernel, const Chunk& chunk, int64_t number, bool programmatic);
  void precise_attention(const KernelInfo& kernel);
  void set_attention(AttentionParams& params, RunFields& fields, const KernelInfo& kernel, const Chunk& chunk,
                     int64_t number);
  void launch_attention(const KernelInfo& kernel, const AttentionParams& params, const RunFields& fields,
                        bool programmatic);
  int64_t blocks_of(const Chunk& chunk) const;

  // What parameters of several kernels have.
  template <class Params>
  void set_key_sizes(Params& params) const {
    params.kv_heads = sizes_.kv_heads;
    params.kv_length = sizes_.kv_length;
    params.head_dim = sizes_.head_dim;
  }
  template <class Params>
  void set_query_sizes(Params& params) const {
    params.q_heads = sizes_.q_heads;
    params.q_length = sizes_.q_length;
  }

  const KernelChoice choice_;
  const bool programmatic_;
};

}  // namespace sm90
