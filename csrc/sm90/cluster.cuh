// The blocks of a cluster: their barrier and their shared memory.
#pragma once

#include "sm90/ptx.cuh"

namespace sm90 {

__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_sync() {
  cluster_arrive();
  cluster_wait();
}
// What another block of the cluster has at the same place of its shared memory.
__device__ __forceinline__ float load_from_block(const float* own, int block) {
  float x;
  asm volatile(
      "{\n.reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %1, %2;\n"
      "ld.shared::cluster.f32 %0, [remote];\n}\n"
      : "=f"(x)
      : "r"(shared_address(own)), "r"(block)
      : "memory");
  return x;
}
__device__ __forceinline__ uint2 load_from_block(const uint2* own, int block) {
  uint2 x;
  asm volatile(
      "{\n.reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %2, %3;\n"
      "ld.shared::cluster.v2.u32 {%0, %1}, [remote];\n}\n"
      : "=r"(x.x), "=r"(x.y)
      : "r"(shared_address(own)), "r"(block)
      : "memory");
  return x;
}

}  // namespace sm90
