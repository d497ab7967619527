// The tiles of the attention kernels and the layout of their shared memory: kernels, launch code and tests read them
// here. Plain data, no CUDA headers.
#pragma once

#include "common/tile_lists.h"

namespace sm90 {

constexpr int kThreads = 384;  // a producer warpgroup and two consumer warpgroups
constexpr int kConsumerWarps = 8;
constexpr int kQBuffers = 2;  // the next tile's Q arrives while this one is worked on

constexpr int kElementBox = 64;  // channels in a swizzled row of a tensor of the caller, in 16 bits
constexpr int kElementBoxBytes = 2 * kElementBox;

constexpr int kBlockM = 128;     // query rows of a work tile: two consumer warpgroups of 64
constexpr int kTileN = 128;      // keys of a tile: causal kernels want as many as queries
constexpr int kWideTileN = 192;  // keys of a tile at head_dim 64, where that is faster
constexpr int kFewKeys = 2048;   // up to which calls have kernels of their own (csrc/NOTES.md)
constexpr int kScaleBlock = 64;  // keys that share a set of four K scales (b_k of the paper)
constexpr int kScalesPerBlock = 4;

// Whether the launches of a kernel have the other kernel of dense and listed calls beside them. The call is the dense
// one's if its lists leave out nothing: the other returns at once.
enum class OneOfTwo { never, some, all };

// `kWide`: at head_dim 64, a step takes kWideTileN keys.
template <int kHeadDim_, bool kWide>
struct TileShape {
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr bool kListed = false;  // walks over tile lists
  static constexpr int kProducers = 1;    // threads that load
  static constexpr OneOfTwo kOneOfTwo = kHeadDim_ == 64 && kWide ? OneOfTwo::some : OneOfTwo::never;
  static constexpr bool kRecords = false;      // notes the gaps of tiles
  static constexpr bool kScaledValues = true;  // E4M3, transposed
  static constexpr bool kQuantizesQ = false;   // Q comes as it is, in 16 bits
  static constexpr bool kLeavesOut = false;    // tiles whose keys a mask hides
  static constexpr bool kEndsKeys = false;     // the same, without steps of its own for work tiles of such a mask
  static constexpr int kBlockM = sm90::kBlockM;
  static constexpr int kThreads = sm90::kThreads;
  static constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;  // of a thread
  static constexpr int kBlockN = kHeadDim == 64 && kWide ? kWideTileN : kTileN;
  static constexpr int kStages = kHeadDim == 256 ? 2 : 4;
  // Who says that a stage is free: a lane of each consumer warp, or every lane. compute-sanitizer's racecheck can
  // follow the latter, and beside the long steps of head_dim 256 it costs little.
  static constexpr int kArrivals = kConsumerWarps * (kHeadDim > 128 ? 32 : 1);
  static constexpr int kQArrivals = kArrivals;                       // likewise, of Q's place
  static constexpr int kRowBytes = kHeadDim < 128 ? kHeadDim : 128;  // swizzled rows of Q and K
  static constexpr int kColumnBoxes = kHeadDim / kRowBytes;
  static constexpr int kKeyBytes = kBlockN % 128 == 0 ? 128 : 64;  // swizzled rows of V^T
  static constexpr int kKeyBoxes = kBlockN / kKeyBytes;
  // Vec8 rows below V^T: ones, then zeros. Their product with P is the row sum of the quantized P.
  static constexpr int kVRows = kHeadDim + 8;
  static constexpr int kQBytes = kBlockM * kHeadDim;
  static constexpr int kKBytes = kBlockN * kHeadDim;
  static constexpr int kVBytes = kBlockN * kVRows;
  static constexpr int kCopiedVBytes = kBlockN * kHeadDim;  // without the rows of ones
  static constexpr int kKOffset = kQBuffers * kQBytes;
  static constexpr int kVOffset = kKOffset + kStages * kKBytes;
  static constexpr int kScaleBytes = kBlockN / kScaleBlock * kScalesPerBlock * 4;
  static constexpr int kScaleOffset = kVOffset + kStages * kVBytes;
  static constexpr int kChannelBytes = kHeadDim * 4;
  static constexpr int kFactorBytes = 4 * kBlockM + 2 * kChannelBytes;  // Q's scales, V's scale and mean: with Q's tile
  static constexpr int kFactorOffset = kScaleOffset + kStages * kScaleBytes;
  static constexpr int kBarrierOffset = kFactorOffset + kQBuffers * kFactorBytes;
  static constexpr int kAlignment = 1024;  // of the swizzled tiles; the start is moved up to it
  static constexpr int kSharedBytes = kBarrierOffset + 8 * 2 * (kQBuffers + kStages) + kAlignment;
};

// A shape whose kernels walk over tile lists. Only their producer reads these: what the consumers have to know of a
// work tile (its index and its number of key tiles) lies beside its Q, and the number of each key tile beside its
// stage.
//
// A call whose dense kernel has another tile, or is faster, is one of two kernels'. So lists that leave out nothing
// cost nothing, and such calls have the bits of dense ones. Elsewhere the listed kernel gives these bits.
template <class Dense>
struct ListedShape : Dense {
  static constexpr bool kListed = true;
  static constexpr OneOfTwo kOneOfTwo =
      Dense::kScaledValues && Dense::kHeadDim >= 128 ? OneOfTwo::never : OneOfTwo::some;
  // V as it is takes more copies and an address more: with what a list adds, one thread for K and V holds up the
  // consumers. So K and V have a thread each.
  static constexpr int kProducers = Dense::kScaledValues ? 1 : 2;
  // All lanes of the consumers say that they have read Q's scales and what there is to know of a work tile, so that
  // racecheck can follow it. That costs nothing; in 8b at head_dim 128 one lane that alone reads it takes 2 % longer.
  // A second producer reads it, too.
  static constexpr int kQArrivals = Dense::kThreads - 128 + kProducers - 1;
  static constexpr int kWorkOffset = Dense::kSharedBytes - Dense::kAlignment;
  static constexpr int kWorkBytes = 8;
  static constexpr int kKeyTileOffset = kWorkOffset + kQBuffers * kWorkBytes;
  static constexpr int kSharedBytes = kKeyTileOffset + 4 * Dense::kStages + Dense::kAlignment;
};

// A shape whose dense kernels are launched beside listed ones alone: with the test for that in the kernel of dense
// calls ptxas would order its loop otherwise.
template <class Dense>
struct BesideListedShape : Dense {
  static constexpr OneOfTwo kOneOfTwo = OneOfTwo::all;
};

// A shape whose consumers quantize Q, which comes as it is: into the tile that a dense kernel gets from the
// quantization pass. It comes while the tile before is worked on, and its place is free when the consumers have it in
// registers.
template <class Dense>
struct QuantizingShape : Dense {
  static constexpr bool kQuantizesQ = true;
  static constexpr OneOfTwo kOneOfTwo = OneOfTwo::never;
  static constexpr int kElementBoxes = Dense::kHeadDim / kElementBox;
  static constexpr int kElementBytes = Dense::kBlockM * Dense::kHeadDim * 2;
  static constexpr int kElementBarrierOffset = Dense::kSharedBytes - Dense::kAlignment;
  static constexpr int kElementOffset =
      (kElementBarrierOffset + 2 * 8 + Dense::kAlignment - 1) / Dense::kAlignment * Dense::kAlignment;
  static constexpr int kSharedBytes = kElementOffset + kElementBytes + Dense::kAlignment;
};

// A shape whose kernels leave out what a padding mask hides behind the last key that it does not. Their producer says
// of each work tile beside its Q where that is. As in a ListedShape, all lanes of the consumers say that they have read
// it.
template <class Dense>
struct PaddingShape : QuantizingShape<Dense> {
  using Quantizing = QuantizingShape<Dense>;
  static constexpr bool kLeavesOut = true;
  static constexpr int kQArrivals = Dense::kThreads - 128;
  static constexpr int kKeyEndOffset = Quantizing::kElementBarrierOffset + 2 * 8;
  static_assert(kKeyEndOffset + 4 * kQBuffers <= Quantizing::kElementOffset, "there is room for it");
};

// A shape whose kernels leave out the key tiles behind the last key that a mask for all queries and heads does not
// hide.
template <class Dense>
struct EndingShape : Dense {
  static constexpr bool kEndsKeys = true;
};

// A shape whose kernels note the gaps of tiles (common/tile_gaps.cuh).
template <class Dense>
struct RecordingShape : Dense {
  static constexpr bool kRecords = true;
  static_assert(common::kListTile % Dense::kBlockN == 0, "the keys of a step lie in one tile");
};

}  // namespace sm90
