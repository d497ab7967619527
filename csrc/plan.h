// A call that is decided: all that follows from its signature happens once, when its plan is made or first runs.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "attention_call.h"
#include "kernels.h"
#include "launch_list.h"

// A bit for each of them.
using OperandSet = uint32_t;
constexpr OperandSet only(Operand operand, bool holds = true) { return OperandSet(holds) << operand; }

// Every family of kernels implements one in its launch.cpp. Keeps the kernels. Safe to use from several threads at
// once.
class Plan {
 public:
  virtual ~Plan() = default;
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;

  // Scratch memory that a run needs.
  int64_t workspace_bytes() const { return workspace_bytes_; }
  // Those of q, k and v that the attention phase reads.
  OperandSet attention_reads() const { return attention_reads_; }
  // The signature in words.
  std::string description() const;

  // Enqueues the launches of a Phase on the stream. Throws std::invalid_argument for a phase that there is not and for
  // operands that are missing, misplaced or not this plan's, and std::runtime_error for a failure of the driver.
  //
  // The first run looks up all kernels of the call in the device's primary context, also those of the phase that it
  // does not launch: after a preparation the attention phase can fail only as any launch can.
  void run(const OperandAddresses& addresses, uint64_t stream, uint64_t phase) const;

 protected:
  Plan(const CallSignature& call, std::shared_ptr<const Kernels> kernels, int64_t workspace_bytes,
       OperandSet attention_reads);

  const CallSignature& call() const { return call_; }
  const Kernels& kernels() const { return *kernels_; }

  // All launches of the call. The device's context is current. `in_phases`: its phases are two runs, so that q, k and v
  // may be gone before the attention phase unless it reads them.
  virtual LaunchList launches(bool in_phases) const = 0;

 private:
  struct Made {
    std::atomic<bool> is_ready{false};
    CUcontext context = nullptr;
    LaunchList launches;
  };

  const Made& made(bool in_phases, const OperandAddresses& addresses) const;
  void check(const OperandAddresses& addresses, uint64_t phase) const;

  const CallSignature call_;
  const std::shared_ptr<const Kernels> kernels_;
  const int64_t workspace_bytes_;
  const OperandSet attention_reads_;
  OperandSet used_[3];  // by Phase
  OperandSet known_;
  mutable std::mutex mutex_;
  mutable Made made_[2];
};
