// One attention call on Hopper: lay out the workspace, then launch statistics, quantisation and attention.
#include <algorithm>
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "attention_call.h"
#include "driver.h"
#include "sm90_params.h"

namespace {

constexpr int64_t kAlignment = 256;
constexpr int64_t kDeltaBytes = int64_t(256) << 20;  // of smooth Q's correction at a time
constexpr int64_t kMaxGridZ = 65535;                 // of a grid's third dimension
constexpr int kProgrammaticLaunchVersion = 12030;    // the first driver that captures such launches in CUDA graphs

int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }
int64_t blocks_of(int64_t value, int64_t block) { return (value + block - 1) / block; }

int padded_head_dim(const AttentionCall& call) { return call.head_dim <= 64 ? 64 : call.head_dim <= 128 ? 128 : 256; }
bool biased(const AttentionCall& call) { return call.bits == 4 || call.mask.element != sm90::kNone; }

// The tile shapes of sm90_attention_d*.cu.
struct TileChoice {
  std::string cubin, kernel;
  int block_n, stages;

  explicit TileChoice(const AttentionCall& call) {
    const int head_dim = padded_head_dim(call);
    const std::string suffix = "d" + std::to_string(head_dim);
    cubin = "sm90_attention_" + suffix;
    kernel = "attention_" + suffix + (call.causal ? "_causal" : "") + (biased(call) ? "_biased" : "");
    block_n = head_dim == 64 && !call.causal && !biased(call) ? 192 : 128;
    stages = head_dim == 256 ? 2 : 4;
    head_dim_ = head_dim;
  }
  int row_bytes() const { return std::min(head_dim_, 128); }
  int key_bytes() const { return block_n % 128 == 0 ? 128 : 64; }
  // As TileShape::kSharedBytes in sm90_attention.cuh.
  int shared_bytes() const {
    const int per_stage = block_n * head_dim_ + block_n * (head_dim_ + 8) + block_n / sm90::kScaleBlock * 16 + 16;
    return 2 * sm90::kBlockM * head_dim_ + stages * per_stage + 2 * (4 * sm90::kBlockM + 8 * head_dim_) + 32 + 1024;
  }
  int head_dim() const { return head_dim_; }

 private:
  int head_dim_;
};

struct Workspace {
  int64_t q_slices, kv_slices, query_tiles, row_bytes, key_row_bytes, v_rows, q_scale_rows, k_scale_blocks;
  sm90::Chunk chunk{};  // the largest part of the work that one attention launch does
  int64_t q_int8, k_int8, v_fp8, q_scale, k_scale, k_mean, v_mean, v_scale, v_inverse, lse_shift, q_mean, delta_s;
  int64_t bytes = 0;

  explicit Workspace(const AttentionCall& call) {
    q_slices = call.batch * call.q_heads;
    kv_slices = call.batch * call.kv_heads;
    query_tiles = blocks_of(call.q_length, sm90::kBlockM);
    row_bytes = round_up(call.head_dim, 16);
    key_row_bytes = round_up(call.kv_length, 16);
    v_rows = round_up(call.head_dim, sm90::kVChannels);
    q_scale_rows = query_tiles * sm90::kBlockM;
    k_scale_blocks = round_up(blocks_of(call.kv_length, sm90::kScaleBlock), 6);  // whole tiles of 128 and of 192 keys
    chunk = {0, static_cast<int>(q_slices), 0, static_cast<int>(query_tiles)};
    q_int8 = add(q_slices * call.q_length * row_bytes);
    k_int8 = add(kv_slices * call.kv_length * row_bytes);
    v_fp8 = add(kv_slices * v_rows * key_row_bytes);
    q_scale = add(q_slices * q_scale_rows * 4);
    k_scale = add(kv_slices * k_scale_blocks * sm90::kScalesPerBlock * 4);
    k_mean = add(kv_slices * call.head_dim * 4);
    v_mean = add(kv_slices * call.head_dim * 4);
    v_scale = add(kv_slices * call.head_dim * 4);
    v_inverse = add(kv_slices * call.head_dim * 4);
    lse_shift = call.lse ? add(q_slices * call.q_length * 4) : 0;
    q_mean = delta_s = 0;
    if (call.bits == 4) {
      const int64_t rows = std::max<int64_t>(1, kDeltaBytes / (4 * call.kv_length));
      if (rows >= query_tiles)
        chunk.heads = static_cast<int>(std::min({q_slices, rows / query_tiles, kMaxGridZ}));
      else
        chunk.heads = 1, chunk.tiles = static_cast<int>(rows);
      q_mean = add(q_slices * query_tiles * call.head_dim * 4);
      delta_s = add(int64_t(chunk.heads) * chunk.tiles * call.kv_length * 4);
    }
  }

 private:
  int64_t add(int64_t size) {
    const int64_t offset = bytes;
    bytes += round_up(size, kAlignment);
    return offset;
  }
};

template <typename Type>
Type* at(const AttentionCall& call, int64_t offset) {
  return reinterpret_cast<Type*>(static_cast<uintptr_t>(call.workspace + static_cast<uint64_t>(offset)));
}

sm90::Strided strided(const TensorView& view) {
  return {reinterpret_cast<void*>(static_cast<uintptr_t>(view.pointer)), view.batch_stride, view.head_stride, view.token_stride};
}

const char* element_name(int element) {
  switch (element) {
    case sm90::kHalf: return "fp16";
    case sm90::kBfloat16: return "bf16";
    case sm90::kFloat: return "fp32";
    default: throw std::invalid_argument("element must be 2 (fp16), 3 (bf16) or 4 (fp32), got " + std::to_string(element));
  }
}

void require(bool holds, const std::string& message) {
  if (!holds) throw std::invalid_argument(message);
}

void check(const AttentionCall& call) {
  require(call.head_dim >= 8 && call.head_dim <= 256 && call.head_dim % 8 == 0,
          "head_dim must be a multiple of 8 from 8 to 256, got " + std::to_string(call.head_dim));
  require(call.bits == 8 || call.bits == 4, "bits must be 8 or 4, got " + std::to_string(call.bits));
  require(call.pv_accumulator == 32, "pv_accumulator must be 32 on sm90, got " + std::to_string(call.pv_accumulator));
  require(call.kv_heads > 0 && call.q_heads % call.kv_heads == 0, "q_heads must be a multiple of kv_heads");
  require(call.batch > 0 && call.q_length > 0 && call.kv_length > 0, "q, k and v must not be empty");
}

class Launcher {
 public:
  explicit Launcher(const AttentionCall& call)
      : call_(call), stream_(driver::stream_of(call.stream)), element_(element_name(call.element)), workspace_(call),
        programmatic_(driver::version() >= kProgrammaticLaunchVersion) {}

  void run() {
    statistics();
    quantize();
    if (call_.bits == 8) return attention(workspace_.chunk, programmatic_);
    sm90::Chunk chunk = workspace_.chunk;
    for (int head = 0; head < workspace_.q_slices; head += workspace_.chunk.heads) {
      chunk.first_head = head;
      chunk.heads = static_cast<int>(std::min<int64_t>(workspace_.chunk.heads, workspace_.q_slices - head));
      for (int tile = 0; tile < workspace_.query_tiles; tile += workspace_.chunk.tiles) {
        chunk.first_tile = tile;
        chunk.tiles = static_cast<int>(std::min<int64_t>(workspace_.chunk.tiles, workspace_.query_tiles - tile));
        delta(chunk);
        attention(chunk, false);
      }
    }
  }

 private:
  template <typename Params>
  void launch(const std::string& cubin, const std::string& kernel, driver::Extent grid, unsigned threads, int shared_bytes,
              Params& params, driver::LaunchOptions options) {
    void* arguments[] = {&params};
    driver::launch(driver::kernel(cubin.c_str(), kernel.c_str(), shared_bytes), grid, {threads, 1, 1}, shared_bytes, stream_,
                   arguments, options);
  }

  // Blocks of the statistics pass for each head: together about one for each multiprocessor. That leaves half of the registers
  // to the quantisation of Q, which does not wait for the statistics.
  unsigned statistics_cluster() const {
    const int64_t resident = driver::multiprocessor_count(call_.device);
    const int64_t most = std::min<int64_t>(sm90::kMaxClusterBlocks, blocks_of(call_.kv_length, sm90::kScaleBlock));
    return static_cast<unsigned>(std::clamp<int64_t>(resident / workspace_.kv_slices, 1, most));
  }

  void statistics() {
    sm90::StatisticsParams params{};
    params.k = strided(call_.k);
    params.v = strided(call_.v);
    params.k_mean = at<float>(call_, workspace_.k_mean);
    params.v_mean = at<float>(call_, workspace_.v_mean);
    params.v_scale = at<float>(call_, workspace_.v_scale);
    params.v_inverse = at<float>(call_, workspace_.v_inverse);
    params.kv_heads = static_cast<int>(call_.kv_heads);
    params.kv_length = static_cast<int>(call_.kv_length);
    params.head_dim = call_.head_dim;
    params.element = call_.element;
    params.smooth_v = call_.smooth_v;
    const unsigned cluster = statistics_cluster();
    params.cluster_blocks = static_cast<int>(cluster);
    const int64_t blocks = cluster * workspace_.kv_slices;
    require(blocks <= 0x7fffffff, "k has too many heads for one launch");
    launch("sm90_statistics", "statistics_" + element_, {static_cast<unsigned>(blocks), 1, 1}, sm90::kStatisticsThreads, 0, params,
           {programmatic_, cluster});
  }

  void quantize() {
    sm90::QuantizeParams params{};
    params.q = strided(call_.q);
    params.k = strided(call_.k);
    params.v = strided(call_.v);
    params.k_mean = at<float>(call_, workspace_.k_mean);
    params.v_mean = at<float>(call_, workspace_.v_mean);
    params.v_inverse = at<float>(call_, workspace_.v_inverse);
    params.q_int8 = at<signed char>(call_, workspace_.q_int8);
    params.k_int8 = at<signed char>(call_, workspace_.k_int8);
    params.v_fp8 = at<unsigned char>(call_, workspace_.v_fp8);
    params.q_scale = at<float>(call_, workspace_.q_scale);
    params.k_scale = at<float>(call_, workspace_.k_scale);
    params.lse_shift = call_.lse ? at<float>(call_, workspace_.lse_shift) : nullptr;
    params.q_mean = call_.bits == 4 ? at<float>(call_, workspace_.q_mean) : nullptr;
    params.q_heads = static_cast<int>(call_.q_heads);
    params.kv_heads = static_cast<int>(call_.kv_heads);
    params.q_length = static_cast<int>(call_.q_length);
    params.kv_length = static_cast<int>(call_.kv_length);
    params.head_dim = call_.head_dim;
    params.row_bytes = static_cast<int>(workspace_.row_bytes);
    params.key_row_bytes = static_cast<int>(workspace_.key_row_bytes);
    params.v_rows = static_cast<int>(workspace_.v_rows);
    params.q_scale_rows = static_cast<int>(workspace_.q_scale_rows);
    params.k_scale_blocks = static_cast<int>(workspace_.k_scale_blocks);
    params.q_blocks = static_cast<int>(workspace_.query_tiles);
    params.k_blocks = static_cast<int>(blocks_of(call_.kv_length, sm90::kScaleBlock));
    params.v_blocks = static_cast<int>(blocks_of(call_.kv_length, sm90::kVTokens));
    params.q_slices = static_cast<int>(workspace_.q_slices);
    params.kv_slices = static_cast<int>(workspace_.kv_slices);
    params.smooth_v = call_.smooth_v;
    params.scale = call_.scale;
    params.mask = mask();
    const int64_t blocks = params.q_blocks * workspace_.q_slices + int64_t(params.k_blocks + params.v_blocks) * workspace_.kv_slices;
    require(blocks <= 0x7fffffff, "q, k and v have too many tokens and heads together for one launch");
    const std::string kernel = "quantize" + std::to_string(call_.bits) + "_" + element_ + "_d" + std::to_string(padded_head_dim(call_));
    launch("sm90_quantize", kernel, {static_cast<unsigned>(blocks), 1, 1}, 256, 0, params, {programmatic_});
  }

  void delta(const sm90::Chunk& chunk) {
    sm90::DeltaParams params{};
    params.k = strided(call_.k);
    params.k_mean = at<float>(call_, workspace_.k_mean);
    params.q_mean = at<float>(call_, workspace_.q_mean);
    params.delta_s = at<float>(call_, workspace_.delta_s);
    params.chunk = chunk;
    params.q_heads = static_cast<int>(call_.q_heads);
    params.kv_heads = static_cast<int>(call_.kv_heads);
    params.kv_length = static_cast<int>(call_.kv_length);
    params.head_dim = call_.head_dim;
    params.query_tiles = static_cast<int>(workspace_.query_tiles);
    params.scale = call_.scale * 1.4426950408889634f;
    const driver::Extent grid{static_cast<unsigned>(blocks_of(call_.kv_length, 128)),
                              static_cast<unsigned>(blocks_of(chunk.tiles, 16)), static_cast<unsigned>(chunk.heads)};
    launch("sm90_delta", "delta_" + element_, grid, 128, 0, params, {});
  }

  void attention(const sm90::Chunk& chunk, bool programmatic) {
    const TileChoice tile(call_);
    sm90::AttentionParams params{};
    params.q_map = map(workspace_.q_int8, call_.head_dim, call_.q_length, workspace_.q_slices, workspace_.row_bytes,
                       tile.row_bytes(), sm90::kBlockM);
    params.k_map = map(workspace_.k_int8, call_.head_dim, call_.kv_length, workspace_.kv_slices, workspace_.row_bytes,
                       tile.row_bytes(), tile.block_n);
    params.v_map = map(workspace_.v_fp8, workspace_.key_row_bytes, workspace_.v_rows, workspace_.kv_slices,
                       workspace_.key_row_bytes, tile.key_bytes(), tile.head_dim());
    params.q_scale = at<float>(call_, workspace_.q_scale);
    params.k_scale = at<float>(call_, workspace_.k_scale);
    params.v_scale = at<float>(call_, workspace_.v_scale);
    params.v_mean = at<float>(call_, workspace_.v_mean);
    params.lse_shift = call_.lse ? at<float>(call_, workspace_.lse_shift) : nullptr;
    params.delta_s = call_.bits == 4 ? at<float>(call_, workspace_.delta_s) : nullptr;
    params.mask = mask();
    params.out = strided(call_.out);
    params.lse = reinterpret_cast<float*>(static_cast<uintptr_t>(call_.lse));
    params.nonfinite = reinterpret_cast<int*>(static_cast<uintptr_t>(call_.nonfinite));
    params.chunk = chunk;
    params.q_scale_rows = static_cast<int>(workspace_.q_scale_rows);
    params.k_scale_blocks = static_cast<int>(workspace_.k_scale_blocks);
    params.q_heads = static_cast<int>(call_.q_heads);
    params.kv_heads = static_cast<int>(call_.kv_heads);
    params.q_length = static_cast<int>(call_.q_length);
    params.kv_length = static_cast<int>(call_.kv_length);
    params.head_dim = call_.head_dim;
    params.element = call_.element;
    const int64_t work = int64_t(chunk.heads) * chunk.tiles;
    require(work <= 0x7fffffff, "q has too many tokens and heads together for one launch");
    const unsigned blocks = static_cast<unsigned>(std::min<int64_t>(work, driver::multiprocessor_count(call_.device)));
    launch(tile.cubin, tile.kernel, {blocks, 1, 1}, 384, tile.shared_bytes(), params, {programmatic});
  }

  sm90::Mask mask() const {
    return {reinterpret_cast<const void*>(static_cast<uintptr_t>(call_.mask.pointer)), call_.mask.batch_stride,
            call_.mask.head_stride, call_.mask.query_stride, call_.mask.key_stride, call_.mask.element};
  }

  TensorMap map(int64_t offset, int64_t columns, int64_t rows, int64_t slices, int64_t row_bytes, int box_columns, int box_rows) const {
    const uint64_t sizes[] = {static_cast<uint64_t>(columns), static_cast<uint64_t>(rows), static_cast<uint64_t>(slices)};
    const uint64_t strides[] = {static_cast<uint64_t>(row_bytes), static_cast<uint64_t>(rows * row_bytes)};
    const uint32_t box[] = {static_cast<uint32_t>(box_columns), static_cast<uint32_t>(box_rows), 1};
    const auto swizzle = box_columns == 128 ? driver::MapSwizzle::bytes_128 : driver::MapSwizzle::bytes_64;
    return driver::encode_tensor_map(driver::MapElement::uint8, 3, call_.workspace + static_cast<uint64_t>(offset), sizes, strides, box, swizzle);
  }

  const AttentionCall& call_;
  const CUstream stream_;
  const std::string element_;
  const Workspace workspace_;
  const bool programmatic_;
};

}  // namespace

int64_t workspace_bytes(const AttentionCall& call) { return Workspace(call).bytes; }

void attention(const AttentionCall& call) {
  check(call);
  const driver::ContextGuard guard(call.device);
  Launcher(call).run();
}
