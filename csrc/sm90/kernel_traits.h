// What one attention kernel is made of: its tiles, its warps, and the layout of its shared memory. Plain data, no CUDA
// headers: launch code and kernels include it.
#pragma once

#include "common/tile_lists.h"
#include "sm90/kernels.h"
#include "sm90/tiles.h"

namespace sm90 {

// V^T in E4M3: swizzled rows of keys, and below them kOnesRows rows, the first of ones and the others of zeros. Their
// product with P is the row sum of the quantized P.
template <int kHeadDim, int kBlockN>
struct TransposedV {
  static constexpr int kOnesRows = 8;
  static constexpr int kRowBytes = kBlockN % 128 == 0 ? 128 : 64;
  static constexpr int kBoxes = kBlockN / kRowBytes;
  static constexpr int kRows = kHeadDim + kOnesRows;
  static constexpr int kBytes = kBlockN * kRows;
  static constexpr int kCopiedBytes = kBlockN * kHeadDim;
};

// V as the caller has it, in 16 bits.
template <int kHeadDim, int kBlockN>
struct CallersV {
  static constexpr int kBoxes = kHeadDim / kElementBox;
  static constexpr int kBoxBytes = kBlockN * kElementBoxBytes;
  static constexpr int kBytes = kBlockN * kHeadDim * 2;
  static constexpr int kCopiedBytes = kBytes;
};

template <bool kPrecise, int kHeadDim, int kBlockN>
struct VTileOf {
  using Type = TransposedV<kHeadDim, kBlockN>;
};
template <int kHeadDim, int kBlockN>
struct VTileOf<true, kHeadDim, kBlockN> {
  using Type = CallersV<kHeadDim, kBlockN>;
};

// Whether a kernel is launched beside one of the same call that visits the active blocks alone, or is that one. Then a
// flag on the GPU says which of the two works, the other returns at once: a block mask that skips nothing costs nothing
// and gives the bits of a call without one. Only where the two have different tiles, or the dense one is faster;
// elsewhere the block-list kernel gives these bits.
enum class DenseFallback { never, sometimes, always };
constexpr DenseFallback dense_fallback(Variant variant, bool block_list, bool precise, bool wide, int head_dim) {
  if (variant == Variant::dense_fallback) return DenseFallback::always;
  if (variant != Variant::standard) return DenseFallback::never;
  const bool other_tile_or_faster = block_list ? precise || head_dim < 128 : wide || (precise && head_dim < 256);
  return other_tile_or_faster ? DenseFallback::sometimes : DenseFallback::never;
}

template <PvElement kPv_, int kHeadDim_, MaskPolicy kMask_, Variant kVariant_>
struct KernelTraits {
  static constexpr PvElement kPv = kPv_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr MaskPolicy kMask = kMask_;
  static constexpr Variant kVariant = kVariant_;
  static constexpr bool kPrecise = kPv != PvElement::e4m3;

  // Block-list kernels are told whether the call is causal: what that changes lies outside of their loop.
  static constexpr bool kCausal = includes(kMask, MaskPolicy::causal);
  static constexpr bool kHasBias = includes(kMask, kAnyBias);
  static constexpr bool kBlockList = includes(kMask, MaskPolicy::block_list);
  static constexpr bool kRotatesQ = kVariant == Variant::rotating_prologue;
  static constexpr bool kFusedPrologue = kVariant == Variant::fused_prologue || kRotatesQ;
  // Their additive terms are those of a mask for all queries.
  static constexpr bool kFewKeys = kFusedPrologue || kVariant == Variant::after_prologue;
  // Where a padding mask ends the keys. The producer says it with each work tile, and those of which the mask leaves
  // all keys before as they are have steps without a mask; or whoever decodes a work tile reads it, because the head
  // was prepared before the kernel started.
  static constexpr bool kKeyEndFromProducer = includes(kMask, MaskPolicy::padding) && kFewKeys;
  static constexpr bool kKeyEndFromPrologue = includes(kMask, MaskPolicy::padding) && !kFewKeys;

  // Precise: three warpgroups, which hide each other's latencies, where their registers suffice. With three, a work
  // tile would have queries of two blocks of a block mask.
  static constexpr int kConsumers = kPrecise && kHeadDim <= 128 && !kBlockList ? 3 : 2;
  static constexpr int kConsumerWarps = 4 * kConsumers;
  static constexpr int kThreads = kWarpgroupThreads * (1 + kConsumers);
  // Threads that load. V as the caller has it takes more copies and an address more: with what a block list adds, one
  // thread for K and V holds up the consumers. So K and V have a thread each there.
  static constexpr int kProducers = kPrecise && kBlockList ? 2 : 1;
  // Registers of a thread: together they fill the register file.
  static constexpr int kProducerRegisters = kConsumers == 2 ? 24 : 32;
  static constexpr int kConsumerRegisters = kConsumers == 2 ? 240 : 160;

  static constexpr bool kWide = !kPrecise && kHeadDim == 64 && kVariant == Variant::standard && !kCausal && !kBlockList;
  static constexpr int kBlockM = kWarpgroupRows * kConsumers;
  // Precise: two warpgroups have the registers for more keys a step, but for those of 256 channels.
  static constexpr int kBlockN =
      kPrecise ? (kConsumers == 2 && kHeadDim < 256 ? 128 : 64) : (kWide ? kWideTileN : kTileN);
  static constexpr int kStages = kPrecise ? (kHeadDim == 256 ? 3 : kHeadDim == 128 ? 4 : 6) : (kHeadDim == 256 ? 2 : 4);

  static constexpr DenseFallback kDenseFallback = dense_fallback(kVariant, kBlockList, kPrecise, kWide, kHeadDim);

  // Threads that say that a stage is free. Precise: the lanes that read its K scales, so that none is written over
  // before it is read. Else one lane of each consumer warp; at head_dim 256 all, which compute-sanitizer's racecheck
  // can follow and which costs little beside long steps.
  static constexpr int kArrivals = kConsumerWarps * (kPrecise ? kScalesPerBlock : kHeadDim > 128 ? 32 : 1);
  // Likewise, of Q's buffer. Where what there is to know of a work tile lies beside Q, all lanes say that they have
  // read it, for racecheck again: that costs nothing, while one lane that alone reads it costs 2 % in 8b at head_dim
  // 128. A second producer reads it, too.
  static constexpr int kQArrivals = kBlockList            ? 32 * kConsumerWarps + kProducers - 1
                                    : kKeyEndFromProducer ? 32 * kConsumerWarps
                                                          : kArrivals;

  // Shared memory: two buffers of Q, the stages' K, V and K scales, what comes with Q, and the mbarriers.
  using VTile = typename VTileOf<kPrecise, kHeadDim, kBlockN>::Type;
  static constexpr int kRowBytes = kHeadDim < 128 ? kHeadDim : 128;  // swizzled rows of Q and K
  static constexpr int kColumnBoxes = kHeadDim / kRowBytes;
  static constexpr int kQBytes = kBlockM * kHeadDim;
  static constexpr int kKBytes = kBlockN * kHeadDim;
  static constexpr int kKOffset = kQBuffers * kQBytes;
  static constexpr int kVOffset = kKOffset + kStages * kKBytes;
  static constexpr int kScaleBytes = kBlockN / kScaleBlock * kScalesPerBlock * 4;
  static constexpr int kScaleOffset = kVOffset + kStages * VTile::kBytes;
  // Q's scales, and in 8b and 4b V's scale and mean.
  static constexpr int kChannelBytes = kPrecise ? 0 : kHeadDim * 4;
  static constexpr int kFactorBytes = 4 * kBlockM + 2 * kChannelBytes;
  static constexpr int kFactorOffset = kScaleOffset + kStages * kScaleBytes;
  static constexpr int kBarrierOffset = kFactorOffset + kQBuffers * kFactorBytes;
  static constexpr int kAlignment = 1024;  // of the swizzled tiles; the start is moved up to it
  static constexpr int kEnd = kBarrierOffset + 8 * 2 * (kQBuffers + kStages);
  // With a block list, for the consumers: index and number of key tiles of a work tile beside its Q, and the number of
  // a key tile beside its stage. Only the producer reads the list.
  static constexpr int kWorkOffset = kEnd;
  static constexpr int kWorkBytes = 8;
  static constexpr int kKeyTileOffset = kWorkOffset + kQBuffers * kWorkBytes;
  static constexpr int kBlockListEnd = kKeyTileOffset + 4 * kStages;
  // With a fused prologue: two mbarriers, where a padding mask ends the keys, and Q as the caller has it, which the
  // consumers quantize into Q's buffer. It arrives while the work tile before is computed, and its place is free when
  // they have it in registers.
  static constexpr int kElementBarrierOffset = kEnd;
  static constexpr int kKeyEndOffset = kElementBarrierOffset + 8 * 2;
  static constexpr int kElementOffset = (kKeyEndOffset + 4 * kQBuffers + kAlignment - 1) / kAlignment * kAlignment;
  static constexpr int kElementBoxes = kHeadDim / kElementBox;
  static constexpr int kElementBytes = kBlockM * kHeadDim * 2;
  static constexpr int kFusedPrologueEnd = kElementOffset + kElementBytes;

  static constexpr int kSharedBytes = (kBlockList       ? kBlockListEnd
                                       : kFusedPrologue ? kFusedPrologueEnd
                                       : kFewKeys       ? kElementOffset
                                                        : kEnd) +
                                      kAlignment;
};

}  // namespace sm90
