// The order of a step's parts. ptxas's order of instructions follows it. The fastest order differs from kernel to
// kernel; each was found by timing (E035, E053, E106).
#pragma once

#include "sm90/tiles.h"

namespace sm90 {

struct StepOrder {
  bool by_row;     // exponentials row by row
  bool from_last;  // maxima from the last score down
  bool tested;     // whether a row is empty, though none is
  // The next stage is waited for ahead of the softmax. The wait is a loop, and ptxas moves no wait for the values
  // across it: without it, that wait may stand among the exponentials.
  bool stage_first;
  // K's scales of a step are read in the step before, ahead of the wait for the values.
  bool scales_ahead;
  bool packed_at_once;  // behind the wait for the values; else the upper half of each word before it
};

template <class Traits, bool kHasBias>
constexpr StepOrder step_order() {
  constexpr bool kWide = Traits::kHeadDim >= 128, kHalves = Traits::kHeadDim > 128;
  StepOrder order{};
  if (Traits::kKeyEndFromProducer && !kHasBias) {
    order.by_row = true;
    order.from_last = !kWide;
    order.tested = kWide;
    order.packed_at_once = kWide;
  } else if (Traits::kFusedPrologue && !kHasBias) {
    order.by_row = true;
    order.tested = !kWide;
    order.stage_first = kWide;
    order.scales_ahead = true;
  } else if (Traits::kKeyEndFromPrologue && (kWide ? !kHalves : Traits::kBlockN > kTileN)) {
    order.by_row = order.from_last = !kWide;
    order.tested = true;
    order.stage_first = kWide;
    order.scales_ahead = true;
    order.packed_at_once = true;
  } else {
    order.by_row = !kHasBias && (!kWide || Traits::kBlockList || (kHalves && Traits::kCausal));
    order.stage_first = order.from_last = kWide;
    order.tested = !order.from_last;
    order.scales_ahead = kWide || kHasBias;
    order.packed_at_once = kWide;
  }
  return order;
}

}  // namespace sm90
