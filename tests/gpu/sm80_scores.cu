// Only the quantization and the integer product of the mma.sync kernels, for one head and HEAD_DIM:
// test_sm80_integer_scores.py compares their results with the reference bit by bit.
#include "sm80/quantize.cuh"
#include "sm80/scores.cuh"

using namespace sm80;

// Grid: query tiles, then key tiles.
extern "C" __global__ void __launch_bounds__(kQuantizeThreads)
    quantize(const __half* q, const __half* k, const float* k_mean, unsigned char* q_tiles, unsigned char* k_tiles,
             float* scales, float* q_mean, int q_length, int kv_length, int head_dim) {
  QuantizeParams p{};
  p.q = {const_cast<__half*>(q), 0, 0, head_dim};
  p.k = {const_cast<__half*>(k), 0, 0, head_dim};
  p.k_mean = k_mean;
  p.q_tiles = q_tiles;
  p.k_tiles = k_tiles;
  p.sizes = {1, 1, q_length, kv_length, head_dim, q_length / kQueryBlock, kv_length / kKeyBlock, kHalf};
  p.query_tiles = p.sizes.query_blocks;
  p.key_tiles = p.sizes.key_blocks;
  p.q_scale = scales;
  p.k_scale = scales + p.query_tiles * query_scales(BITS);
  p.q_mean = BITS == 4 ? q_mean : nullptr;
  p.scale = 1.f;
  p.rotates = ROTATED ? Rotates::always : Rotates::never;
  sm80::quantize<HEAD_DIM, BITS, __half, FloatProduct, IntegerProduct>(p);
}

// Grid: (tiles of 16 queries, key tiles), one warp each. scores: (q_length, kv_length).
extern "C" __global__ void __launch_bounds__(32)
    scores(const unsigned char* q_tiles, const unsigned char* k_tiles, int* scores, int kv_length) {
  constexpr int kGroups = 4, kStart = 1 << 20;
  const int lane = threadIdx.x;
  for (int group = 0; group < 8; group += kGroups) {
    int found[1][kGroups][4];
    const unsigned char* k = k_tiles + blockIdx.y * key_tile_bytes(HEAD_DIM, BITS);
    integer_scores<HEAD_DIM, BITS>(
        found, reinterpret_cast<const uint4*>(q_tiles + blockIdx.x * (query_tile_bytes(HEAD_DIM, BITS) / 8)) + lane, 0,
        reinterpret_cast<const uint4*>(k + group * (key_tile_bytes(HEAD_DIM, BITS) / 8)) + lane, kStart);
    for (int j = 0; j < kGroups; ++j) {
      for (int i = 0; i < 4; ++i) {
        const int row = blockIdx.x * 16 + lane / 4 + i / 2 * 8;
        const int key = blockIdx.y * kKeyBlock + 8 * (group + j) + 2 * (lane % 4) + i % 2;
        scores[static_cast<i64>(row) * kv_length + key] = found[0][j][i] - kStart;
      }
    }
  }
}
