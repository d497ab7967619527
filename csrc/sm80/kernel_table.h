// The attention kernels of the family as launch code sees them.
#pragma once

#include <stdexcept>

#include "sm80/kernels.h"

namespace sm80 {

struct KernelInfo {
  const char* image;  // the cubin that holds it
  const char* name;
  int head_dim, score_bits;
  MaskPolicy mask;
  PvProduct product;

  constexpr bool is(int other_head_dim, int other_bits, MaskPolicy other_mask, PvProduct other_product) const {
    return head_dim == other_head_dim && score_bits == other_bits && mask == other_mask && product == other_product;
  }
};

#define SM80_KERNEL_INFO(head_dim, name, bits, mask, product) \
  KernelInfo{"attention_d" #head_dim, #name, head_dim, bits, mask, product},
#define SM80_MXFP8_KERNEL_INFO(head_dim, name, bits, mask, product) \
  KernelInfo{"attention_mxfp8_d" #head_dim, #name, head_dim, bits, mask, product},
inline constexpr KernelInfo kKernels[] = {
    SM80_ROWS(SM80_KERNEL_INFO, 64)               //
    SM80_ROWS(SM80_KERNEL_INFO, 128)              //
    SM80_ROWS(SM80_KERNEL_INFO, 256)              //
#if !defined(MXFP8) || MXFP8                      // launch code serves images with and without them
    SM80_MXFP8_ROWS(SM80_MXFP8_KERNEL_INFO, 64)   //
    SM80_MXFP8_ROWS(SM80_MXFP8_KERNEL_INFO, 128)  //
    SM80_MXFP8_ROWS(SM80_MXFP8_KERNEL_INFO, 256)  //
#endif
};
#undef SM80_KERNEL_INFO
#undef SM80_MXFP8_KERNEL_INFO

// Throws std::logic_error where there is no such kernel.
constexpr const KernelInfo& kernel_of(int head_dim, int score_bits, MaskPolicy mask, PvProduct product) {
  for (const KernelInfo& kernel : kKernels)
    if (kernel.is(head_dim, score_bits, mask, product)) return kernel;
  throw std::logic_error("sm80/kernels.h has no kernel for a call that was accepted: it needs another row");
}

constexpr bool is_unambiguous() {
  for (const KernelInfo& kernel : kKernels)
    if (&kernel_of(kernel.head_dim, kernel.score_bits, kernel.mask, kernel.product) != &kernel) return false;
  return true;
}
static_assert(is_unambiguous(), "two rows of sm80/kernels.h differ in their names alone");

}  // namespace sm80
