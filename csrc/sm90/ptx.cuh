// Hopper's asynchronous machinery in PTX: barriers in shared memory, bulk tensor copies, register hand-over, launch
// order.
#pragma once

#include "sm90/params.h"

namespace sm90 {

__device__ __forceinline__ unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void mbarrier_init(unsigned barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void arrive_and_expect_tx(unsigned barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void mbarrier_arrive(unsigned barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void mbarrier_wait(unsigned barrier, int parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

__device__ __forceinline__ void tma_load_3d(unsigned destination, const TensorMap* map, unsigned barrier, int column,
                                            int row, int slice) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], "
      "[%2];" ::"r"(destination),
      "l"(map), "r"(barrier), "r"(column), "r"(row), "r"(slice)
      : "memory");
}
__device__ __forceinline__ void tma_load_4d(unsigned destination, const TensorMap* map, unsigned barrier, int column,
                                            int row, int slice, int group) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];" ::"r"(destination),
      "l"(map), "r"(barrier), "r"(column), "r"(row), "r"(slice), "r"(group)
      : "memory");
}
// Neighboring bytes: both addresses and the count are multiples of 16.
__device__ __forceinline__ void bulk_copy_g2s(unsigned destination, const void* source, int bytes, unsigned barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(destination),
      "l"(source), "r"(bytes), "r"(barrier)
      : "memory");
}
// 16 bytes, both addresses multiples of 16; zeros where they do not exist. `cp_async_wait` waits for all copies of the
// thread, whose results the thread itself then sees.
__device__ __forceinline__ void cp_async_or_zero(unsigned destination, const void* source, bool exists) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(destination), "l"(source), "r"(exists ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void cp_async_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }
// What L2 gives up first, for data that nothing reads again.
__device__ __forceinline__ u64 evict_first_policy() {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
// Zeros where they do not exist.
__device__ __forceinline__ uint4 ld_global_v4_or_zero(const void* from, bool exists, u64 policy) {
  uint4 x = make_uint4(0, 0, 0, 0);
  asm("{\n.reg .pred exists;\n"
      "setp.ne.s32 exists, %4, 0;\n"
      "@exists ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%5], %6;\n}\n"
      : "+r"(x.x), "+r"(x.y), "+r"(x.z), "+r"(x.w)
      : "r"(int(exists)), "l"(from), "l"(policy));
  return x;
}
__device__ __forceinline__ float ld_shared(unsigned address) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(address) : "memory");
  return x;
}
__device__ __forceinline__ unsigned ld_shared_u32(unsigned address) {
  unsigned x;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
  return x;
}
__device__ __forceinline__ float4 ld_shared_v4(unsigned address) {
  float4 x;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "r"(address)
               : "memory");
  return x;
}
__device__ __forceinline__ uint4 ld_shared_v4_u32(unsigned address) {
  uint4 x;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(address)
               : "memory");
  return x;
}
__device__ __forceinline__ void st_shared_v4_u32(unsigned address, uint4 x) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
               : "memory");
}
__device__ __forceinline__ int2 ld_shared_v2_s32(unsigned address) {
  int2 x;
  asm volatile("ld.shared.v2.s32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "r"(address) : "memory");
  return x;
}
// What all lanes of a warp want, read by lane 0: it arrives for the place, which is written over after that.
__device__ __forceinline__ int ld_shared_s32_by_lane_0(unsigned address) {
  int x = 0;
  if (threadIdx.x % 32 == 0) asm volatile("ld.shared.s32 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
  return __shfl_sync(0xffffffffu, x, 0);
}
__device__ __forceinline__ int2 ld_shared_v2_s32_by_lane_0(unsigned address) {
  int2 x = make_int2(0, 0);
  if (threadIdx.x % 32 == 0)
    asm volatile("ld.shared.v2.s32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "r"(address) : "memory");
  return make_int2(__shfl_sync(0xffffffffu, x.x, 0), __shfl_sync(0xffffffffu, x.y, 0));
}
__device__ __forceinline__ void st_shared_v2_s32(unsigned address, int2 x) {
  asm volatile("st.shared.v2.s32 [%0], {%1, %2};" ::"r"(address), "r"(x.x), "r"(x.y) : "memory");
}
__device__ __forceinline__ void st_shared_s32(unsigned address, int x) {
  asm volatile("st.shared.s32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}
__device__ __forceinline__ void prefetch_tma_descriptor(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Ordinary stores to shared memory become visible to the tensor cores and the copy engine.
__device__ __forceinline__ void fence_proxy_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// All threads of a warpgroup. __syncthreads has the barrier 0.
__device__ __forceinline__ void warpgroup_barrier(int number) {
  asm volatile("bar.sync %0, 128;" ::"r"(number) : "memory");
}

template <int kRegisters>
__device__ __forceinline__ void warpgroup_reg_dealloc() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void warpgroup_reg_alloc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Programmatic dependent launch: the next kernel may start; this kernel waits for the one before it.
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
__device__ __forceinline__ void griddepcontrol_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
// A counter in global memory that tells a kernel running beside this one what this one has written. Who adds says so
// for all threads that it met at a barrier before; who reads the sum sees what they wrote.
__device__ __forceinline__ void red_release_add(int* counter, int value) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(counter), "r"(value) : "memory");
}
__device__ __forceinline__ void st_release_u64(void* to, u64 value) {
  asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(value) : "memory");
}
__device__ __forceinline__ u64 ld_acquire_u64(const void* counters) {
  u64 x;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(x) : "l"(counters) : "memory");
  return x;
}
// What the kernel before wrote with ordinary stores is about to be read by the copy engine.
__device__ __forceinline__ void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

}  // namespace sm90
