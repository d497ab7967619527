// The shared memory of one attention block: tile sizes, ring buffers and their barriers.
#pragma once

#include "sm90_params.h"

namespace sm90 {

constexpr int kThreads = 384;
constexpr int kConsumerWarps = 8;
constexpr int kQBuffers = 2;  // the next tile's Q arrives while this one is worked on

template <int kHeadDim_, int kBlockN_, int kStages_>
struct TileShape {
    static constexpr int kHeadDim = kHeadDim_;
    static constexpr int kBlockN = kBlockN_;
    static constexpr int kStages = kStages_;
    // Who says that a buffer is free: a lane of each consumer warp, or every lane. compute-sanitizer's racecheck can follow the
    // latter, and beside the long steps of head_dim 256 it costs little.
    static constexpr bool kEveryLaneArrives = kHeadDim > 128;
    static constexpr int kArrivals = kConsumerWarps * (kEveryLaneArrives ? 32 : 1);
    static constexpr int kRowBytes = kHeadDim < 128 ? kHeadDim : 128;  // swizzled rows of Q and K
    static constexpr int kColumnBoxes = kHeadDim / kRowBytes;
    static constexpr int kKeyBytes = kBlockN % 128 == 0 ? 128 : 64;  // swizzled rows of V^T
    static constexpr int kKeyBoxes = kBlockN / kKeyBytes;
    // Eight rows below V^T: ones, then zeros. Their product with P is the row sum of the quantised P.
    static constexpr int kVRows = kHeadDim + 8;
    static constexpr int kQBytes = kBlockM * kHeadDim;
    static constexpr int kKBytes = kBlockN * kHeadDim;
    static constexpr int kVBytes = kBlockN * kVRows;
    static constexpr int kKOffset = kQBuffers * kQBytes;
    static constexpr int kVOffset = kKOffset + kStages * kKBytes;
    static constexpr int kScaleBytes = kBlockN / kScaleBlock * kScalesPerBlock * 4;
    static constexpr int kScaleOffset = kVOffset + kStages * kVBytes;
    static constexpr int kChannelBytes = kHeadDim * 4;
    static constexpr int kFactorBytes = 4 * kBlockM + 2 * kChannelBytes;  // Q's scales, V's scale and mean: with Q's tile
    static constexpr int kFactorOffset = kScaleOffset + kStages * kScaleBytes;
    static constexpr int kBarrierOffset = kFactorOffset + kQBuffers * kFactorBytes;
    static constexpr int kSharedBytes = kBarrierOffset + 8 * 2 * (kQBuffers + kStages) + 1024;  // 1024 to align the start
};

// Shared-memory addresses of the ring buffers and of their barriers.
template <class Shape>
struct Buffers {
    unsigned base;

    __device__ __forceinline__ unsigned q(int i) const { return base + i * Shape::kQBytes; }
    __device__ __forceinline__ unsigned k(int i) const { return base + Shape::kKOffset + i * Shape::kKBytes; }
    __device__ __forceinline__ unsigned v(int i) const { return base + Shape::kVOffset + i * Shape::kVBytes; }
    __device__ __forceinline__ unsigned k_scale(int i) const { return base + Shape::kScaleOffset + i * Shape::kScaleBytes; }
    __device__ __forceinline__ unsigned q_scale(int i) const { return base + Shape::kFactorOffset + i * Shape::kFactorBytes; }
    __device__ __forceinline__ unsigned v_scale(int i) const { return q_scale(i) + 4 * kBlockM; }
    __device__ __forceinline__ unsigned v_mean(int i) const { return v_scale(i) + Shape::kChannelBytes; }
    __device__ __forceinline__ unsigned barrier(int i) const { return base + Shape::kBarrierOffset + 8 * i; }
    __device__ __forceinline__ unsigned q_full(int i) const { return barrier(i); }
    __device__ __forceinline__ unsigned q_empty(int i) const { return barrier(kQBuffers + i); }
    __device__ __forceinline__ unsigned full(int i) const { return barrier(2 * kQBuffers + i); }
    __device__ __forceinline__ unsigned empty(int i) const { return barrier(2 * kQBuffers + Shape::kStages + i); }
};

// Where the count-th use of a ring of kCount buffers finds its buffer, and the phase bit of that use.
template <int kCount>
struct Slot {
    int index, phase;
    __device__ __forceinline__ explicit Slot(unsigned count) : index(count % kCount), phase(count / kCount % 2) {}
};

}  // namespace sm90
