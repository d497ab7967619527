// The families of kernels that this module has launch code for.
#pragma once

#include <cstddef>
#include <memory>

#include "attention_call.h"
#include "kernels.h"
#include "plan.h"

// Needs no driver. Throws std::invalid_argument for a call that these kernels cannot run.
using MakePlan = std::unique_ptr<Plan>(const CallSignature&, std::shared_ptr<const Kernels>);

namespace sm80 {
MakePlan make_plan;
}
namespace sm90 {
MakePlan make_plan;
}

struct Family {
  const char* name;
  // Of the sources that launches are made by: images of another one would be launched wrongly. tools/kernel_table.py
  // computes it.
  const char* launch_interface;
  MakePlan* make_plan;
};
extern const Family kFamilies[];
extern const std::size_t kFamilyCount;
