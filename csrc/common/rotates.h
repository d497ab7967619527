// Which heads a call rotates. No CUDA headers: both sides include it.
#pragma once

namespace common {

// By head those that gain by it (common/rotation_choice.cuh), as given those that an operand of the call names. Kernels
// of the first two are compiled for them; others learn it of each head, or take any call.
enum class Rotates { never, always, by_head, as_given };

}  // namespace common
