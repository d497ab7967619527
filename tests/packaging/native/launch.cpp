// An architecture whose "attention" launches one kernel and describes one tensor, for the tests of the binding.
#include <stdexcept>
#include <string>

#include "attention_call.h"
#include "driver.h"

int64_t workspace_bytes(const AttentionCall& call) {
  if (call.head_dim > 256) {
    throw std::invalid_argument("head_dim must be at most 256, got " + std::to_string(call.head_dim));
  }
  return 16 * call.batch;
}

InputsRead read_by_attention_phase(const AttentionCall& call) { return {false, call.mode == k4b, false}; }

void attention(const AttentionCall& call) {
  const driver::ContextGuard guard(call.device);
  const uint64_t sizes[] = {static_cast<uint64_t>(call.head_dim), static_cast<uint64_t>(call.q_length)};
  const uint64_t byte_strides[] = {static_cast<uint64_t>(2 * call.q.token_stride)};
  const uint32_t box[] = {64, 128};
  const TensorMap map = driver::encode_tensor_map(driver::MapElement::fp16, 2, call.q.pointer, sizes, byte_strides, box,
                                                  driver::MapSwizzle::bytes_128);
  if (!map.bytes[127]) throw std::runtime_error("the driver did not write the tensor map");
  int64_t length = call.q_length;
  void* arguments[] = {&length};
  const unsigned processors = static_cast<unsigned>(driver::multiprocessor_count(call.device));
  driver::launch(driver::kernel("test_image", "test_kernel", 1000 * call.mode), {processors, 2}, {384},
                 1000 * call.mode, driver::stream_of(call.stream), arguments, {call.causal});
}
