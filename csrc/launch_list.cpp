#include "launch_list.h"

#include <stdexcept>

int LaunchList::add_map(const driver::MapDescription& description, Operand operand, int64_t offset) {
  for (std::size_t index = 0; index < maps_.size(); ++index) {
    const Map& map = maps_[index];
    if (map.operand == operand && map.offset == offset && map.description == description)
      return static_cast<int>(index);
  }
  if (maps_.size() == kMostMaps) throw std::logic_error("a call has more tensor maps than LaunchList::kMostMaps");
  maps_.push_back({description, operand, offset, 0, {}});
  return static_cast<int>(maps_.size() - 1);
}

void LaunchList::encode_maps(const OperandAddresses& addresses) {
  for (Map& map : maps_) {
    map.encoded_for = map.address(addresses);
    driver::encode_tensor_map(map.encoded, map.description, map.encoded_for);
  }
}

void LaunchList::run(const OperandAddresses& addresses, CUstream stream, Phase phase) const {
  if (phase != kAttentionPhase) enqueue(preparation_, addresses, nullptr, stream);
  if (phase == kPreparation) return;
  TensorMap maps[kMostMaps];
  for (std::size_t index = 0; index < maps_.size(); ++index) {
    const Map& map = maps_[index];
    const uint64_t address = map.address(addresses);
    maps[index] = map.encoded;
    if (address != map.encoded_for && !driver::replace_address(maps[index], address))
      driver::encode_tensor_map(maps[index], map.description, address);
  }
  enqueue(attention_, addresses, maps, stream);
}

void LaunchList::enqueue(const std::vector<Launch>& launches, const OperandAddresses& addresses, const TensorMap* maps,
                         CUstream stream) const {
  static_assert(sizeof(void*) == sizeof(uint64_t), "addresses of this process and of the GPU have the same size");
  alignas(kParameterAlignment) unsigned char params[kMostParameterBytes];
  void* arguments[] = {params};
  for (const Launch& launch : launches) {
    std::memcpy(params, launch.params.data(), launch.params.size());
    for (const RunFields::Address& field : launch.addresses) {
      const uint64_t given = addresses[field.operand];
      const uint64_t address = given ? given + static_cast<uint64_t>(field.offset) : 0;
      std::memcpy(params + field.position, &address, sizeof address);
    }
    for (const RunFields::Map& field : launch.maps)
      std::memcpy(params + field.position, &maps[field.map], sizeof(TensorMap));
    driver::launch(launch.function, launch.grid, launch.block, launch.shared_bytes, stream, arguments, launch.options);
  }
}
