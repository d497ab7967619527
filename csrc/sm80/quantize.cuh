// One pass that smooths, rotates and quantizes Q, K and V into the tiles that the attention kernel reads (paper
// sections 3.1 to 3.3).
#pragma once

#include "common/integer_format.cuh"
#include "common/rotation.cuh"
#include "sm80/counted_keys.cuh"
#include "sm80/layout.cuh"
#include "sm80/rows.cuh"
#include "sm80/values.cuh"

namespace sm80 {

// Divides many numbers by one, each quotient rounded as a division rounds it (Markstein 1990): the rounded reciprocal
// gives a quotient that is off by an ulp at most, and the rest that it leaves, which fma has exactly, corrects it. An
// infinite divisor gives NaN.
class Divisor {
 public:
  explicit __device__ __forceinline__ Divisor(float value) : value_(value), reciprocal_(__frcp_rn(value)) {}
  explicit __device__ __forceinline__ Divisor(float2 value_and_reciprocal)
      : value_(value_and_reciprocal.x), reciprocal_(value_and_reciprocal.y) {}
  __device__ __forceinline__ float divide(float x) const {
    const float quotient = x * reciprocal_;
    return fmaf(fmaf(-quotient, value_, x), reciprocal_, quotient);
  }

 private:
  float value_, reciprocal_;
};

// The bits of a number of at most 127 in magnitude plus 1.5 * 2^23: the lowest are those of the nearest whole number.
__device__ __forceinline__ unsigned whole_number_bits(float x) { return __float_as_uint(x + 0x1.8p23f); }

// The format of a head, which is rotated or not: one kernel has both. The transform of rotated heads is a branch that a
// block takes as a whole, the rest are numbers.
template <int kBits_>
class HeadFormat {
  using AsItIs = IntegerFormat<kBits_, false>;
  using Rotated = IntegerFormat<kBits_, true>;

 public:
  static constexpr int kBits = kBits_;
  // Clipping changes no number of a head that is not rotated, whose quotients are at most the largest whole number.
  static constexpr bool kMayClip = Rotated::kClipped;
  static constexpr float kHighest = Rotated::kHighest, kLowest = Rotated::kLowest;
  static constexpr bool kMayHaveScaleOfToken = Rotated::kQueryPerToken;

  explicit __device__ __forceinline__ HeadFormat(bool rotated) : rotated_(rotated) {}
  __device__ __forceinline__ bool rotated() const { return rotated_; }
  __device__ __forceinline__ bool has_scale_of_token() const { return kMayHaveScaleOfToken && rotated_; }
  // One scale for each group of rows; groups without a row keep the smallest scale.
  __device__ __forceinline__ float scale_of(int amax_bits) const {
    const float amax = __int_as_float(amax_bits);
    if constexpr (AsItIs::kMaximum == Rotated::kMaximum) return max_nan(amax / AsItIs::kMaximum, kSmallestScale);
    return max_nan(amax / (rotated_ ? Rotated::kMaximum : AsItIs::kMaximum), kSmallestScale);
  }

 private:
  const bool rotated_;
};

// A thread's eight channels, the first in the lowest bits: two words in INT8, one in INT4. Where a format does not
// clip, no quotient exceeds the largest whole number: a group's scale is its largest magnitude divided by that. Where a
// scale is not finite, no row that it is of has an output, whatever the words hold. `signs`: of the lower and the upper
// four.
template <class Format>
__device__ __forceinline__ void pack_integers(unsigned (&words)[Format::kBits / 4], const float (&x)[8], float scale,
                                              const float2& signs) {
  constexpr int kBits = Format::kBits;
  const Divisor scales[2] = {Divisor(scale * signs.x), Divisor(scale * signs.y)};
  unsigned bits[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    float quotient = scales[i / 4].divide(x[i]);
    if constexpr (Format::kMayClip) quotient = fmaxf(fminf(quotient, Format::kHighest), Format::kLowest);
    bits[i] = whole_number_bits(quotient);
  }
  if constexpr (kBits == 8) {
#pragma unroll
    for (int word = 0; word < 2; ++word) {
      const unsigned low = __byte_perm(bits[4 * word], bits[4 * word + 1], 0x0040);
      const unsigned high = __byte_perm(bits[4 * word + 2], bits[4 * word + 3], 0x0040);
      words[word] = __byte_perm(low, high, 0x5410);
    }
  } else {
    words[0] = 0u;
#pragma unroll
    for (int i = 0; i < 8; ++i) words[0] |= (bits[i] & 0xfu) << 4 * i;
  }
}

// A tile has kScales scales: one for each group, or for each row, whose group may have others.
template <int kHeadDim, class Format>
struct QueryTile {
  static constexpr int kRows = kQueryBlock, kScales = query_scales(Format::kBits);
  static constexpr int kMostGroups = Format::kMayHaveScaleOfToken ? kRows : kQueryGroups;
  static __device__ __forceinline__ int group(const Format& format, int row) {
    return format.has_scale_of_token() ? row : row / 32 * 8 + row % 8;
  }
  static __device__ __forceinline__ int group_of_scale(const Format& format, int index) {
    return kScales == kRows ? group(format, index) : index;
  }
  static __device__ __forceinline__ int offset(int row, int byte) {
    return QkTile<kHeadDim, Format::kBits>::query_offset(row, byte);
  }
};

template <int kHeadDim, class Format>
struct KeyTile {
  static constexpr int kRows = kKeyBlock, kScales = kKeyGroups, kMostGroups = kKeyGroups;
  static __device__ __forceinline__ int group(const Format&, int row) { return row % 8 / 2; }
  static __device__ __forceinline__ int group_of_scale(const Format&, int index) { return index; }
  static __device__ __forceinline__ int offset(int row, int byte) {
    return QkTile<kHeadDim, Format::kBits>::key_offset(row, byte);
  }
};

// What does not depend on the integers: V, and what smoothing takes from Q.
template <int kHeadDim, class T>
struct QuantizedTensors {
  using Pieces = RowPieces<kHeadDim, kQuantizeThreads>;
  static constexpr int kQueryPasses = kQueryBlock / Pieces::kRowsAtOnce;
  static constexpr int kWidth = kHeadDim < 128 ? kHeadDim : 128;  // channels of V that are transposed at a time

  // scale * q . mean(K): what smoothing K takes from every score of a row.
  static __device__ __forceinline__ void store_lse_shift(const QuantizeParams& p, const float (&x)[kQueryPasses][8],
                                                         int bh, int first) {
    const int batch = bh / p.sizes.q_heads, head = bh - batch * p.sizes.q_heads;
    const int kv_bh = batch * p.sizes.kv_heads + head / (p.sizes.q_heads / p.sizes.kv_heads);
    const float* k_mean = p.k_mean + i64(kv_bh) * kHeadDim + Pieces::channel();
#pragma unroll
    for (int pass = 0; pass < kQueryPasses; ++pass) {
      float dot = 0.f;
#pragma unroll
      for (int i = 0; i < 8; ++i) dot = fmaf(x[pass][i], k_mean[i], dot);
#pragma unroll
      for (int distance = 1; distance < Pieces::kPieces; distance *= 2)
        dot += __shfl_xor_sync(0xffffffffu, dot, distance);
      const int token = first + Pieces::row() + pass * Pieces::kRowsAtOnce;
      if (Pieces::channel() == 0 && token < p.sizes.q_length)
        p.lse_shift[i64(bh) * p.sizes.q_length + token] = dot * p.scale;
    }
  }

  // Subtracts the mean of the block's tokens and stores it for the correction (paper equation 3).
  static __device__ __forceinline__ void smooth_queries(const QuantizeParams& p, float (&x)[kQueryPasses][8], i64 tile,
                                                        int first) {
    __shared__ float sums[Pieces::kRowsAtOnce][kHeadDim];
    __shared__ float means[kHeadDim];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float sum = 0.f;
#pragma unroll
      for (int pass = 0; pass < kQueryPasses; ++pass) sum += x[pass][i];
      sums[Pieces::row()][Pieces::channel() + i] = sum;
    }
    __syncthreads();
    const int tokens = min(kQueryBlock, p.sizes.q_length - first);
    if (threadIdx.x < kHeadDim) {
      float sum = 0.f;
      for (int row = 0; row < Pieces::kRowsAtOnce; ++row) sum += sums[row][threadIdx.x];
      means[threadIdx.x] = sum / tokens;
      p.q_mean[tile * kHeadDim + threadIdx.x] = sum / tokens;
    }
    __syncthreads();
#pragma unroll
    for (int pass = 0; pass < kQueryPasses; ++pass) {
      if (Pieces::row() + pass * Pieces::kRowsAtOnce >= tokens) continue;
#pragma unroll
      for (int i = 0; i < 8; ++i) x[pass][i] -= means[Pieces::channel() + i];
    }
  }

  // The scales of a tile of V beside those of its channels, and their reciprocals. All tokens have the tile's: its
  // largest number relative to v_maximum, which its channel's largest is scaled to; at most 1, but in slices. Where
  // tokens are as unlike as kUnlikeTokens, each has its own, which P takes as a factor. What is not finite is left out:
  // it has its say in the scale of its channel.
  static __device__ __forceinline__ void scale_tokens(const QuantizeParams& p, i64 tile, int bh, int first,
                                                      KeyBits keys, float2 (&scales)[kKeyBlock]) {
    __shared__ float largest_of_tokens[kKeyBlock];
    const T* start = head_start<T>(p.v, bh, p.sizes.kv_heads);
    const i64 channels = i64(bh) * kHeadDim + Pieces::channel();
    for (int row = Pieces::row(); row < kKeyBlock; row += Pieces::kRowsAtOnce) {
      float largest = 0.f;
      if (has_key(keys, row)) {
        float x[8];
        load_piece(x, start + (first + row) * p.v.token_stride, Pieces::channel(), p.sizes);
#pragma unroll
        for (int i = 0; i < 8; ++i)
          largest = fmaxf(largest, fabsf(Divisor(p.v_scale[channels + i]).divide(x[i] - p.v_mean[channels + i])));
      }
#pragma unroll
      for (int distance = 1; distance < Pieces::kPieces; distance *= 2)
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, distance));
      if (Pieces::channel() == 0) largest_of_tokens[row] = largest;
    }
    __syncthreads();
    if (threadIdx.x < 32) {
      const auto token = [](int half) { return key_at_position(threadIdx.x + half * 32); };
      unsigned largest_bits = 0u, smallest_bits = 0x7f800000u;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const unsigned bits = __float_as_uint(largest_of_tokens[token(half)]);
        largest_bits = max(largest_bits, bits);
        if (has_key(keys, token(half))) smallest_bits = min(smallest_bits, bits);
      }
      const float largest = __uint_as_float(__reduce_max_sync(0xffffffffu, largest_bits));
      const float smallest = __uint_as_float(__reduce_min_sync(0xffffffffu, smallest_bits));
      const float wanted = largest / p.v_maximum;
      if (p.too_large && wanted > p.largest_tile_scale) *p.too_large = 1;
      const float of_tile = fminf(fmaxf(wanted, kSmallestTileScale), p.largest_tile_scale);
      const bool unlike = smallest * kUnlikeTokens < largest;
      if (threadIdx.x == 0) p.v_tile_scale[tile] = unlike ? -of_tile : of_tile;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float scale = of_tile;
        if (unlike) {
          if (has_key(keys, token(half)))
            scale = fminf(fmaxf(largest_of_tokens[token(half)] / p.v_maximum, of_tile * kSmallestTileScale), of_tile);
          p.v_token_term[tile * kKeyBlock + threadIdx.x + half * 32] = log2f(scale / of_tile);
        }
        scales[token(half)] = make_float2(scale, __frcp_rn(scale));
      }
    }
  }

  // Transposes V through shared memory. Words: (8 channels, 16 bytes, lane). P: the product.
  template <class P>
  static __device__ __forceinline__ void values(const QuantizeParams& p, i64 tile, KeyBits keys,
                                                T (&shared)[kKeyBlock][kWidth + 8]) {
    constexpr int kVBytes = value_tile_bytes(kHeadDim, P::kVBytes);
    using Part = RowPieces<kWidth, kQuantizeThreads>;
    constexpr int kWords = kVBytes / 16 * kWidth / kHeadDim;
    const int bh = static_cast<int>(tile / p.sizes.key_blocks);
    const int first = static_cast<int>(tile - i64(bh) * p.sizes.key_blocks) * kKeyBlock;
    const T* start = head_start<T>(p.v, bh, p.sizes.kv_heads);
    const int tokens = min(kKeyBlock, p.sizes.kv_length - first);
    __shared__ float2 scales[P::kOfKeyBlock ? kKeyBlock : 1];
    if constexpr (P::kOfKeyBlock) scale_tokens(p, tile, bh, first, keys, scales);
    for (int base = 0; base < kHeadDim; base += kWidth) {
      __syncthreads();
      for (int row = Part::row(); row < tokens; row += Part::kRowsAtOnce) {
        float x[8];
        load_piece(x, start + (first + row) * p.v.token_stride, base + Part::channel(), p.sizes);
#pragma unroll
        for (int i = 0; i < 8; i += 2) store_pair(&shared[row][Part::channel() + i], x[i], x[i + 1]);
      }
      __syncthreads();
      uint4* out = reinterpret_cast<uint4*>(p.v_tiles + tile * kVBytes) + base / kWidth * kWords;
      for (int at = threadIdx.x; at < kWords; at += kQuantizeThreads) {
        const int lane = at % 32, word = at / 32 % P::kWords;
        const int channel = at / (32 * P::kWords) * 8 + lane / 4;
        // All keys of a word lie at places behind this one that the compiler knows.
        const int first_key = 64 / P::kWords * word + lane % 4 * 2;
        const KeyBits keys_of_word = keys >> first_key;
        const auto counts = [&](int key) { return has_key(keys_of_word, key - first_key); };
        if constexpr (P::kScaled) {
          const i64 statistic = i64(bh) * kHeadDim + base + channel;
          const float mean = p.v_mean[statistic];
          const Divisor scale(p.v_scale[statistic]);
          const auto value = [&](int key) {
            float x = counts(key) ? scale.divide(to_float(shared[key][channel]) - mean) : 0.f;
            if constexpr (P::kOfKeyBlock) x = Divisor(scales[key]).divide(x);
            // What storable_amax cuts off. Comparisons keep a NaN.
            return x > p.v_maximum ? p.v_maximum : x < -p.v_maximum ? -p.v_maximum : x;
          };
          out[at] = P::operand(value, word, lane % 4);
        } else {
          const auto value = [&](int key) { return counts(key) ? to_float(shared[key][channel]) : 0.f; };
          out[at] = P::operand(value, word, lane % 4);
        }
      }
    }
  }
};

template <int kHeadDim, int kBits, class T>
class Quantize {
  using Format = HeadFormat<kBits>;
  using Tensors = QuantizedTensors<kHeadDim, T>;
  using Pieces = typename Tensors::Pieces;
  using Queries = QueryTile<kHeadDim, Format>;
  using Keys = KeyTile<kHeadDim, Format>;
  template <class Tile>
  static constexpr int kPasses = Tile::kRows / Pieces::kRowsAtOnce;
  static constexpr int kQBytes = query_tile_bytes(kHeadDim, kBits), kKBytes = key_tile_bytes(kHeadDim, kBits);

 public:
  static __device__ __forceinline__ void queries(const QuantizeParams& p, i64 tile, const Format& format) {
    const int bh = static_cast<int>(tile / p.sizes.query_blocks);
    const int first = static_cast<int>(tile - i64(bh) * p.sizes.query_blocks) * kQueryBlock;
    const T* start = head_start<T>(p.q, bh, p.sizes.q_heads);
    float x[kPasses<Queries>][8];
#pragma unroll
    for (int pass = 0; pass < kPasses<Queries>; ++pass) {
      const int token = first + Pieces::row() + pass * Pieces::kRowsAtOnce;
      if (token < p.sizes.q_length) {
        load_piece(x[pass], start + token * p.q.token_stride, Pieces::channel(), p.sizes);
      } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) x[pass][i] = 0.f;
      }
    }
    if (p.lse_shift) Tensors::store_lse_shift(p, x, bh, first);
    if (p.q_mean) Tensors::smooth_queries(p, x, tile, first);
    rotate<Queries>(x, format);
    const float multiplier = p.scale * kLog2E * (format.rotated() ? Rotation<Pieces::kPieces>::kInverseSize : 1.f);
    store_tile<Queries>(x, p.q_tiles + tile * kQBytes, p.q_scale + tile * Queries::kScales, multiplier, format);
  }

  static __device__ __forceinline__ void keys(const QuantizeParams& p, i64 tile, KeyBits keys, const Format& format) {
    const int bh = static_cast<int>(tile / p.sizes.key_blocks);
    const int first = static_cast<int>(tile - i64(bh) * p.sizes.key_blocks) * kKeyBlock;
    const T* start = head_start<T>(p.k, bh, p.sizes.kv_heads);
    const float* mean = p.k_mean + i64(bh) * kHeadDim + Pieces::channel();
    const KeyBits keys_of_thread = keys >> Pieces::row();
    float x[kPasses<Keys>][8];
#pragma unroll
    for (int pass = 0; pass < kPasses<Keys>; ++pass) {
      const int token = first + Pieces::row() + pass * Pieces::kRowsAtOnce;
      if (has_key(keys_of_thread, pass * Pieces::kRowsAtOnce)) {
        load_piece(x[pass], start + token * p.k.token_stride, Pieces::channel(), p.sizes);
#pragma unroll
        for (int i = 0; i < 8; ++i) x[pass][i] -= mean[i];
      } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) x[pass][i] = 0.f;
      }
    }
    rotate<Keys>(x, format);
    store_tile<Keys>(x, p.k_tiles + tile * kKBytes, p.k_scale + tile * Keys::kScales, 1.f, format);
  }

 private:
  template <class Tile>
  static __device__ __forceinline__ void store_tile(const float (&x)[kPasses<Tile>][8], unsigned char* tile,
                                                    float* scales, float multiplier, const Format& format) {
    __shared__ int amax[Tile::kMostGroups];  // bits of non-negative floats, a NaN above all numbers
    if (threadIdx.x < Tile::kMostGroups) amax[threadIdx.x] = 0;
    __syncthreads();
#pragma unroll
    for (int pass = 0; pass < kPasses<Tile>; ++pass) {
      float largest = fabsf(x[pass][0]);
#pragma unroll
      for (int i = 1; i < 8; ++i) largest = max_nan(largest, fabsf(x[pass][i]));
#pragma unroll
      for (int distance = 1; distance < Pieces::kPieces; distance *= 2)
        largest = max_nan(largest, __shfl_xor_sync(0xffffffffu, largest, distance));
      if (Pieces::channel() == 0)
        atomicMax(&amax[Tile::group(format, Pieces::row() + pass * Pieces::kRowsAtOnce)], __float_as_int(largest));
    }
    __syncthreads();
    if (threadIdx.x < Tile::kScales)
      scales[threadIdx.x] = format.scale_of(amax[Tile::group_of_scale(format, threadIdx.x)]) * multiplier;
    const float2 signs = format.rotated() ? Rotation<Pieces::kPieces>::output_signs() : make_float2(1.f, 1.f);
#pragma unroll
    for (int pass = 0; pass < kPasses<Tile>; ++pass) {
      const int row = Pieces::row() + pass * Pieces::kRowsAtOnce;
      unsigned words[kBits / 4];
      pack_integers<Format>(words, x[pass], format.scale_of(amax[Tile::group(format, row)]), signs);
#pragma unroll
      for (int word = 0; word < kBits / 4; ++word) {
        const int byte = Pieces::channel() * kBits / 8 + word * 4;
        *reinterpret_cast<unsigned*>(tile + Tile::offset(row, byte)) = words[word];
      }
    }
  }
  template <class Tile>
  static __device__ __forceinline__ void rotate(float (&x)[kPasses<Tile>][8], const Format& format) {
    if (!format.rotated()) return;
    const Rotation<Pieces::kPieces> rotation;
#pragma unroll
    for (int pass = 0; pass < kPasses<Tile>; ++pass) {
      rotation.change_signs(x[pass]);
      rotation.transform(x[pass]);
    }
  }
};

// `Product` and `OtherProduct`: those of P V for which V is stored, as the call wants it.
template <int kHeadDim, int kBits, class T, class Product, class OtherProduct>
__device__ __forceinline__ void quantize(const QuantizeParams& p) {
  using Numbers = Quantize<kHeadDim, kBits, T>;
  using Tensors = QuantizedTensors<kHeadDim, T>;
  const auto format_of = [&](i64 slice) {
    return HeadFormat<kBits>(p.rotated ? p.rotated[slice] != 0 : p.rotates == Rotates::always);
  };
  const i64 block = blockIdx.x;
  if (block < p.query_tiles) {
    const i64 bh = block / p.taken_query_blocks;
    const i64 tile = bh * p.sizes.query_blocks + p.first_query_block + block - bh * p.taken_query_blocks;
    return Numbers::queries(p, tile, format_of(bh / (p.sizes.q_heads / p.sizes.kv_heads)));
  }
  const bool is_key = block < p.query_tiles + p.key_tiles;
  const i64 place = block - p.query_tiles - (is_key ? 0 : p.key_tiles);
  const int slice = static_cast<int>(place / p.taken_key_blocks);
  const int in_slice = p.first_key_block + static_cast<int>(place - i64(slice) * p.taken_key_blocks);
  const i64 tile = i64(slice) * p.sizes.key_blocks + in_slice;
  const int first = in_slice * kKeyBlock;
  const KeyBits keys = counted_keys(p.mask, p.shown, slice, first, p.sizes);
  if (is_key) return Numbers::keys(p, tile, keys, format_of(slice));
  __shared__ __align__(16) T shared[kKeyBlock][Tensors::kWidth + 8];
  if (p.other_product) {
    Tensors::template values<OtherProduct>(p, tile, keys, shared);
  } else {
    Tensors::template values<Product>(p, tile, keys, shared);
  }
}

}  // namespace sm80
