// A libcuda.so.1 or nvcuda.dll that only logs its calls, one per line, to the file FAKE_CUDA_LOG. FAKE_CUDA_VERSION is
// its CUDA version; the call FAKE_CUDA_FAILING fails with error 200. OLD_DRIVER leaves out what drivers before 525 do
// not have, NO_REPLACING the function that gives a tensor map another address.
//
// It logs the hash of a real image, and every byte of a launch's parameters: the image says how many there are. Thus
// the logs of two platforms are equal if the GPU would get the same. A kernel that an image lacks is not found. If an
// image is plain text, it logs FAKE_CUDA_PARAMETER_BYTES of a launch, or 8.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <sstream>
#include <string>

#ifdef _WIN32
#define EXPORT extern "C" __declspec(dllexport)
#define CALL __stdcall
#else
#define EXPORT extern "C" __attribute__((visibility("default")))
#define CALL
#endif

namespace {

struct Function {
  std::string name;
  int parameter_bytes;
};

struct Module {
  bool is_elf = false;
  std::map<std::string, Function> functions;
};

thread_local void* current_context = nullptr;
std::mutex mutex;
int primary_contexts[16];

const char* const log_path = std::getenv("FAKE_CUDA_LOG");

int called(const char* name, const std::string& details = "") {
  if (!log_path) return 0;
  const std::lock_guard<std::mutex> lock(mutex);
  std::FILE* log = std::fopen(log_path, "ab");
  std::fprintf(log, "%s %s\n", name, details.c_str());
  std::fclose(log);
  const char* failing = std::getenv("FAKE_CUDA_FAILING");
  return failing && std::strcmp(failing, name) == 0 ? 200 : 0;
}

struct LaunchAttribute {
  int id, padding;
  int value;
  unsigned char rest[60];
};

struct LaunchConfig {
  unsigned grid[3], block[3], shared;
  void* stream;
  LaunchAttribute* attributes;
  unsigned attribute_count;
};

constexpr uint64_t kHashStart = 1469598103934665603ull;

// FNV-1a.
uint64_t hash(const void* data, uint64_t size, uint64_t value = kHashStart) {
  for (uint64_t i = 0; i < size; ++i) value = (value ^ static_cast<const unsigned char*>(data)[i]) * 1099511628211ull;
  return value;
}

std::string hex(const void* data, uint64_t size) {
  std::string text;
  for (uint64_t i = 0; i < size; ++i) {
    char digits[3];
    std::snprintf(digits, sizeof digits, "%02x", static_cast<const unsigned char*>(data)[i]);
    text += digits;
  }
  return text;
}

template <typename Value>
Value read(const char* address) {
  Value value;
  std::memcpy(&value, address, sizeof value);
  return value;
}

// The size in bytes of a kernel's only parameter, from its section .nv.info.<kernel>. The offset there is one in the
// constant bank and unrelated to the bytes in the launching program.
int parameter_bytes(const char* info, const char* end) {
  constexpr unsigned char kHasSize = 4, kParameterInfo = 0x17;
  int bytes = 0;
  while (info < end) {
    const unsigned char format = info[0], attribute = info[1];
    if (format != kHasSize) {
      info += 4;
      continue;
    }
    if (attribute == kParameterInfo) {
      bytes = static_cast<int>(read<uint32_t>(info + 12) >> 18);
    }
    info += 4 + read<uint16_t>(info + 2);
  }
  return bytes;
}

// The parameter bytes of a kernel whose image is plain text: FAKE_CUDA_PARAMETER_BYTES has one number for all kernels,
// or lines of a prefix of kernel names and a number.
int told_parameter_bytes(const std::string& kernel) {
  const char* told = std::getenv("FAKE_CUDA_PARAMETER_BYTES");
  if (!told) return sizeof(int64_t);
  if (!std::strchr(told, ' ')) return std::atoi(told);
  std::istringstream lines(told);
  std::string prefix;
  for (int bytes; lines >> prefix >> bytes;) {
    if (kernel.compare(0, prefix.size(), prefix) == 0) return bytes;
  }
  return 0;
}

// Reads an image's kernels, and returns its size. A cubin is an ELF file of 64 bits.
uint64_t read_elf(const char* image, Module& module) {
  const uint64_t sections = read<uint64_t>(image + 40);
  const unsigned section_bytes = read<uint16_t>(image + 58), count = read<uint16_t>(image + 60);
  const auto header = [&](unsigned index) { return image + sections + uint64_t(index) * section_bytes; };
  const char* names = image + read<uint64_t>(header(read<uint16_t>(image + 62)) + 24);
  uint64_t end = sections + uint64_t(count) * section_bytes;
  for (unsigned index = 1; index < count; ++index) {
    constexpr uint32_t kNoBits = 8;
    const uint64_t offset = read<uint64_t>(header(index) + 24), size = read<uint64_t>(header(index) + 32);
    if (read<uint32_t>(header(index) + 4) != kNoBits && offset + size > end) end = offset + size;
    const std::string name = names + read<uint32_t>(header(index));
    const std::string prefix = ".nv.info.";
    if (name.compare(0, prefix.size(), prefix) != 0) continue;
    const std::string kernel = name.substr(prefix.size());
    module.functions[kernel] = {kernel, parameter_bytes(image + offset, image + offset + size)};
  }
  const uint64_t programs_end =
      read<uint64_t>(image + 32) + uint64_t(read<uint16_t>(image + 54)) * read<uint16_t>(image + 56);
  return programs_end > end ? programs_end : end;
}

}  // namespace

EXPORT int CALL cuInit(unsigned) { return called("cuInit"); }
EXPORT int CALL cuDriverGetVersion(int* version) {
  *version = std::atoi(std::getenv("FAKE_CUDA_VERSION"));
  return 0;
}
EXPORT int CALL cuGetErrorString(int, const char** text) {
  *text = "the fake driver's text";
  return 0;
}
EXPORT int CALL cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return 0;
}
EXPORT int CALL cuDeviceGetAttribute(int* value, int attribute, int) {
  *value = attribute == 16 ? 132 : 0;
  return called("cuDeviceGetAttribute", std::to_string(attribute));
}
EXPORT int CALL cuDevicePrimaryCtxRetain(void** context, int device) {
  *context = &primary_contexts[device];
  return called("cuDevicePrimaryCtxRetain", std::to_string(device));
}
EXPORT int CALL cuCtxGetCurrent(void** context) {
  *context = current_context;
  return 0;
}
EXPORT int CALL cuCtxPushCurrent_v2(void* context) {
  current_context = context;
  return called("cuCtxPushCurrent");
}
EXPORT int CALL cuCtxPopCurrent_v2(void** context) {
  *context = current_context;
  current_context = nullptr;
  return called("cuCtxPopCurrent");
}
EXPORT int CALL cuThreadExchangeStreamCaptureMode(int* mode) {
  *mode = 0;
  return 0;
}
EXPORT int CALL cuModuleLoadData(void** found, const void* image) {
  Module* module = new Module;  // like the driver's, it lives as long as the process
  *found = module;
  const char* text = static_cast<const char*>(image);
  module->is_elf = std::memcmp(text, "\177ELF", 4) == 0;
  if (!module->is_elf) return called("cuModuleLoadData", text);
  const uint64_t size = read_elf(text, *module);
  const uint64_t value = hash(image, size);
  return called("cuModuleLoadData", std::to_string(size) + " bytes " + hex(&value, sizeof value));
}
EXPORT int CALL cuModuleGetFunction(void** found, void* module, const char* name) {
  constexpr int kNotFound = 500;
  Module& loaded = *static_cast<Module*>(module);
  if (!loaded.is_elf) {
    loaded.functions[name] = {name, told_parameter_bytes(name)};
  }
  const auto function = loaded.functions.find(name);
  if (function == loaded.functions.end()) {
    called("missing", name);
    return kNotFound;
  }
  *found = &function->second;
  return called("cuModuleGetFunction", name);
}
EXPORT int CALL cuFuncSetAttribute(void*, int attribute, int value) {
  return called("cuFuncSetAttribute", std::to_string(attribute) + "=" + std::to_string(value));
}
#ifndef OLD_DRIVER
EXPORT int CALL cuLaunchKernelEx(const LaunchConfig* config, void* function, void** arguments, void** extra) {
  if (!log_path) return 0;
  const Function& launched = *static_cast<Function*>(function);
  std::string text = launched.name;
  const auto add = [&](const char* label, const unsigned* extent) {
    text += std::string(" ") + label;
    for (int axis = 0; axis < 3; ++axis) text += (axis ? "," : " ") + std::to_string(extent[axis]);
  };
  add("grid", config->grid);
  add("block", config->block);
  text += " shared " + std::to_string(config->shared) + " stream " +
          std::to_string(reinterpret_cast<uintptr_t>(config->stream)) + (extra ? " extra" : "");
  for (unsigned index = 0; index < config->attribute_count; ++index) {
    text += " attribute " + std::to_string(config->attributes[index].id) + "=" +
            std::to_string(config->attributes[index].value);
  }
  // All these kernels have one parameter, a struct.
  return called("cuLaunchKernelEx", text + " parameters " + hex(arguments[0], launched.parameter_bytes));
}
EXPORT int CALL cuTensorMapEncodeTiled(unsigned char* map, int element, uint32_t rank, void* address,
                                       const uint64_t* sizes, const uint64_t* byte_strides, const uint32_t* box,
                                       const uint32_t* element_strides, int interleave, int swizzle, int promotion,
                                       int fill) {
  constexpr int kInvalidValue = 1, kMapBytes = 128, kMapAlignment = 64, kStrideMultiple = 16;
  if (reinterpret_cast<uintptr_t>(map) % kMapAlignment) return kInvalidValue;
  for (uint32_t axis = 0; axis + 1 < rank; ++axis)
    if (byte_strides[axis] % kStrideMultiple) return kInvalidValue;
  // The map holds a hash of its arguments: it is a parameter of the kernels, so a wrong one shows in a launch, too.
  // The address comes first, so that it can be replaced.
  const int settings[] = {element, static_cast<int>(rank), interleave, swizzle, promotion, fill};
  uint64_t value = hash(settings, sizeof settings);
  value = hash(sizes, rank * sizeof *sizes, value);
  value = hash(byte_strides, (rank - 1) * sizeof *byte_strides, value);
  value = hash(box, rank * sizeof *box, value);
  value = hash(element_strides, rank * sizeof *element_strides, value);
  for (unsigned at = 0; at < kMapBytes; at += sizeof value) std::memcpy(map + at, &value, sizeof value);
  std::memcpy(map, &address, sizeof address);
  if (!log_path) return 0;
  return called("cuTensorMapEncodeTiled", "address " + std::to_string(reinterpret_cast<uintptr_t>(address)) +
                                              " element " + std::to_string(element) + " rank " + std::to_string(rank) +
                                              " sizes " + std::to_string(sizes[0]) + "," + std::to_string(sizes[1]) +
                                              " stride " + std::to_string(byte_strides[0]) + " box " +
                                              std::to_string(box[0]) + "," + std::to_string(box[1]) + " every " +
                                              std::to_string(element_strides[1]) + " swizzle " +
                                              std::to_string(swizzle) + " fill " + std::to_string(fill));
}
#endif
#if !defined(OLD_DRIVER) && !defined(NO_REPLACING)
EXPORT int CALL cuTensorMapReplaceAddress(unsigned char* map, void* address) {
  std::memcpy(map, &address, sizeof address);
  return called("cuTensorMapReplaceAddress", std::to_string(reinterpret_cast<uintptr_t>(address)));
}
#endif
