#include "build_info.h"

const BuildInfo kBuildInfo = {KERNEL_ARCHITECTURE, KERNEL_TARGET,          KERNEL_VERSION,
                              KERNEL_TOOLCHAIN,    KERNEL_MINIMUM_DRIVER,  KERNEL_MINIMUM_DRIVER_VERSION,
                              KERNEL_MODES,        KERNEL_PV_ACCUMULATORS, KERNEL_CAPABILITIES};
