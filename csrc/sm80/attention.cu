// The attention kernels of one head_dim (64, 128 or 256; smaller ones are filled up with zeros), given by the
// definition HEAD_DIM. HALF_VALUES replaces the E4M3 product P V by one in fp16; BLOCK_SCALED: those of block-scaled
// products alone.
#include "sm80/attention.cuh"
#include "sm80/kernels.h"

namespace sm80 {

template <PvProduct>
struct ProductOf;
template <>
struct ProductOf<PvProduct::fp32_sums> {
  using Type = FloatProduct;
};
template <>
struct ProductOf<PvProduct::fp16_sums> {
  using Type = HalfProduct;
};
template <>
struct ProductOf<PvProduct::int8> {
  using Type = IntegerProduct;
};
template <>
struct ProductOf<PvProduct::mxfp8> {
  using Type = E4m3BlockScaled;
};
template <>
struct ProductOf<PvProduct::precise_fp16> {
  using Type = Precise<__half>;
};
template <>
struct ProductOf<PvProduct::precise_bf16> {
  using Type = Precise<__nv_bfloat16>;
};
template <>
struct ProductOf<PvProduct::precise_fp16_sums> {
  using Type = HalfHalf;
};

// Blocks that one SM should hold: as many as the registers of the output allow.
constexpr int min_blocks_per_sm(int head_dim) { return head_dim == 256 ? 1 : head_dim == 128 ? 2 : 3; }

#define KERNEL(head_dim, name, bits, mask, product)                                                      \
  extern "C" __global__ void __launch_bounds__(attention_threads(head_dim), min_blocks_per_sm(head_dim)) \
      name(const __grid_constant__ AttentionParams params) {                                             \
    using Product = typename ProductOf<product>::Type;                                                   \
    static_assert(Product::kVBytes == v_bytes(product, HALF_VALUES) &&                                   \
                  Product::kKeyStages == key_stages(product, HALF_VALUES) &&                             \
                  Product::kOfKeyBlock == (product == PvProduct::int8));                                 \
    Attention<head_dim, bits, Product, mask>::run(params);                                               \
  }
#if BLOCK_SCALED
SM80_MXFP8_ROWS(KERNEL, HEAD_DIM)
#else
SM80_ROWS(KERNEL, HEAD_DIM)
#endif
#undef KERNEL

}  // namespace sm80
