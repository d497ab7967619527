#include "families.h"

#include <iterator>

const Family kFamilies[] = {
    {"sm80", SM80_LAUNCH_INTERFACE, sm80::make_plan},
    {"sm90", SM90_LAUNCH_INTERFACE, sm90::make_plan},
};
const std::size_t kFamilyCount = std::size(kFamilies);
