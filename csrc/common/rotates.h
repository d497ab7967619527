// Which heads a call rotates. No CUDA headers: both sides include it.
#pragma once

namespace common {

// Of rotate="auto" those that gain by it (common/rotation_choice.cuh). Kernels of the first two are compiled for them;
// kernels of the third learn it of each head, or take any call.
enum class Rotates { never, always, by_head };

}  // namespace common
