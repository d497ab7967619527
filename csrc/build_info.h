// What a build was made for and by, and what it can do: the build takes it from csrc/architectures.json.
#pragma once

struct BuildInfo {
  const char *architecture, *target, *version, *toolchain, *minimum_driver;
  int minimum_driver_version;  // the CUDA version of that driver, 1000 * major + 10 * minor
  // Names with commas between: "8b,4b,precise", "int8,fp8", "fp32,fp16" and "12.0,12.1". pv_formats: those of 8b and
  // 4b, the one that suits the hardware best first.
  const char *modes, *pv_formats, *pv_accumulators, *capabilities;
};
extern const BuildInfo kBuildInfo;
