// The tiles of the precise mode's attention kernels and the layout of their shared memory. Plain data, no CUDA headers.
#pragma once

#include "sm90/tiles.h"

namespace sm90 {

constexpr int kPreciseRows = 384;  // a multiple of all kBlockM below: Q's scales are padded to it

// `kOfOneBlock`: of the kernels that walk over tile lists (ListedShape) or note gaps (RecordingShape). Their work tile
// is a block of 128 queries, that a list is for: with three warpgroups a work tile would have queries of two blocks,
// whose lists differ. And where gaps are noted, their registers would not suffice at head_dim 128.
template <int kHeadDim_, bool kOfOneBlock = false>
struct PreciseShape {
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr bool kListed = false;
  static constexpr int kProducers = 1;
  static constexpr OneOfTwo kOneOfTwo = kHeadDim < 256 && !kOfOneBlock ? OneOfTwo::some : OneOfTwo::never;
  static constexpr bool kRecords = false;
  static constexpr bool kScaledValues = false;
  static constexpr bool kQuantizesQ = false;
  static constexpr bool kLeavesOut = false;
  static constexpr bool kEndsKeys = false;
  // Consumer warpgroups of 64 query rows: three, which hide each other's latencies, where their registers suffice.
  static constexpr int kConsumers = kHeadDim <= 128 && !kOfOneBlock ? 3 : 2;
  static constexpr int kBlockM = 64 * kConsumers;
  // Two warpgroups have the registers for more keys a step, but for those of 256 channels.
  static constexpr int kBlockN = kConsumers == 2 && kHeadDim < 256 ? 128 : 64;
  static constexpr int kStages = kHeadDim == 256 ? 3 : kHeadDim == 128 ? 4 : 6;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  // Registers of a thread: together they fill the register file.
  static constexpr int kProducerRegisters = kConsumers == 2 ? 24 : 32;
  static constexpr int kConsumerRegisters = kConsumers == 2 ? 240 : 160;
  static constexpr int kArrivals = kScalesPerBlock * 4 * kConsumers;  // lanes that say that a stage is free
  static constexpr int kQArrivals = kArrivals;
  static constexpr int kRowBytes = kHeadDim < 128 ? kHeadDim : 128;  // swizzled rows of Q and K
  static constexpr int kColumnBoxes = kHeadDim / kRowBytes;
  static constexpr int kValueBoxes = kHeadDim / kElementBox;
  static constexpr int kValueBoxBytes = kBlockN * kElementBoxBytes;
  static constexpr int kQBytes = kBlockM * kHeadDim;
  static constexpr int kKBytes = kBlockN * kHeadDim;
  static constexpr int kVBytes = kBlockN * kHeadDim * 2, kCopiedVBytes = kVBytes;
  static constexpr int kKOffset = kQBuffers * kQBytes;
  static constexpr int kVOffset = kKOffset + kStages * kKBytes;
  static constexpr int kScaleBytes = kBlockN / kScaleBlock * kScalesPerBlock * 4;
  static constexpr int kScaleOffset = kVOffset + kStages * kVBytes;
  static constexpr int kFactorBytes = 4 * kBlockM;  // Q's scales, with Q's tile
  static constexpr int kFactorOffset = kScaleOffset + kStages * kScaleBytes;
  static constexpr int kBarrierOffset = kFactorOffset + kQBuffers * kFactorBytes;
  static constexpr int kAlignment = 1024;  // of the swizzled tiles; the start is moved up to it
  static constexpr int kSharedBytes = kBarrierOffset + 8 * 2 * (kQBuffers + kStages) + kAlignment;
};

}  // namespace sm90
