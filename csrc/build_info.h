// What a build was made for and by.
#pragma once

struct BuildInfo {
  const char *architecture, *target, *version, *toolchain, *minimum_driver;
  int minimum_driver_version;  // the CUDA version of that driver, 1000 * major + 10 * minor
};
extern const BuildInfo kBuildInfo;
