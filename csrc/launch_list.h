// The launches of one plan, ready to run: kernels of one context, their grids, and their parameters but for the
// addresses, which each run puts in.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>

#include "attention_call.h"
#include "common/tensor_map.h"
#include "driver.h"

// The fields of a kernel's parameters that differ from run to run: addresses, and tensor maps, which hold one.
class RunFields {
 public:
  // Of these parameters, of which all fields bound later are a part.
  template <class Params>
  explicit RunFields(const Params& params) : begin_(reinterpret_cast<const char*>(&params)) {}
  RunFields(const RunFields&) = delete;
  RunFields& operator=(const RunFields&) = delete;

  // The field gets the operand's address and `offset` bytes, or null when a run leaves the operand out.
  template <class Type>
  void bind(Type* const& field, Operand operand, int64_t offset = 0) {
    addresses_.push_back({position_of(&field), operand, offset});
  }
  // `map`: from LaunchList::add_map.
  void bind(const TensorMap& field, int map) { maps_.push_back({position_of(&field), map}); }

 private:
  friend class LaunchList;
  struct Address {
    std::size_t position;
    Operand operand;
    int64_t offset;
  };
  struct Map {
    std::size_t position;
    int map;
  };

  std::size_t position_of(const void* field) const {
    return static_cast<std::size_t>(static_cast<const char*>(field) - begin_);
  }

  const char* begin_;
  std::vector<Address> addresses_;
  std::vector<Map> maps_;
};

class LaunchList {
 public:
  // A tensor that starts `offset` bytes behind an operand's address. Tensors that are alike share one map.
  int add_map(const driver::MapDescription& description, Operand operand, int64_t offset);

  // Adds the launch of a kernel, which takes one struct, to a phase.
  template <class Params>
  void add(Phase phase, CUfunction kernel, driver::Extent grid, int threads, int shared_bytes, const Params& params,
           const RunFields& fields, driver::LaunchOptions options = {}) {
    static_assert(std::is_trivially_copyable_v<Params> && sizeof(Params) <= kMostParameterBytes);
    static_assert(alignof(Params) <= kParameterAlignment);
    std::vector<unsigned char> bytes(sizeof(Params));
    std::memcpy(bytes.data(), &params, sizeof(Params));
    Launch launch{
        kernel,      grid, {static_cast<unsigned>(threads)}, shared_bytes, options, std::move(bytes), fields.addresses_,
        fields.maps_};
    (phase == kPreparation ? preparation_ : attention_).push_back(std::move(launch));
  }

  // Encodes the tensor maps, for these addresses: runs with others replace them.
  void encode_maps(const OperandAddresses& addresses);

  // Enqueues the launches of a phase in the current context, which is that of the kernels.
  void run(const OperandAddresses& addresses, CUstream stream, Phase phase) const;

 private:
  static constexpr std::size_t kMostParameterBytes = 1024, kParameterAlignment = 64;
  static constexpr std::size_t kMostMaps = 8;

  struct Launch {
    CUfunction function;
    driver::Extent grid, block;
    int shared_bytes;
    driver::LaunchOptions options;
    std::vector<unsigned char> params;
    std::vector<RunFields::Address> addresses;
    std::vector<RunFields::Map> maps;
  };
  struct Map {
    driver::MapDescription description;
    Operand operand;
    int64_t offset;
    uint64_t encoded_for;
    TensorMap encoded;

    uint64_t address(const OperandAddresses& addresses) const {
      return addresses[operand] + static_cast<uint64_t>(offset);
    }
  };

  void enqueue(const std::vector<Launch>& launches, const OperandAddresses& addresses, const TensorMap* maps,
               CUstream stream) const;

  std::vector<Launch> preparation_, attention_;
  std::vector<Map> maps_;  // of the attention phase
};
