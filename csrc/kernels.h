// The kernels of one architecture: what they can do, and their device images.
#pragma once

#include <utility>

#include "build_info.h"
#include "driver.h"

struct Kernels {
  explicit Kernels(BuildInfo info) : build(std::move(info)), images(build) {}
  Kernels(const Kernels&) = delete;
  Kernels& operator=(const Kernels&) = delete;

  const BuildInfo build;
  driver::Images images;
};
