// The part of CUDA that the index arithmetic of the kernels needs, on the host: a warp is 32 threads of the process.
#pragma once

#include <algorithm>
#include <atomic>
#include <barrier>

#define __device__
#define __global__
#define __shared__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(threads)

using std::max;
using std::min;

struct Index {
  unsigned x = 0;
};
inline thread_local Index threadIdx, blockIdx;
inline Index gridDim{1};

inline std::barrier<> warp_barrier(32);
inline std::atomic<bool> warp_vote;

inline void __syncwarp() { warp_barrier.arrive_and_wait(); }
inline bool __any_sync(unsigned, bool of_thread) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) warp_vote = false;
  __syncwarp();
  if (of_thread) warp_vote = true;
  __syncwarp();
  return warp_vote;
}
inline unsigned atomicOr(unsigned* word, unsigned bits) { return __atomic_fetch_or(word, bits, __ATOMIC_SEQ_CST); }
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __ffs(unsigned bits) { return __builtin_ffs(static_cast<int>(bits)); }
