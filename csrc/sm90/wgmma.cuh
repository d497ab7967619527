// Warpgroup matrix instructions (sm_90a): shared-memory descriptors and the shapes that the kernels use.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "sm90/ptx.cuh"

namespace sm90 {

// Byte width of one swizzled row in shared memory; the tensor map that fills the tile uses the same swizzle.
// Tiles start at multiples of 1024 bytes, so a step of 32 bytes along the reduction is an addition to the address
// field.
template <int kRowBytes>
__device__ __forceinline__ u64 matrix_descriptor(unsigned shared_address) {
  static_assert(kRowBytes == 128 || kRowBytes == 64, "rows of 64 or 128 bytes");
  constexpr u64 kSwizzle = kRowBytes == 128 ? 1 : 2;
  constexpr u64 kStride = 8 * kRowBytes / 16;  // from one group of eight rows to the next, in 16-byte units
  return u64((shared_address & 0x3ffff) >> 4) | (u64(1) << 16) | (kStride << 32) | (kSwizzle << 62);
}

// Of a tile whose rows run along the reduction (V as it is: keys in rows, kColumns channels of 16 bits a swizzled row
// of 128 bytes): `chunk_bytes` lie between groups of 64 channels. 16 rows further is an addition of 2048 bytes.
__device__ __forceinline__ u64 matrix_descriptor_mn_major(unsigned shared_address, int chunk_bytes) {
  constexpr u64 kStride = 8 * 128 / 16;  // from one group of eight rows to the next, in 16-byte units
  return u64((shared_address & 0x3ffff) >> 4) | (u64(chunk_bytes / 16) << 16) | (kStride << 32) | (u64(1) << 62);
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// The compiler does not see the asynchronous writes to accumulators: these pin them at the points where they change
// hands.
template <int kCount>
__device__ __forceinline__ void warpgroup_fence_operand(int (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(registers[i])::"memory");
}
template <int kCount>
__device__ __forceinline__ void warpgroup_fence_operand(float (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}

// D[64 x kColumns] (+)= A[64 x 32] B[kColumns x 32]^T. Inline assembly wants its operands one by one, and they are no
// parameter pack, so macros write them out: "%0, %1, ..." and the accumulators d[0], d[1], ...
#define SM90_OPERANDS_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define SM90_OPERANDS_32 \
  SM90_OPERANDS_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define SM90_OPERANDS_36 SM90_OPERANDS_32 ", %32, %33, %34, %35"
#define SM90_OPERANDS_48 SM90_OPERANDS_36 ", %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define SM90_OPERANDS_64 \
  SM90_OPERANDS_48 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define SM90_OPERANDS_68 SM90_OPERANDS_64 ", %64, %65, %66, %67"
#define SM90_OPERANDS_80 SM90_OPERANDS_68 ", %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define SM90_OPERANDS_96 \
  SM90_OPERANDS_80 ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"

#define SM90_OPERANDS_128                                                                                            \
  SM90_OPERANDS_96                                                                                                   \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, " \
  "%115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

#define SM90_FOUR(constraint, i) constraint(d[i]), constraint(d[i + 1]), constraint(d[i + 2]), constraint(d[i + 3])
#define SM90_SIXTEEN(constraint, i) \
  SM90_FOUR(constraint, i), SM90_FOUR(constraint, i + 4), SM90_FOUR(constraint, i + 8), SM90_FOUR(constraint, i + 12)
#define SM90_ACCUMULATORS_32(constraint) SM90_SIXTEEN(constraint, 0), SM90_SIXTEEN(constraint, 16)
#define SM90_ACCUMULATORS_36(constraint) SM90_ACCUMULATORS_32(constraint), SM90_FOUR(constraint, 32)
#define SM90_ACCUMULATORS_64(constraint) \
  SM90_ACCUMULATORS_32(constraint), SM90_SIXTEEN(constraint, 32), SM90_SIXTEEN(constraint, 48)
#define SM90_ACCUMULATORS_68(constraint) SM90_ACCUMULATORS_64(constraint), SM90_FOUR(constraint, 64)
#define SM90_ACCUMULATORS_96(constraint) \
  SM90_ACCUMULATORS_64(constraint), SM90_SIXTEEN(constraint, 64), SM90_SIXTEEN(constraint, 80)

#define SM90_ACCUMULATORS_128(constraint) \
  SM90_ACCUMULATORS_96(constraint), SM90_SIXTEEN(constraint, 96), SM90_SIXTEEN(constraint, 112)

// int8, both operands in shared memory. The macro's last arguments number the operands behind the accumulators.
template <int kColumns>
struct WgmmaS8;
#define SM90_WGMMA_S8(columns, count, a_operand, b_operand, p_operand)                                  \
  template <>                                                                                           \
  struct WgmmaS8<columns> {                                                                             \
    static __device__ __forceinline__ void issue(int (&d)[count], u64 a, u64 b, int accumulate) {       \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #p_operand                                      \
                   ", 0;\n"                                                                             \
                   "wgmma.mma_async.sync.aligned.m64n" #columns "k32.s32.s8.s8 {" SM90_OPERANDS_##count \
                   "}, %" #a_operand ", %" #b_operand ", p;\n}\n"                                       \
                   : SM90_ACCUMULATORS_##count("+r")                                                    \
                   : "l"(a), "l"(b), "r"(accumulate));                                                  \
    }                                                                                                   \
  };
SM90_WGMMA_S8(128, 64, 64, 65, 66)
SM90_WGMMA_S8(192, 96, 96, 97, 98)

// int8, A in registers.
template <int kColumns>
struct WgmmaS8FromRegisters;
#define SM90_WGMMA_S8_FROM_REGISTERS(columns, count, a0_operand, a1_operand, a2_operand, a3_operand, b_operand,    \
                                     p_operand)                                                                    \
  template <>                                                                                                      \
  struct WgmmaS8FromRegisters<columns> {                                                                           \
    static __device__ __forceinline__ void issue(int (&d)[count], const unsigned (&a)[4], u64 b, int accumulate) { \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #p_operand                                                 \
                   ", 0;\n"                                                                                        \
                   "wgmma.mma_async.sync.aligned.m64n" #columns "k32.s32.s8.s8 {" SM90_OPERANDS_##count            \
                   "}, {%" #a0_operand ", %" #a1_operand ", %" #a2_operand ", %" #a3_operand "}, %" #b_operand     \
                   ", p;\n}\n"                                                                                     \
                   : SM90_ACCUMULATORS_##count("+r")                                                               \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));                         \
    }                                                                                                              \
  };
SM90_WGMMA_S8_FROM_REGISTERS(64, 32, 32, 33, 34, 35, 36, 37)
SM90_WGMMA_S8_FROM_REGISTERS(128, 64, 64, 65, 66, 67, 68, 69)

// E4M3, A in registers.
template <int kColumns>
struct WgmmaE4m3;
#define SM90_WGMMA_E4M3(columns, count, a0_operand, a1_operand, a2_operand, a3_operand, b_operand, p_operand)        \
  template <>                                                                                                        \
  struct WgmmaE4m3<columns> {                                                                                        \
    static __device__ __forceinline__ void issue(float (&d)[count], const unsigned (&a)[4], u64 b, int accumulate) { \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #p_operand                                                   \
                   ", 0;\n"                                                                                          \
                   "wgmma.mma_async.sync.aligned.m64n" #columns "k32.f32.e4m3.e4m3 {" SM90_OPERANDS_##count          \
                   "}, {%" #a0_operand ", %" #a1_operand ", %" #a2_operand ", %" #a3_operand "}, %" #b_operand       \
                   ", p, 1, 1;\n}\n"                                                                                 \
                   : SM90_ACCUMULATORS_##count("+f")                                                                 \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));                           \
    }                                                                                                                \
  };
SM90_WGMMA_E4M3(72, 36, 36, 37, 38, 39, 40, 41)
SM90_WGMMA_E4M3(128, 64, 64, 65, 66, 67, 68, 69)
SM90_WGMMA_E4M3(136, 68, 68, 69, 70, 71, 72, 73)

// 16 bits, D[64 x kColumns] += A[64 x 16] B[16 x kColumns], A in registers, B's rows along the reduction.
template <class T, int kColumns>
struct Wgmma16;
#define SM90_WGMMA_16(T, type, columns, count, a0_operand, a1_operand, a2_operand, a3_operand, b_operand)             \
  template <>                                                                                                         \
  struct Wgmma16<T, columns> {                                                                                        \
    static __device__ __forceinline__ void issue(float (&d)[count], const unsigned (&a)[4], u64 b) {                  \
      asm volatile("wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." #type "." #type " {" SM90_OPERANDS_##count \
                   "}, {%" #a0_operand ", %" #a1_operand ", %" #a2_operand ", %" #a3_operand "}, %" #b_operand        \
                   ", 1, 1, 1, 1;\n"                                                                                  \
                   : SM90_ACCUMULATORS_##count("+f")                                                                  \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                             \
    }                                                                                                                 \
  };
#define SM90_WGMMA_16_OF_EACH_TYPE(columns, count, a0_operand, a1_operand, a2_operand, a3_operand, b_operand) \
  SM90_WGMMA_16(__half, f16, columns, count, a0_operand, a1_operand, a2_operand, a3_operand, b_operand)       \
  SM90_WGMMA_16(__nv_bfloat16, bf16, columns, count, a0_operand, a1_operand, a2_operand, a3_operand, b_operand)
SM90_WGMMA_16_OF_EACH_TYPE(64, 32, 32, 33, 34, 35, 36)
SM90_WGMMA_16_OF_EACH_TYPE(128, 64, 64, 65, 66, 67, 68)
SM90_WGMMA_16_OF_EACH_TYPE(256, 128, 128, 129, 130, 131, 132)

}  // namespace sm90
