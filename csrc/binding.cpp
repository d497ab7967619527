// The Python module `_C` of one architecture's kernels. Tensors come as plain integers, so the module works with
// every torch version and without torch.
#include <pybind11/pybind11.h>

#include <bitset>
#include <cstring>
#include <exception>
#include <iterator>
#include <new>
#include <stdexcept>
#include <string>
#include <string_view>
#include <tuple>
#include <unordered_map>

#include "attention_call.h"
#include "build_info.h"
#include "driver.h"

namespace py = pybind11;

namespace {

using Setter = void (*)(AttentionCall&, py::handle);

template <typename Value>
void assign(Value& field, py::handle value) {
  field = value.cast<Value>();
}

template <auto Field>
void set_field(AttentionCall& call, py::handle value) {
  assign(call.*Field, value);
}

template <auto View, auto Field>
void set_view_field(AttentionCall& call, py::handle value) {
  assign((call.*View).*Field, value);
}

struct Keyword {
  const char* name;
  Setter set;
  bool required;
};

// A field of a view is named <view>_<field>. The mask, the tile lists, the phase, the pointers and the workspace may be
// left out: absent, the whole call or not wanted, and of no interest to workspace_bytes.
constexpr bool kRequired = true, kOptional = false;
#define TENSOR_KEYWORDS(view)                                                                                     \
  Keyword{#view "_pointer", set_view_field<&AttentionCall::view, &TensorView::pointer>, kOptional},               \
      Keyword{#view "_batch_stride", set_view_field<&AttentionCall::view, &TensorView::batch_stride>, kRequired}, \
      Keyword{#view "_head_stride", set_view_field<&AttentionCall::view, &TensorView::head_stride>, kRequired},   \
      Keyword {                                                                                                   \
    #view "_token_stride", set_view_field<&AttentionCall::view, &TensorView::token_stride>, kRequired             \
  }
constexpr Keyword kKeywords[] = {
    TENSOR_KEYWORDS(q),
    TENSOR_KEYWORDS(k),
    TENSOR_KEYWORDS(v),
    TENSOR_KEYWORDS(out),
    {"mask_pointer", set_view_field<&AttentionCall::mask, &MaskView::pointer>, kOptional},
    {"mask_batch_stride", set_view_field<&AttentionCall::mask, &MaskView::batch_stride>, kOptional},
    {"mask_head_stride", set_view_field<&AttentionCall::mask, &MaskView::head_stride>, kOptional},
    {"mask_query_stride", set_view_field<&AttentionCall::mask, &MaskView::query_stride>, kOptional},
    {"mask_key_stride", set_view_field<&AttentionCall::mask, &MaskView::key_stride>, kOptional},
    {"mask_element", set_view_field<&AttentionCall::mask, &MaskView::element>, kOptional},
    {"tiles_pointer", set_view_field<&AttentionCall::tiles, &TileListsView::pointer>, kOptional},
    {"tiles_batch_stride", set_view_field<&AttentionCall::tiles, &TileListsView::batch_stride>, kOptional},
    {"tiles_head_stride", set_view_field<&AttentionCall::tiles, &TileListsView::head_stride>, kOptional},
    {"tiles_key_tiles", set_view_field<&AttentionCall::tiles, &TileListsView::key_tiles>, kOptional},
    {"tiles_invalid", set_view_field<&AttentionCall::tiles, &TileListsView::invalid>, kOptional},
    {"lse", set_field<&AttentionCall::lse>, kOptional},
    {"nonfinite", set_field<&AttentionCall::nonfinite>, kOptional},
    {"gaps", set_field<&AttentionCall::gaps>, kOptional},
    {"batch", set_field<&AttentionCall::batch>, kRequired},
    {"q_heads", set_field<&AttentionCall::q_heads>, kRequired},
    {"kv_heads", set_field<&AttentionCall::kv_heads>, kRequired},
    {"q_length", set_field<&AttentionCall::q_length>, kRequired},
    {"kv_length", set_field<&AttentionCall::kv_length>, kRequired},
    {"head_dim", set_field<&AttentionCall::head_dim>, kRequired},
    {"element", set_field<&AttentionCall::element>, kRequired},
    {"mode", set_field<&AttentionCall::mode>, kRequired},
    {"phase", set_field<&AttentionCall::phase>, kOptional},
    {"rotate", set_field<&AttentionCall::rotate>, kRequired},
    {"smooth_v", set_field<&AttentionCall::smooth_v>, kRequired},
    {"causal", set_field<&AttentionCall::causal>, kRequired},
    {"pv_accumulator", set_field<&AttentionCall::pv_accumulator>, kRequired},
    {"scale", set_field<&AttentionCall::scale>, kRequired},
    {"workspace", set_field<&AttentionCall::workspace>, kOptional},
    {"workspace_bytes", set_field<&AttentionCall::workspace_bytes>, kOptional},
    {"device", set_field<&AttentionCall::device>, kRequired},
    {"stream", set_field<&AttentionCall::stream>, kOptional},
};
#undef TENSOR_KEYWORDS
constexpr std::size_t kKeywordCount = std::size(kKeywords);

std::size_t keyword_index(std::string_view name) {
  static const auto indices = [] {
    std::unordered_map<std::string_view, std::size_t> result;
    for (std::size_t index = 0; index < kKeywordCount; ++index) result.emplace(kKeywords[index].name, index);
    return result;
  }();
  const auto found = indices.find(name);
  if (found == indices.end()) throw py::type_error("unknown keyword argument " + std::string(name));
  return found->second;
}

AttentionCall parse(const py::kwargs& arguments) {
  AttentionCall call{};
  std::bitset<kKeywordCount> given;
  for (const auto& [key, value] : arguments) {
    Py_ssize_t size = 0;
    const char* name = PyUnicode_AsUTF8AndSize(key.ptr(), &size);
    if (!name) throw py::error_already_set();
    const std::size_t index = keyword_index({name, static_cast<std::size_t>(size)});
    try {
      kKeywords[index].set(call, value);
    } catch (const py::cast_error&) {
      throw py::type_error(std::string(name) + " has an unfitting value: " + py::repr(value).cast<std::string>());
    }
    given.set(index);
  }
  for (std::size_t index = 0; index < kKeywordCount; ++index) {
    if (kKeywords[index].required && !given.test(index)) {
      throw py::type_error(std::string("missing keyword argument ") + kKeywords[index].name);
    }
  }
  return call;
}

int64_t bound_workspace_bytes(const py::kwargs& arguments) {
  const AttentionCall call = parse(arguments);
  const py::gil_scoped_release released;
  return workspace_bytes(call);
}

py::tuple bound_read_by_attention_phase(const py::kwargs& arguments) {
  const InputsRead read = read_by_attention_phase(parse(arguments));
  py::list names;
  if (read.q) names.append("q");
  if (read.k) names.append("k");
  if (read.v) names.append("v");
  return py::tuple(names);
}

// Of the tensors that the launches of call.phase read or write.
void require_pointers(const AttentionCall& call) {
  const InputsRead read = call.phase == kAttentionPhase ? read_by_attention_phase(call) : InputsRead{true, true, true};
  const std::tuple<const char*, uint64_t, bool> pointers[] = {
      {"q_pointer", call.q.pointer, read.q},
      {"k_pointer", call.k.pointer, read.k},
      {"v_pointer", call.v.pointer, read.v},
      {"out_pointer", call.out.pointer, call.phase != kPreparation}};
  for (const auto& [name, pointer, needed] : pointers) {
    if (needed && !pointer) throw std::invalid_argument(std::string(name) + " must be given");
  }
}

void bound_attention(const py::kwargs& arguments) {
  const AttentionCall call = parse(arguments);
  require_pointers(call);
  if (call.mask.element && !call.mask.pointer)
    throw std::invalid_argument("mask_pointer must be given with mask_element");
  if (call.tiles.key_tiles && !call.tiles.pointer)
    throw std::invalid_argument("tiles_pointer must be given with tiles_key_tiles");
  const int64_t needed = workspace_bytes(call);
  if (call.workspace_bytes < needed || (needed && !call.workspace)) {
    throw std::invalid_argument("the workspace must have " + std::to_string(needed) + " bytes, got " +
                                std::to_string(call.workspace ? call.workspace_bytes : 0));
  }
  const py::gil_scoped_release released;
  attention(call);
}

void set_error(PyObject* type, const char* text) {
  // The driver's and the dynamic linker's words may be in any encoding.
  PyObject* message = PyUnicode_DecodeUTF8(text, static_cast<Py_ssize_t>(std::strlen(text)), "backslashreplace");
  if (!message) return;
  PyErr_SetObject(type, message);
  Py_DECREF(message);
}

// Several of these modules may be loaded at once, each with a C++ library of its own. A translator that another
// module registered would not recognize this module's exceptions, so each translates its own.
void translate(std::exception_ptr exception) {
  try {
    if (exception) std::rethrow_exception(exception);
  } catch (const py::builtin_exception& error) {
    error.set_error();
  } catch (const std::invalid_argument& error) {
    set_error(PyExc_ValueError, error.what());
  } catch (const std::bad_alloc& error) {
    PyErr_SetString(PyExc_MemoryError, error.what());
  } catch (const std::exception& error) {
    set_error(PyExc_RuntimeError, error.what());
  }
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  py::register_local_exception_translator(translate);
  module.doc() = std::string("Quantized attention kernels for ") + kBuildInfo.architecture;
  module.attr("architecture") = kBuildInfo.architecture;
  module.attr("target") = kBuildInfo.target;
  module.attr("version") = kBuildInfo.version;
  module.attr("abi_version") = kAbiVersion;
  module.attr("toolchain") = kBuildInfo.toolchain;
  module.attr("minimum_driver") = kBuildInfo.minimum_driver;
  module.attr("minimum_driver_version") = kBuildInfo.minimum_driver_version;
  module.def("add_cubin", &driver::add_cubin, py::arg("name"), py::arg("image"),
             "Make a compiled image (bytes) known under its name.");
  module.def("driver_version", &driver::version,
             "The CUDA version of the installed driver, 1000 * major + 10 * minor. RuntimeError without a driver.");
  module.def("workspace_bytes", &bound_workspace_bytes,
             "Bytes of scratch memory for a call, given by the fields of csrc/attention_call.h as keywords.");
  module.def("read_by_attention_phase", &bound_read_by_attention_phase,
             "Names of those of q, k and v that the attention phase of a call reads; keywords as of workspace_bytes.");
  module.def("attention", &bound_attention,
             "Enqueue a call, or one phase of it, given by the fields of csrc/attention_call.h as keywords, on its "
             "stream. ValueError for a call that these kernels cannot run, RuntimeError for a failure of the driver.");
}
