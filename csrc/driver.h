// The part of the CUDA driver API that the kernels need, found in the installed driver at first use: building
// needs no CUDA headers, and importing the module needs no driver. Every failure is a std::runtime_error that
// names the call and carries the driver's own text.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>

#include "build_info.h"
#include "common/tensor_map.h"

// The driver's opaque handles, under its own names.
using CUcontext = struct CUctx_st*;
using CUfunction = struct CUfunc_st*;
using CUmodule = struct CUmod_st*;
using CUstream = struct CUstream_st*;

namespace driver {

// The driver's CUDA version, 1000 * major + 10 * minor. Needs a driver but no GPU.
int version();

// The device's primary context, the one that every CUDA runtime uses. It is retained for the life of the process.
CUcontext primary_context(int device);

// Makes a context current for this scope.
class ContextGuard {
 public:
  explicit ContextGuard(CUcontext context);
  ~ContextGuard();
  ContextGuard(const ContextGuard&) = delete;
  ContextGuard& operator=(const ContextGuard&) = delete;

 private:
  bool pushed_;
};

// The compiled images of one architecture, loaded into a context when they are first wanted there. What the driver has
// loaded stays loaded for the life of the process. Safe to use from several threads.
class Images {
 public:
  // `build` says in errors what the images need, and has to outlive them.
  explicit Images(const BuildInfo& build) : build_(build) {}
  Images(const Images&) = delete;
  Images& operator=(const Images&) = delete;

  void add(const std::string& cubin_name, std::string image);

  // The kernel of a cubin in the current context, allowed to use this much dynamic shared memory.
  CUfunction kernel(const std::string& cubin_name, const std::string& kernel_name, int dynamic_shared_bytes) const;

 private:
  struct Key {
    CUcontext context;
    std::string cubin, kernel;
    bool operator<(const Key& other) const;
  };
  struct Loaded {
    CUfunction function = nullptr;
    int dynamic_shared_bytes = 0;
  };

  CUmodule module(CUcontext context, const std::string& cubin_name) const;

  const BuildInfo& build_;
  mutable std::mutex mutex_;
  std::unordered_map<std::string, std::string> images_;
  mutable std::map<std::pair<CUcontext, std::string>, CUmodule> modules_;
  mutable std::map<Key, Loaded> functions_;
};

struct Extent {
  unsigned x = 1, y = 1, z = 1;
};

// Both need compute capability 9.0 or newer. With `programmatic_dependent` the grid may start before its predecessor on
// the stream has finished: the kernel itself has to wait with griddepcontrol.wait before it reads what the predecessor
// wrote. `cluster_blocks`: so many blocks along x make a cluster; they divide the grid.
struct LaunchOptions {
  bool programmatic_dependent = false;
  unsigned cluster_blocks = 1;
};

// Enqueues a kernel. `arguments` points to one pointer per kernel parameter.
void launch(CUfunction function, Extent grid, Extent block, int dynamic_shared_bytes, CUstream stream, void** arguments,
            LaunchOptions options = {});

inline CUstream stream_of(uint64_t handle) { return reinterpret_cast<CUstream>(static_cast<uintptr_t>(handle)); }

int multiprocessor_count(int device);

// The values are the driver's (CUtensorMapDataType, CUtensorMapSwizzle, CUtensorMapL2promotion).
enum class MapElement : int { uint8 = 0, uint16 = 1, uint32 = 2, int32 = 3, fp16 = 6, fp32 = 7, bf16 = 9 };
enum class MapSwizzle : int { none = 0, bytes_32 = 1, bytes_64 = 2, bytes_128 = 3 };
enum class MapPromotion : int { none = 0, l2_64 = 1, l2_128 = 2, l2_256 = 3 };

// A tiled tensor for TMA but for its address; elements outside of it read as zero. `sizes` and `box` count elements,
// innermost dimension first, and have `rank` entries; `byte_strides` has rank - 1: the innermost dimension is
// contiguous. The driver wants the address and the strides to be multiples of 16 bytes.
struct MapDescription {
  static constexpr int kMaxRank = 5;

  MapElement element;
  int rank;
  uint64_t sizes[kMaxRank], byte_strides[kMaxRank - 1];
  uint32_t box[kMaxRank];
  MapSwizzle swizzle = MapSwizzle::none;
  MapPromotion promotion = MapPromotion::l2_256;

  bool operator==(const MapDescription& other) const;
};

// Into a map of the caller's: the driver wants its alignment, and g++ 12 does not align the place of a returned one.
void encode_tensor_map(TensorMap& map, const MapDescription& description, uint64_t address);

// Gives a tensor map another address. False, and nothing done, if the driver is too old for it.
bool replace_address(TensorMap& map, uint64_t address);

}  // namespace driver
