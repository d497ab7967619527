// What the device images of one architecture were made for and by, and what they can do. It lies beside them, in
// build.json, which the build writes from csrc/architectures.json.
#pragma once

#include <string>
#include <utility>
#include <vector>

struct BuildInfo {
  std::string architecture, family;  // such as "sm89", and the sources that it is made of: "sm80"
  std::string target, toolchain, minimum_driver;
  int minimum_driver_version = 0;  // the CUDA version of that driver, 1000 * major + 10 * minor
  std::vector<std::string> modes, pv_formats, pv_accumulators;  // pv_formats: of 8b and 4b, the best first
  std::vector<std::pair<int, int>> capabilities;
  bool half_values = false;  // P and V of 8b and 4b are in fp16: the GPU has no FP8
};
