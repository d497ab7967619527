// What the launch code of all families shares: sizes, scratch memory, grids, and one call's launches.
#pragma once

#include <cstdint>
#include <string>

#include "attention_call.h"
#include "common/tile_lists.h"
#include "common/validate.h"
#include "common/views.h"
#include "driver.h"

namespace common {

constexpr int64_t kDeltaBytes = int64_t(256) << 20;  // of smooth Q's correction at a time
constexpr int64_t kMaxGridX = kMaxInt, kMaxGridYZ = 65535;

constexpr int64_t ceil_div(int64_t value, int64_t divisor) { return (value + divisor - 1) / divisor; }
constexpr int64_t round_up(int64_t value, int64_t multiple) { return ceil_div(value, multiple) * multiple; }

// The head_dim of the kernels that run a call: its channels are filled up with zeros.
constexpr int padded_head_dim(int head_dim) { return head_dim <= 64 ? 64 : head_dim <= 128 ? 128 : 256; }

// Gives out parts of a call's scratch memory, as offsets in bytes.
class Arena {
 public:
  int64_t add(int64_t size) {
    const int64_t offset = bytes_;
    bytes_ += round_up(size, kAlignment);
    return offset;
  }
  int64_t bytes() const { return bytes_; }

 private:
  static constexpr int64_t kAlignment = 256;
  int64_t bytes_ = 0;
};

// Throws std::invalid_argument for a grid that no launch can have.
inline driver::Extent grid(int64_t x, int64_t y = 1, int64_t z = 1) {
  require(x <= kMaxGridX && y <= kMaxGridYZ && z <= kMaxGridYZ, "the call is too large for one launch: it takes ",
          std::to_string(x), " x ", std::to_string(y), " x ", std::to_string(z), " blocks, at most ",
          std::to_string(kMaxGridX), " x ", std::to_string(kMaxGridYZ), " x ", std::to_string(kMaxGridYZ),
          " are possible");
  return {static_cast<unsigned>(x), static_cast<unsigned>(y), static_cast<unsigned>(z)};
}

template <typename Type>
Type* pointer(uint64_t address) {
  return reinterpret_cast<Type*>(static_cast<uintptr_t>(address));
}
inline Strided strided(const TensorView& view) {
  return {pointer<void>(view.pointer), view.batch_stride, view.head_stride, view.token_stride};
}
inline Mask mask_of(const MaskView& view) {
  return {pointer<const void>(view.pointer),
          view.batch_stride,
          view.head_stride,
          view.query_stride,
          view.key_stride,
          view.element,
          0};
}

// A call's prepared tile lists in its scratch memory, as offsets in bytes. Heads and entries of the batch that share
// their lists need less than there is: which do, the size does not depend on.
struct ListSpace {
  int64_t query_blocks = 0, key_tiles = 0, launches = 0;
  int64_t entries = 0, counts = 0, next = 0, dead = 0;

  ListSpace() = default;
  // For so many launches of the attention kernel that count the work tiles they took.
  ListSpace(const AttentionCall& call, int64_t of_attention, Arena& arena)
      : query_blocks(ceil_div(call.q_length, kListTile)), key_tiles(call.tiles.key_tiles), launches(of_attention) {
    if (key_tiles == 0) return;
    const int64_t lists = call.batch * call.q_heads * query_blocks;
    entries = arena.add(lists * key_tiles * 2);
    counts = arena.add(lists * 4);
    next = arena.add(launches * 4);
    dead = arena.add(4);
  }
};

// As it stands in the kernels' names.
inline const char* element_name(int element) {
  return element == kHalf ? "fp16" : element == kBfloat16 ? "bf16" : "fp32";
}

inline bool listed(const AttentionCall& call) { return call.tiles.key_tiles != 0; }
inline bool recording(const AttentionCall& call) { return call.gaps != 0; }
// Whether a block of queries has a tile of keys at its own place.
inline bool has_diagonal(const AttentionCall& call) { return call.causal || call.q_length == call.kv_length; }

// Launches kernels of one call on its stream.
class Launcher {
 public:
  void run() {
    if (call_.phase == kPreparation) {
      only_loads_ = true;
      attend();
      only_loads_ = false;
    }
    if (call_.phase != kAttentionPhase) prepare();
    if (call_.phase != kPreparation) attend();
  }

 protected:
  explicit Launcher(const AttentionCall& call) : call_(call), stream_(driver::stream_of(call.stream)) {}
  ~Launcher() = default;

  virtual void prepare() const = 0;
  virtual void attend() const = 0;

  // What lies at an offset of the scratch memory.
  template <typename Type>
  Type* at(int64_t offset) const {
    return pointer<Type>(call_.workspace + static_cast<uint64_t>(offset));
  }

  template <typename Params>
  void launch(const std::string& cubin, const std::string& kernel, driver::Extent grid, int threads, int shared_bytes,
              Params& params, driver::LaunchOptions options = {}) const {
    const CUfunction function = driver::kernel(cubin.c_str(), kernel.c_str(), shared_bytes);
    if (only_loads_) return;
    void* arguments[] = {&params};
    driver::launch(function, grid, {static_cast<unsigned>(threads)}, shared_bytes, stream_, arguments, options);
  }

  // Enqueues what makes the lists that attention kernels walk, and notes whether they leave out a tile if `notes_dead`.
  void prepare_lists(const ListSpace& space, ListForm form, bool notes_dead = false) const {
    const TileListsView& tiles = call_.tiles;
    PrepareListsParams params{};
    params.lists = pointer<const short>(tiles.pointer);
    params.batch_stride = tiles.batch_stride;
    params.head_stride = tiles.head_stride;
    params.entries = at<unsigned short>(space.entries);
    params.counts = at<int>(space.counts);
    params.next = at<int>(space.next);
    params.dead = notes_dead ? at<int>(space.dead) : nullptr;
    params.invalid = pointer<int>(tiles.invalid);
    params.batches = static_cast<int>(tiles.batch_stride == 0 ? 1 : call_.batch);
    params.heads = static_cast<int>(listed_heads());
    params.query_blocks = static_cast<int>(space.query_blocks);
    params.key_tiles = static_cast<int>(space.key_tiles);
    params.causal = call_.causal;
    params.launches = static_cast<int>(space.launches);
    params.form = form;
    params.has_diagonal = has_diagonal(call_);
    if (notes_dead) launch("tile_lists", "clear_dead_tiles", grid(1), 1, 0, params);
    const int64_t lists = int64_t(params.batches) * params.heads * params.query_blocks;
    launch("tile_lists", "prepare_tile_lists", grid(ceil_div(lists, kListsPerBlock)), kPrepareListsThreads,
           bitmap_bytes(params.key_tiles), params);
  }

  // As the attention kernel's launch with this number sees them; null where the call has none.
  PreparedLists prepared_lists(const ListSpace& space, int64_t launch) const {
    PreparedLists lists{};
    if (space.key_tiles == 0) return lists;
    lists.entries = at<unsigned short>(space.entries);
    lists.counts = at<int>(space.counts);
    lists.next = at<int>(space.next) + launch;
    lists.batch_lists = static_cast<int>(call_.tiles.batch_stride == 0 ? 0 : listed_heads() * space.query_blocks);
    lists.head_lists = static_cast<int>(call_.tiles.head_stride == 0 ? 0 : space.query_blocks);
    lists.key_tiles = static_cast<int>(space.key_tiles);
    lists.causal = call_.causal;
    return lists;
  }

  const AttentionCall& call_;

 private:
  int64_t listed_heads() const { return call_.tiles.head_stride == 0 ? 1 : call_.q_heads; }

  const CUstream stream_;
  bool only_loads_ = false;  // kernels are looked up and not launched
};

}  // namespace common
