#include "driver.h"

#include <algorithm>
#include <mutex>
#include <stdexcept>
#include <tuple>
#include <unordered_map>
#include <utility>

#ifdef _WIN32
#define WIN32_LEAN_AND_MEAN
#include <windows.h>
#define DRIVER_CALL __stdcall
#else
#include <dlfcn.h>
#define DRIVER_CALL
#endif

namespace driver {
namespace {

using CUresult = int;
using CUdevice = int;

// The oldest one that any of the images runs on.
constexpr const char* kOldestDriver = "525";

constexpr CUresult kSuccess = 0;
constexpr CUresult kErrorInvalidImage = 200;
constexpr CUresult kErrorNoBinaryForGpu = 209;
constexpr CUresult kErrorUnsupportedVersion = 222;
constexpr int kFunctionMaxDynamicShared = 8;
constexpr int kDeviceMultiprocessorCount = 16;
constexpr int kLaunchClusterDimension = 4;
constexpr int kLaunchProgrammaticSerialization = 6;
constexpr int kCaptureModeRelaxed = 2;

struct LaunchAttribute {
  int id;
  int padding;
  union {
    int programmatic_serialization_allowed;
    Extent cluster;
    unsigned char bytes[64];
  } value;
};

struct LaunchConfig {
  unsigned grid_x, grid_y, grid_z, block_x, block_y, block_z;
  unsigned dynamic_shared_bytes;
  CUstream stream;
  LaunchAttribute* attributes;
  unsigned attribute_count;
};

#ifdef _WIN32
constexpr const char* kLibraryName = "nvcuda.dll";
// From the system folder alone: a library of that name in the current folder or on the PATH is not the driver's.
void* open_library() {
  return reinterpret_cast<void*>(LoadLibraryExA(kLibraryName, nullptr, LOAD_LIBRARY_SEARCH_SYSTEM32));
}
std::string open_error() { return "error " + std::to_string(GetLastError()); }
void* find_symbol(void* library, const char* name) {
  return reinterpret_cast<void*>(GetProcAddress(reinterpret_cast<HMODULE>(library), name));
}
#else
constexpr const char* kLibraryName = "libcuda.so.1";
void* open_library() { return dlopen(kLibraryName, RTLD_NOW | RTLD_LOCAL); }
std::string open_error() { return dlerror(); }
void* find_symbol(void* library, const char* name) { return dlsym(library, name); }
#endif

// A CUDA version of the driver in words, such as "12.8" for 12080.
std::string cuda(int version) { return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10); }

template <typename Signature>
class Entry;

// One driver function. A driver that is too old to have it is an error only when it is called.
template <typename... Arguments>
class Entry<CUresult(Arguments...)> {
 public:
  Entry(void* library, const char* name)
      : name_(name), function_(reinterpret_cast<Function>(find_symbol(library, name))) {}

  CUresult raw(Arguments... arguments) const {
    if (!function_) {
      throw std::runtime_error(std::string("the installed NVIDIA driver lacks ") + name_ + "; update it to version " +
                               kOldestDriver + " or newer");
    }
    return function_(arguments...);
  }

  const char* name() const { return name_; }
  bool exists() const { return function_ != nullptr; }

 private:
  using Function = CUresult(DRIVER_CALL*)(Arguments...);
  const char* name_;
  Function function_;
};

class Api {
 public:
  static const Api& loaded() {
    static const Api api(required_library());
    return api;
  }

  // The same, with cuInit done: everything but the version query needs it.
  static const Api& initialized() {
    const Api& api = loaded();
    static const bool done = (api.check(api.init, 0u), true);
    static_cast<void>(done);
    return api;
  }

  template <typename... Parameters, typename... Arguments>
  void check(const Entry<CUresult(Parameters...)>& entry, Arguments... arguments) const {
    const CUresult result = entry.raw(arguments...);
    if (result != kSuccess) throw std::runtime_error(failure(entry.name(), result));
  }

  std::string failure(const char* call, CUresult result) const {
    const char* text = nullptr;
    if (get_error_string.raw(result, &text) != kSuccess || !text) text = "unknown error";
    return std::string(call) + " failed with CUDA driver error " + std::to_string(result) + ": " + text;
  }

  const Entry<CUresult(unsigned)> init;
  const Entry<CUresult(int*)> driver_get_version;
  const Entry<CUresult(CUresult, const char**)> get_error_string;
  const Entry<CUresult(CUdevice*, int)> device_get;
  const Entry<CUresult(int*, int, CUdevice)> device_get_attribute;
  const Entry<CUresult(CUcontext*, CUdevice)> primary_context_retain;
  const Entry<CUresult(CUcontext*)> context_get_current;
  const Entry<CUresult(CUcontext)> context_push;
  const Entry<CUresult(CUcontext*)> context_pop;
  const Entry<CUresult(int*)> exchange_capture_mode;
  const Entry<CUresult(CUmodule*, const void*)> module_load_data;
  const Entry<CUresult(CUfunction*, CUmodule, const char*)> module_get_function;
  const Entry<CUresult(CUfunction, int, int)> function_set_attribute;
  const Entry<CUresult(const LaunchConfig*, CUfunction, void**, void**)> launch_kernel;
  const Entry<CUresult(TensorMap*, int, uint32_t, void*, const uint64_t*, const uint64_t*, const uint32_t*,
                       const uint32_t*, int, int, int, int)>
      tensor_map_encode_tiled;
  const Entry<CUresult(TensorMap*, void*)> tensor_map_replace_address;

 private:
  static void* required_library() {
    if (void* library = open_library()) return library;
    throw std::runtime_error(std::string("no NVIDIA driver was found: ") + kLibraryName + " cannot be opened (" +
                             open_error() + "); install driver " + kOldestDriver + " or newer");
  }

  explicit Api(void* library)
      : init(library, "cuInit"),
        driver_get_version(library, "cuDriverGetVersion"),
        get_error_string(library, "cuGetErrorString"),
        device_get(library, "cuDeviceGet"),
        device_get_attribute(library, "cuDeviceGetAttribute"),
        primary_context_retain(library, "cuDevicePrimaryCtxRetain"),
        context_get_current(library, "cuCtxGetCurrent"),
        context_push(library, "cuCtxPushCurrent_v2"),
        context_pop(library, "cuCtxPopCurrent_v2"),
        exchange_capture_mode(library, "cuThreadExchangeStreamCaptureMode"),
        module_load_data(library, "cuModuleLoadData"),
        module_get_function(library, "cuModuleGetFunction"),
        function_set_attribute(library, "cuFuncSetAttribute"),
        launch_kernel(library, "cuLaunchKernelEx"),
        tensor_map_encode_tiled(library, "cuTensorMapEncodeTiled"),
        tensor_map_replace_address(library, "cuTensorMapReplaceAddress") {}
};

CUdevice device_handle(const Api& api, int device) {
  CUdevice handle = 0;
  api.check(api.device_get, &handle, device);
  return handle;
}

CUcontext current_context(const Api& api) {
  CUcontext context = nullptr;
  api.check(api.context_get_current, &context);
  return context;
}

// Loading a module while a stream of this thread is being captured would otherwise break the capture.
class RelaxedCapture {
 public:
  explicit RelaxedCapture(const Api& api) : api_(api) { api_.check(api_.exchange_capture_mode, &mode_); }
  ~RelaxedCapture() { api_.exchange_capture_mode.raw(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  const Api& api_;
  int mode_ = kCaptureModeRelaxed;
};

}  // namespace

int version() {
  const Api& api = Api::loaded();
  int version = 0;
  api.check(api.driver_get_version, &version);
  return version;
}

CUcontext primary_context(int device) {
  static std::mutex mutex;
  static std::unordered_map<int, CUcontext> contexts;
  const Api& api = Api::initialized();
  const std::lock_guard<std::mutex> lock(mutex);
  CUcontext& context = contexts[device];
  if (!context) api.check(api.primary_context_retain, &context, device_handle(api, device));
  return context;
}

ContextGuard::ContextGuard(CUcontext context) : pushed_(false) {
  const Api& api = Api::initialized();
  if (current_context(api) == context) return;
  api.check(api.context_push, context);
  pushed_ = true;
}

ContextGuard::~ContextGuard() {
  if (!pushed_) return;
  CUcontext popped = nullptr;
  Api::initialized().context_pop.raw(&popped);
}

bool Images::Key::operator<(const Key& other) const {
  return std::tie(context, cubin, kernel) < std::tie(other.context, other.cubin, other.kernel);
}

void Images::add(const std::string& cubin_name, std::string image) {
  const std::lock_guard<std::mutex> lock(mutex_);
  images_[cubin_name] = std::move(image);
}

CUfunction Images::kernel(const std::string& cubin_name, const std::string& kernel_name,
                          int dynamic_shared_bytes) const {
  const Api& api = Api::initialized();
  const CUcontext context = current_context(api);
  if (!context) throw std::runtime_error("Images::kernel needs a current CUDA context: use a ContextGuard");
  const std::lock_guard<std::mutex> lock(mutex_);
  Loaded& loaded = functions_[{context, cubin_name, kernel_name}];
  if (!loaded.function)
    api.check(api.module_get_function, &loaded.function, module(context, cubin_name), kernel_name.c_str());
  if (dynamic_shared_bytes > loaded.dynamic_shared_bytes) {
    api.check(api.function_set_attribute, loaded.function, kFunctionMaxDynamicShared, dynamic_shared_bytes);
    loaded.dynamic_shared_bytes = dynamic_shared_bytes;
  }
  return loaded.function;
}

CUmodule Images::module(CUcontext context, const std::string& cubin_name) const {
  CUmodule& module = modules_[{context, cubin_name}];
  if (module) return module;
  const auto image = images_.find(cubin_name);
  if (image == images_.end())
    throw std::runtime_error("the kernels of " + build_.architecture + " have no cubin named " + cubin_name);
  const Api& api = Api::initialized();
  const RelaxedCapture relaxed(api);
  const CUresult result = api.module_load_data.raw(&module, image->second.data());
  if (result == kSuccess) return module;
  std::string message = api.failure(api.module_load_data.name(), result) + " (cubin " + cubin_name + ")";
  if (result == kErrorInvalidImage || result == kErrorNoBinaryForGpu || result == kErrorUnsupportedVersion) {
    int found = 0;
    api.check(api.driver_get_version, &found);
    message += "; it was compiled for " + build_.target + " with " + build_.toolchain + " and needs driver " +
               build_.minimum_driver + ", which supports CUDA " + cuda(build_.minimum_driver_version) +
               ", or newer; this one supports CUDA " + cuda(found);
  }
  throw std::runtime_error(message);
}

void launch(CUfunction function, Extent grid, Extent block, int dynamic_shared_bytes, CUstream stream, void** arguments,
            LaunchOptions options) {
  LaunchAttribute attributes[2]{};
  unsigned count = 0;
  if (options.programmatic_dependent) {
    attributes[count].id = kLaunchProgrammaticSerialization;
    attributes[count++].value.programmatic_serialization_allowed = 1;
  }
  if (options.cluster_blocks > 1) {
    attributes[count].id = kLaunchClusterDimension;
    attributes[count++].value.cluster = {options.cluster_blocks, 1, 1};
  }
  const LaunchConfig config{
      grid.x, grid.y,     grid.z, block.x, block.y, block.z, static_cast<unsigned>(dynamic_shared_bytes),
      stream, attributes, count};
  const Api& api = Api::initialized();
  api.check(api.launch_kernel, &config, function, arguments, static_cast<void**>(nullptr));
}

int multiprocessor_count(int device) {
  static std::mutex mutex;
  static std::unordered_map<int, int> counts;
  const Api& api = Api::initialized();
  const std::lock_guard<std::mutex> lock(mutex);
  int& count = counts[device];
  if (!count) api.check(api.device_get_attribute, &count, kDeviceMultiprocessorCount, device_handle(api, device));
  return count;
}

bool MapDescription::operator==(const MapDescription& other) const {
  return element == other.element && rank == other.rank && std::equal(sizes, sizes + rank, other.sizes) &&
         std::equal(byte_strides, byte_strides + rank - 1, other.byte_strides) &&
         std::equal(box, box + rank, other.box) && swizzle == other.swizzle && promotion == other.promotion;
}

void encode_tensor_map(TensorMap& map, const MapDescription& description, uint64_t address) {
  uint32_t element_strides[MapDescription::kMaxRank];
  std::fill_n(element_strides, MapDescription::kMaxRank, 1u);
  constexpr int kNoInterleave = 0, kFillWithZeros = 0;
  const Api& api = Api::initialized();
  api.check(api.tensor_map_encode_tiled, &map, static_cast<int>(description.element),
            static_cast<uint32_t>(description.rank), reinterpret_cast<void*>(static_cast<uintptr_t>(address)),
            description.sizes, description.byte_strides, description.box, static_cast<const uint32_t*>(element_strides),
            kNoInterleave, static_cast<int>(description.swizzle), static_cast<int>(description.promotion),
            kFillWithZeros);
}

bool replace_address(TensorMap& map, uint64_t address) {
  const Api& api = Api::initialized();
  if (!api.tensor_map_replace_address.exists()) return false;
  api.check(api.tensor_map_replace_address, &map, reinterpret_cast<void*>(static_cast<uintptr_t>(address)));
  return true;
}

}  // namespace driver
