// Sizes of tiles that launch code, kernels and tests share. Plain data, no CUDA headers. What follows from them for one
// kernel is in kernel_traits.h.
#pragma once

namespace sm90 {

constexpr int kWarpgroupThreads = 128;
constexpr int kWarpgroupRows = 64;  // query rows of a consumer warpgroup
constexpr int kQBuffers = 2;        // Q of the next work tile arrives while this one is computed

constexpr int kElementBox = 64;  // channels in a swizzled row of a tensor of the caller, in 16 bits
constexpr int kElementBoxBytes = 2 * kElementBox;

constexpr int kBlockM = 128;       // query rows of a work tile, with two consumer warpgroups
constexpr int kPreciseRows = 384;  // a multiple of the rows of every precise work tile: Q's scales are padded to it
constexpr int kTileN = 128;        // keys of a tile: causal kernels want as many as queries
constexpr int kWideTileN = 192;    // keys of a tile at head_dim 64, where that is faster
constexpr int kMaxShortKv = 2048;  // keys of a short KV at most: such calls have kernels of their own (E074)
constexpr int kScaleBlock = 64;    // keys that share a set of four K scales (b_k of the paper)
constexpr int kScalesPerBlock = 4;

}  // namespace sm90
