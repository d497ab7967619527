// The attention kernels of the family as launch code sees them.
#pragma once

#include <stdexcept>

#include "sm90/kernel_traits.h"
#include "sm90/kernels.h"

namespace sm90 {

struct KernelInfo {
  const char* image;  // the cubin that holds it
  const char* name;
  PvElement pv;
  int head_dim;
  MaskPolicy mask;
  Variant variant;
  int block_m, block_n;  // query rows of a work tile, keys of a step
  int row_bytes;         // of a swizzled row of Q and K
  int v_row_bytes;       // likewise of V^T, or 0: V is read as the caller has it
  int threads, shared_bytes;

  constexpr bool is(PvElement other_pv, int other_head_dim, MaskPolicy other_mask, Variant other_variant) const {
    return pv == other_pv && head_dim == other_head_dim && mask == other_mask && variant == other_variant;
  }
  constexpr bool has_tile_of(const KernelInfo& other) const {
    return block_m == other.block_m && block_n == other.block_n;
  }
};

template <class Traits>
constexpr KernelInfo kernel_info(const char* image, const char* name) {
  return {image,
          name,
          Traits::kPv,
          Traits::kHeadDim,
          Traits::kMask,
          Traits::kVariant,
          Traits::kBlockM,
          Traits::kBlockN,
          Traits::kRowBytes,
          Traits::kPrecise ? 0 : TransposedV<Traits::kHeadDim, Traits::kBlockN>::kRowBytes,
          Traits::kThreads,
          Traits::kSharedBytes};
}

#define SM90_TEXT_OF(name) #name
#define SM90_TEXT(name) SM90_TEXT_OF(name)  // its argument is expanded
#define SM90_KERNEL_INFO(family, head_dim, suffix, pv, mask, variant)         \
  kernel_info<KernelTraits<PvElement::pv, head_dim, mask, Variant::variant>>( \
      SM90_TEXT(SM90_IMAGE_NAME(family, head_dim)), SM90_TEXT(SM90_KERNEL_NAME(family, head_dim, suffix))),
inline constexpr KernelInfo kKernels[] = {
    SM90_ROWS(attention, 64, SM90_KERNEL_INFO)   //
    SM90_ROWS(attention, 128, SM90_KERNEL_INFO)  //
    SM90_ROWS(attention, 256, SM90_KERNEL_INFO)  //
    SM90_ROWS(precise, 64, SM90_KERNEL_INFO)     //
    SM90_ROWS(precise, 128, SM90_KERNEL_INFO)    //
    SM90_ROWS(precise, 256, SM90_KERNEL_INFO)    //
};
#undef SM90_KERNEL_INFO
#undef SM90_TEXT
#undef SM90_TEXT_OF

// Throws std::logic_error where there is no such kernel.
constexpr const KernelInfo& kernel_of(PvElement pv, int head_dim, MaskPolicy mask, Variant variant) {
  for (const KernelInfo& kernel : kKernels)
    if (kernel.is(pv, head_dim, mask, variant)) return kernel;
  throw std::logic_error("sm90/kernels.h has no kernel for a call that was accepted: it needs another row");
}

constexpr bool is_unambiguous() {
  for (const KernelInfo& kernel : kKernels)
    if (&kernel_of(kernel.pv, kernel.head_dim, kernel.mask, kernel.variant) != &kernel) return false;
  return true;
}
static_assert(is_unambiguous(), "two rows of sm90/kernels.h differ in their names alone");

}  // namespace sm90
