// Plans in Python: a call by keywords, and a run by addresses.
#include <bitset>
#include <cstdint>
#include <exception>
#include <iterator>
#include <limits>
#include <memory>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include "attention_call.h"
#include "binding.h"
#include "plan.h"

namespace py = pybind11;

namespace {

constexpr const char* kInteger64 = "an integer of 64 bits";
constexpr const char* kInteger32 = "an integer of 32 bits";
constexpr const char* kFlag = "True or False";
constexpr const char* kNumber = "a number";

template <typename Value>
constexpr const char* expected() {
  return std::is_same_v<Value, bool>    ? kFlag
         : std::is_same_v<Value, float> ? kNumber
         : sizeof(Value) == 8           ? kInteger64
                                        : kInteger32;
}

// False when the value does not fit, and then no Python error is set.
bool read(bool& field, PyObject* value) {
  field = value == Py_True;
  return PyBool_Check(value);
}

bool read(int64_t& field, PyObject* value) {
  if (PyBool_Check(value) || !PyIndex_Check(value)) return false;
  const auto index = py::reinterpret_steal<py::object>(PyNumber_Index(value));
  int overflow = 0;
  if (index) field = PyLong_AsLongLongAndOverflow(index.ptr(), &overflow);
  const bool failed = PyErr_Occurred() != nullptr;
  if (failed) PyErr_Clear();
  return !failed && overflow == 0;
}

bool read(int& field, PyObject* value) {
  int64_t wide = 0;
  if (!read(wide, value)) return false;
  field = static_cast<int>(wide);
  return field == wide;
}

bool read(float& field, PyObject* value) {
  if (PyBool_Check(value) || !PyNumber_Check(value)) return false;
  const double number = PyFloat_AsDouble(value);
  const bool failed = PyErr_Occurred() != nullptr;
  if (failed) PyErr_Clear();
  field = static_cast<float>(number);
  return !failed;
}

struct Keyword {
  const char* name;
  const char* expected;
  bool required;
  bool (*set)(CallSignature&, PyObject*);
};

template <auto Field>
constexpr Keyword field(const char* name, bool required) {
  using Value = std::remove_reference_t<decltype(std::declval<CallSignature&>().*Field)>;
  return {name, expected<Value>(), required,
          [](CallSignature& call, PyObject* value) { return read(call.*Field, value); }};
}
template <auto View, auto Field>
constexpr Keyword field(const char* name, bool required) {
  using Value = std::remove_reference_t<decltype((std::declval<CallSignature&>().*View).*Field)>;
  return {name, expected<Value>(), required,
          [](CallSignature& call, PyObject* value) { return read((call.*View).*Field, value); }};
}

// Absent, the mask, the block mask, the LSE, the choice of heads and a slice are not a part of the call, and pv is 0.
constexpr bool kRequired = true, kOptional = false;
#define TENSOR_KEYWORDS(view)                                                             \
  field<&CallSignature::view, &TensorStrides::batch>(#view "_batch_stride", kRequired),   \
      field<&CallSignature::view, &TensorStrides::head>(#view "_head_stride", kRequired), \
      field<&CallSignature::view, &TensorStrides::token>(#view "_token_stride", kRequired)
constexpr Keyword kKeywords[] = {
    field<&CallSignature::batch>("batch", kRequired),
    field<&CallSignature::q_heads>("q_heads", kRequired),
    field<&CallSignature::kv_heads>("kv_heads", kRequired),
    field<&CallSignature::q_length>("q_length", kRequired),
    field<&CallSignature::kv_length>("kv_length", kRequired),
    field<&CallSignature::head_dim>("head_dim", kRequired),
    field<&CallSignature::element>("element", kRequired),
    field<&CallSignature::mode>("mode", kRequired),
    field<&CallSignature::rotate>("rotate", kRequired),
    field<&CallSignature::smooth_v>("smooth_v", kRequired),
    field<&CallSignature::causal>("causal", kRequired),
    field<&CallSignature::pv_accumulator>("pv_accumulator", kRequired),
    field<&CallSignature::scale>("scale", kRequired),
    field<&CallSignature::device>("device", kRequired),
    TENSOR_KEYWORDS(q),
    TENSOR_KEYWORDS(k),
    TENSOR_KEYWORDS(v),
    TENSOR_KEYWORDS(out),
    field<&CallSignature::pv>("pv", kOptional),
    field<&CallSignature::mask, &MaskLayout::element>("mask_element", kOptional),
    field<&CallSignature::mask, &MaskLayout::batch_stride>("mask_batch_stride", kOptional),
    field<&CallSignature::mask, &MaskLayout::head_stride>("mask_head_stride", kOptional),
    field<&CallSignature::mask, &MaskLayout::query_stride>("mask_query_stride", kOptional),
    field<&CallSignature::mask, &MaskLayout::key_stride>("mask_key_stride", kOptional),
    field<&CallSignature::block_mask, &BlockMaskLayout::key_blocks>("block_mask_key_blocks", kOptional),
    field<&CallSignature::block_mask, &BlockMaskLayout::batch_stride>("block_mask_batch_stride", kOptional),
    field<&CallSignature::block_mask, &BlockMaskLayout::head_stride>("block_mask_head_stride", kOptional),
    field<&CallSignature::rotate_by_head>("rotate_by_head", kOptional),
    field<&CallSignature::rotate_as_given>("rotate_as_given", kOptional),
    field<&CallSignature::has_lse>("has_lse", kOptional),
    field<&CallSignature::first_token>("first_token", kOptional),
    field<&CallSignature::slice_tokens>("slice_tokens", kOptional),
};
#undef TENSOR_KEYWORDS
constexpr std::size_t kKeywordCount = std::size(kKeywords);

std::size_t keyword_index(std::string_view name) {
  for (std::size_t index = 0; index < kKeywordCount; ++index)
    if (name == kKeywords[index].name) return index;
  std::string message = "unknown keyword argument " + std::string(name) + ": plan takes ";
  for (std::size_t index = 0; index < kKeywordCount; ++index)
    message += (index ? ", " : "") + std::string(kKeywords[index].name);
  throw py::type_error(message);
}

CallSignature parse(const py::kwargs& arguments) {
  CallSignature call{};
  std::bitset<kKeywordCount> given;
  for (const auto& [key, value] : arguments) {
    const auto name = key.cast<std::string>();
    const std::size_t index = keyword_index(name);
    const Keyword& keyword = kKeywords[index];
    if (!keyword.set(call, value.ptr())) {
      throw py::type_error(name + " must be " + keyword.expected + ", got " + py::repr(value).cast<std::string>());
    }
    given.set(index);
  }
  for (std::size_t index = 0; index < kKeywordCount; ++index) {
    const Keyword& keyword = kKeywords[index];
    if (keyword.required && !given.test(index)) {
      throw py::type_error(std::string("missing keyword argument ") + keyword.name + ": it must be " +
                           keyword.expected);
    }
  }
  return call;
}

std::unique_ptr<Plan> bound_plan(const std::shared_ptr<Kernels>& kernels, const py::kwargs& arguments) {
  return family_of(kernels->build.family).make_plan(parse(arguments), kernels);
}

py::tuple attention_reads(const Plan& plan) {
  py::list names;
  for (const Operand operand : {kQ, kK, kV})
    if (plan.attention_reads() & only(operand)) names.append(kOperandNames[operand]);
  return py::tuple(names);
}

// Arguments of `run`, by position: the operands with the stream behind the workspace, and the phase at the end.
constexpr int kRunArguments = kOperands + 2, kRunRequired = kWorkspace + 2, kStreamArgument = kWorkspace + 1,
              kPhaseArgument = kRunArguments - 1;

const char* run_argument_name(int index) {
  if (index == kStreamArgument) return "stream";
  if (index == kPhaseArgument) return "phase";
  return kOperandNames[index < kStreamArgument ? index : index - 1];
}

int run_argument_index(PyObject* name) {
  for (int index = 0; index < kRunArguments; ++index)
    if (PyUnicode_CompareWithASCIIString(name, run_argument_name(index)) == 0) return index;
  throw py::type_error("run has no argument " + py::cast<std::string>(name));
}

uint64_t run_argument(int index, PyObject* value) {
  const uint64_t number = PyLong_Check(value) ? PyLong_AsUnsignedLongLong(value) : std::numeric_limits<uint64_t>::max();
  if (number == std::numeric_limits<uint64_t>::max() && (!PyLong_Check(value) || PyErr_Occurred())) {
    PyErr_Clear();
    throw py::type_error(std::string(run_argument_name(index)) + " must be an integer from 0 to 2**64 - 1, got " +
                         py::repr(value).cast<std::string>());
  }
  return number;
}

// The vectorcall convention of CPython: a call of `run` is made for every attention, and pybind11's way of passing
// twelve arguments takes longer than all else that it does.
PyObject* run_plan(PyObject* self, PyObject* const* values, Py_ssize_t positional, PyObject* names) {
  try {
    if (positional > kRunArguments)
      throw py::type_error("run takes at most " + std::to_string(kRunArguments) + " arguments, got " +
                           std::to_string(positional));
    uint64_t given[kRunArguments]{};
    std::bitset<kRunArguments> seen;
    for (int index = 0; index < positional; ++index) {
      given[index] = run_argument(index, values[index]);
      seen.set(static_cast<std::size_t>(index));
    }
    for (Py_ssize_t at = 0; names && at < PyTuple_GET_SIZE(names); ++at) {
      const int index = run_argument_index(PyTuple_GET_ITEM(names, at));
      if (seen.test(static_cast<std::size_t>(index)))
        throw py::type_error(std::string("run got two values for ") + run_argument_name(index));
      given[index] = run_argument(index, values[positional + at]);
      seen.set(static_cast<std::size_t>(index));
    }
    for (int index = 0; index < kRunRequired; ++index)
      if (!seen.test(static_cast<std::size_t>(index)))
        throw py::type_error(std::string("run lacks the argument ") + run_argument_name(index));
    OperandAddresses addresses;
    for (int index = 0; index < kOperands; ++index)
      addresses[static_cast<std::size_t>(index)] = given[index < kStreamArgument ? index : index + 1];
    const Plan& plan = py::handle(self).cast<const Plan&>();
    const py::gil_scoped_release released;
    plan.run(addresses, given[kStreamArgument], given[kPhaseArgument]);
  } catch (...) {
    translate(std::current_exception());
    return nullptr;
  }
  Py_RETURN_NONE;
}

PyMethodDef run_method = {
    "run", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&run_plan)), METH_FASTCALL | METH_KEYWORDS,
    "run($self, q, k, v, out, workspace, stream, lse=0, nonfinite=0, mask=0, block_mask=0, invalid_blocks=0,\n"
    "    rotated_heads=0, phase=0)\n--\n\n"
    "Enqueue the call, or one phase of it, on the stream. All arguments are integers: addresses, 0 where the operand "
    "is not given, the stream's handle, and the phase (0 the whole call, 1 its preparation, 2 its attention phase).\n\n"
    "TypeError for what is no such integer; ValueError for operands that are missing, misplaced or not this plan's; "
    "RuntimeError for a failure of the driver."};

}  // namespace

void bind_plans(py::module_& module, KernelsClass& kernels) {
  kernels.def(
      "plan", &bound_plan,
      "Decide a call, given by the fields of CallSignature in csrc/attention_call.h as keywords. Needs no driver. "
      "TypeError for a keyword that is unknown, missing or of the wrong type, ValueError for a call that these "
      "kernels cannot run.");
  py::class_<Plan> plan(module, "Plan", py::module_local(),
                        "A decided call, made by `Kernels.plan`. Safe to run from several threads.");
  plan.def_property_readonly("workspace_bytes", &Plan::workspace_bytes, "Bytes of scratch memory that a run needs.")
      .def_property_readonly("attention_reads", &attention_reads,
                             "Names of those of q, k and v that the attention phase reads.")
      .def("__repr__", [](const Plan& self) { return "<" + self.description() + ">"; });
  PyObject* run = PyDescr_NewMethod(reinterpret_cast<PyTypeObject*>(plan.ptr()), &run_method);
  if (!run) throw py::error_already_set();
  plan.attr("run") = py::reinterpret_steal<py::object>(run);
}
