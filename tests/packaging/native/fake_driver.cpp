// A libcuda.so.1 that does nothing but write down how it was called, one line a call, to the file FAKE_CUDA_LOG.
// FAKE_CUDA_VERSION is its CUDA version; the call FAKE_CUDA_FAILING fails with error 200. OLD_DRIVER leaves out what
// drivers before 525 do not have.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>

namespace {

thread_local void* current_context = nullptr;
std::mutex mutex;
int primary_context, loaded_module, function;

int called(const char* name, const std::string& details = "") {
  const std::lock_guard<std::mutex> lock(mutex);
  std::FILE* log = std::fopen(std::getenv("FAKE_CUDA_LOG"), "a");
  std::fprintf(log, "%s %s\n", name, details.c_str());
  std::fclose(log);
  const char* failing = std::getenv("FAKE_CUDA_FAILING");
  return failing && std::strcmp(failing, name) == 0 ? 200 : 0;
}

struct LaunchConfig {
  unsigned grid[3], block[3], shared;
  void* stream;
  int* attributes;
  unsigned attribute_count;
};

}  // namespace

extern "C" {

int cuInit(unsigned) { return called("cuInit"); }
int cuDriverGetVersion(int* version) {
  *version = std::atoi(std::getenv("FAKE_CUDA_VERSION"));
  return 0;
}
int cuGetErrorString(int, const char** text) {
  *text = "the fake driver's text";
  return 0;
}
int cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return 0;
}
int cuDeviceGetAttribute(int* value, int attribute, int) {
  *value = attribute == 16 ? 132 : 0;
  return called("cuDeviceGetAttribute", std::to_string(attribute));
}
int cuDevicePrimaryCtxRetain(void** context, int device) {
  *context = &primary_context;
  return called("cuDevicePrimaryCtxRetain", std::to_string(device));
}
int cuCtxGetCurrent(void** context) {
  *context = current_context;
  return 0;
}
int cuCtxPushCurrent_v2(void* context) {
  current_context = context;
  return called("cuCtxPushCurrent");
}
int cuCtxPopCurrent_v2(void** context) {
  *context = current_context;
  current_context = nullptr;
  return called("cuCtxPopCurrent");
}
int cuThreadExchangeStreamCaptureMode(int* mode) {
  *mode = 0;
  return 0;
}
int cuModuleLoadData(void** module, const void* image) {
  *module = &loaded_module;
  return called("cuModuleLoadData", static_cast<const char*>(image));
}
int cuModuleGetFunction(void** found, void*, const char* name) {
  *found = &function;
  return called("cuModuleGetFunction", name);
}
int cuFuncSetAttribute(void*, int attribute, int value) {
  return called("cuFuncSetAttribute", std::to_string(attribute) + "=" + std::to_string(value));
}
#ifndef OLD_DRIVER
int cuLaunchKernelEx(const LaunchConfig* config, void*, void** arguments, void**) {
  const std::string attribute = config->attribute_count ? " attribute " + std::to_string(config->attributes[0]) : "";
  return called("cuLaunchKernelEx", "grid " + std::to_string(config->grid[0]) + "," + std::to_string(config->grid[1]) +
                                        " block " + std::to_string(config->block[0]) + " shared " +
                                        std::to_string(config->shared) + " stream " +
                                        std::to_string(reinterpret_cast<uintptr_t>(config->stream)) + " first " +
                                        std::to_string(*static_cast<int64_t*>(arguments[0])) + attribute);
}
int cuTensorMapEncodeTiled(unsigned char* map, int element, uint32_t rank, void*, const uint64_t* sizes,
                           const uint64_t* byte_strides, const uint32_t* box, const uint32_t* element_strides, int,
                           int swizzle, int, int fill) {
  std::memset(map, 0xAB, 128);
  return called("cuTensorMapEncodeTiled", "element " + std::to_string(element) + " rank " + std::to_string(rank) +
                                              " sizes " + std::to_string(sizes[0]) + "," + std::to_string(sizes[1]) +
                                              " stride " + std::to_string(byte_strides[0]) + " box " +
                                              std::to_string(box[0]) + "," + std::to_string(box[1]) + " every " +
                                              std::to_string(element_strides[1]) + " swizzle " +
                                              std::to_string(swizzle) + " fill " + std::to_string(fill));
}
#endif
}
