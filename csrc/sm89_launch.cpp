// One attention call on a GPU of the sm89 family: statistics, quantisation, then attention, for 4-bit scores in parts whose
// smooth-Q correction fits its share of the workspace.
#include <algorithm>
#include <stdexcept>
#include <string>
#include <string_view>

#include "attention_call.h"
#include "common/units.h"
#include "driver.h"
#include "sm89_params.h"
#include "sm89_workspace.h"

namespace {

using sm89::Workspace;


// What differs between the architectures that are built from these sources.
constexpr std::string_view kArchitecture = KERNEL_ARCHITECTURE;
constexpr bool kHasInt4 = kArchitecture == "sm89";        // INT4 tensor cores
constexpr bool kHalfValues = kArchitecture == "sm80";     // no FP8: P V in fp16
constexpr int kValueBytes = kHalfValues ? 2 : 1;

// The largest element of a channel of V is scaled to this. A half-precision sum over 64 keys of P <= 448 stays below 65504.
constexpr float kE4m3Maximum = 448.f, kHalfAccumulatorMaximum = 2.25f;

void require(bool holds, const std::string& message) {
  if (!holds) throw std::invalid_argument(message);
}

void check(const AttentionCall& call) {
  const std::string here = " on " + std::string(kArchitecture) + ", got ";
  require(call.head_dim >= 8 && call.head_dim <= 256 && call.head_dim % 8 == 0,
          "head_dim must be a multiple of 8 from 8 to 256, got " + std::to_string(call.head_dim));
  require(call.bits == 8 || (call.bits == 4 && kHasInt4),
          std::string("bits must be 8") + (kHasInt4 ? " or 4" : "") + here + std::to_string(call.bits));
  require(call.pv_accumulator == 32 || (call.pv_accumulator == 16 && !kHalfValues),
          std::string("pv_accumulator must be 32") + (kHalfValues ? "" : " or 16") + here + std::to_string(call.pv_accumulator));
  require(call.kv_heads > 0 && call.q_heads % call.kv_heads == 0, "q_heads must be a multiple of kv_heads");
  require(call.batch > 0 && call.q_length > 0 && call.kv_length > 0, "q, k and v must not be empty");
}

const char* element_name(int element) {
  switch (element) {
    case sm89::kHalf: return "fp16";
    case sm89::kBfloat16: return "bf16";
    case sm89::kFloat: return "fp32";
    default: throw std::invalid_argument("element must be 2 (fp16), 3 (bf16) or 4 (fp32), got " + std::to_string(element));
  }
}

sm89::Strided strided(const TensorView& view) {
  return {reinterpret_cast<void*>(static_cast<uintptr_t>(view.pointer)), view.batch_stride, view.head_stride, view.token_stride};
}

class Launcher {
 public:
  explicit Launcher(const AttentionCall& call)
      : call_(call),
        workspace_(call, kValueBytes),
        head_dim_(sm89::padded_head_dim(call)),
        element_(element_name(call.element)),
        prepare_("sm89_prepare_d" + std::to_string(head_dim_)),
        bits_(std::to_string(call.bits) + "b"),
        mask_{reinterpret_cast<const void*>(static_cast<uintptr_t>(call.mask.pointer)), call.mask.batch_stride, call.mask.head_stride,
              call.mask.query_stride, call.mask.key_stride, call.mask.element},
        // One that broadcasts over queries becomes part of the key bias.
        mask_is_bias_(mask_.element != sm89::kNone && mask_.query_stride == 0),
        no_mask_{nullptr, 0, 0, 0, 0, sm89::kNone} {
    sizes_.q_heads = static_cast<int>(call.q_heads);
    sizes_.kv_heads = static_cast<int>(call.kv_heads);
    sizes_.q_length = static_cast<int>(call.q_length);
    sizes_.kv_length = static_cast<int>(call.kv_length);
    sizes_.head_dim = call.head_dim;
    sizes_.query_blocks = static_cast<int>(workspace_.query_blocks);
    sizes_.key_blocks = static_cast<int>(workspace_.key_blocks);
    sizes_.element = call.element;
  }

  void run() const {
    statistics();
    quantize();
    if (call_.bits == 4) return smoothed_attention();
    if (mask_is_bias_) mask_bias();
    sm89::AttentionParams params = attention_params(0, workspace_.works);
    if (mask_is_bias_) {
      params.bias_head_stride = mask_.head_stride == 0 ? 0 : padded_keys();
      params.bias_batch_stride = mask_bias_heads() * padded_keys();
    }
    attention(params, mask_is_bias_ ? "bias" : mask_.element ? "mask" : "plain");
  }

 private:
  template <typename Params>
  void launch(const std::string& cubin, const std::string& kernel, driver::Extent grid, int threads, int shared_bytes,
              Params& params) const {
    void* arguments[] = {&params};
    driver::launch(driver::kernel(cubin.c_str(), kernel.c_str(), shared_bytes), grid, {static_cast<unsigned>(threads)}, shared_bytes,
                   driver::stream_of(call_.stream), arguments);
  }

  template <typename Type>
  Type* at(int64_t offset) const {
    return reinterpret_cast<Type*>(static_cast<uintptr_t>(call_.workspace + static_cast<uint64_t>(offset)));
  }

  int64_t padded_keys() const { return workspace_.key_blocks * sm89::kKeyBlock; }
  int64_t mask_bias_heads() const { return mask_.head_stride == 0 ? 1 : call_.q_heads; }

  void statistics() const {
    sm89::StatisticsParams params{};
    params.k = strided(call_.k);
    params.v = strided(call_.v);
    params.partials = at<float>(workspace_.partials);
    params.k_mean = at<float>(workspace_.k_mean);
    params.v_mean = at<float>(workspace_.v_mean);
    params.v_scale = at<float>(workspace_.v_scale);
    params.sizes = sizes_;
    params.slices = static_cast<int>(workspace_.kv_slices);
    params.chunks = static_cast<int>(workspace_.chunks);
    params.smooth_v = call_.smooth_v;
    params.v_maximum = call_.pv_accumulator == 16 ? kHalfAccumulatorMaximum : kE4m3Maximum;
    const unsigned slices = static_cast<unsigned>(workspace_.kv_slices), chunks = static_cast<unsigned>(workspace_.chunks);
    launch(prepare_, std::string("partial_statistics_") + element_, {slices, chunks, 2}, sm89::kStatisticsThreads, 0, params);
    launch(prepare_, "finish_statistics", {slices, 2}, head_dim_, 0, params);
  }

  void quantize() const {
    sm89::QuantizeParams params{};
    params.q = strided(call_.q);
    params.k = strided(call_.k);
    params.v = strided(call_.v);
    params.k_mean = at<float>(workspace_.k_mean);
    params.v_mean = at<float>(workspace_.v_mean);
    params.v_scale = at<float>(workspace_.v_scale);
    params.q_tiles = at<unsigned char>(workspace_.q_tiles);
    params.k_tiles = at<unsigned char>(workspace_.k_tiles);
    params.v_tiles = at<unsigned char>(workspace_.v_tiles);
    params.q_scale = at<float>(workspace_.q_scale);
    params.k_scale = at<float>(workspace_.k_scale);
    params.q_mean = call_.bits == 4 ? at<float>(workspace_.q_mean) : nullptr;
    params.lse_shift = call_.lse ? at<float>(workspace_.lse_shift) : nullptr;
    params.sizes = sizes_;
    params.query_tiles = workspace_.works;
    params.key_tiles = workspace_.kv_slices * workspace_.key_blocks;
    params.scale = call_.scale;
    launch(prepare_, "quantize_" + bits_ + "_" + element_, {static_cast<unsigned>(params.query_tiles + 2 * params.key_tiles)},
           sm89::kQuantizeThreads, 0, params);
  }

  void mask_bias() const {
    sm89::KeyBiasParams params{at<float>(workspace_.bias), mask_, static_cast<int>(mask_bias_heads()), sizes_.kv_length,
                               static_cast<int>(padded_keys())};
    const unsigned rows = static_cast<unsigned>(call_.batch * mask_bias_heads());
    launch(prepare_, "mask_bias", {rows, static_cast<unsigned>(sm89::blocks_of(padded_keys(), sm89::kBiasThreads))},
           sm89::kBiasThreads, 0, params);
  }

  // Work items (query blocks of all heads) go in parts whose correction fits the workspace, whole waves where possible.
  void smoothed_attention() const {
    int64_t part = workspace_.bias_rows;
    const int64_t wave = driver::multiprocessor_count(call_.device);
    if (part < workspace_.works && part > wave) part -= part % wave;
    for (int64_t first = 0; first < workspace_.works; first += part) {
      const int64_t works = std::min(part, workspace_.works - first);
      delta(first, works);
      sm89::AttentionParams params = attention_params(first, works);
      params.bias_work_stride = padded_keys();
      attention(params, mask_.element && !mask_is_bias_ ? "mask" : "bias");
    }
  }

  void delta(int64_t first, int64_t works) const {
    sm89::DeltaParams params{};
    params.k = strided(call_.k);
    params.k_mean = at<float>(workspace_.k_mean);
    params.q_mean = at<float>(workspace_.q_mean);
    params.bias = at<float>(workspace_.bias);
    params.mask = mask_is_bias_ ? mask_ : no_mask_;
    params.sizes = sizes_;
    params.first_work = first;
    params.works = works;
    params.first_slice = static_cast<int>(first / workspace_.query_blocks);
    params.scale = call_.scale * common::kLog2E;
    const int64_t last_slice = (first + works - 1) / workspace_.query_blocks;
    launch(prepare_, std::string("delta_bias_") + element_,
           {static_cast<unsigned>((last_slice - params.first_slice + 1) * workspace_.key_blocks),
            static_cast<unsigned>(sm89::blocks_of(workspace_.query_blocks, sm89::kDeltaBlock))},
           sm89::kDeltaThreads, 0, params);
  }

  sm89::AttentionParams attention_params(int64_t first, int64_t works) const {
    sm89::AttentionParams params{};
    params.q_tiles = at<unsigned char>(workspace_.q_tiles);
    params.k_tiles = at<unsigned char>(workspace_.k_tiles);
    params.v_tiles = at<unsigned char>(workspace_.v_tiles);
    params.q_scale = at<float>(workspace_.q_scale);
    params.k_scale = at<float>(workspace_.k_scale);
    params.v_scale = at<float>(workspace_.v_scale);
    params.v_mean = at<float>(workspace_.v_mean);
    params.bias = at<float>(workspace_.bias);
    params.lse_shift = at<float>(workspace_.lse_shift);
    params.mask = mask_;
    params.out = strided(call_.out);
    params.lse = reinterpret_cast<float*>(static_cast<uintptr_t>(call_.lse));
    params.nonfinite = reinterpret_cast<int*>(static_cast<uintptr_t>(call_.nonfinite));
    params.sizes = sizes_;
    params.first_work = first;
    params.works = works;
    params.causal = call_.causal;
    return params;
  }

  // terms: "plain" scores, with a key "bias", or with a "mask" of their own for each query (and, in 4 bits, a bias too).
  void attention(sm89::AttentionParams& params, const std::string& terms) const {
    launch("sm89_attention_d" + std::to_string(head_dim_),
           "attention_" + bits_ + "_" + terms + "_fp" + std::to_string(call_.pv_accumulator),
           {static_cast<unsigned>(params.works)}, sm89::attention_threads(head_dim_),
           sm89::attention_shared_bytes(head_dim_, call_.bits, kValueBytes), params);
  }

  const AttentionCall& call_;
  const Workspace workspace_;
  const int head_dim_;
  const char* const element_;
  const std::string prepare_, bits_;
  const sm89::Mask mask_;
  const bool mask_is_bias_;
  const sm89::Mask no_mask_;
  sm89::Sizes sizes_{};
};

}  // namespace

int64_t workspace_bytes(const AttentionCall& call) {
  check(call);
  return Workspace(call, kValueBytes).bytes;
}

void attention(const AttentionCall& call) {
  check(call);
  const driver::ContextGuard guard(call.device);
  Launcher(call).run();
}
