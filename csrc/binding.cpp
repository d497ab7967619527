// The Python module `_C`: launch code for the images of all architectures. Tensors come as plain integers, so the
// module works with every torch version and without torch.
#include "binding.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstring>
#include <exception>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "attention_call.h"
#include "build_info.h"
#include "driver.h"
#include "families.h"
#include "kernels.h"

namespace py = pybind11;

namespace {

// What a build says of itself, by the names of build.json.
template <typename Value>
Value stated(const py::kwargs& build, const char* name) {
  if (!build.contains(name)) throw std::invalid_argument(std::string("the images' build does not say its ") + name);
  try {
    return build[name].cast<Value>();
  } catch (const py::cast_error&) {
    throw std::invalid_argument(std::string("the images' build has another kind of ") + name + ": " +
                                py::repr(build[name]).cast<std::string>());
  }
}

std::shared_ptr<Kernels> make_kernels(const py::kwargs& build) {
  // First, because images of another one may say everything else otherwise.
  const int abi = stated<int>(build, "abi_version");
  if (abi != kAbiVersion) {
    throw std::invalid_argument("the images are for ABI " + std::to_string(abi) + ", the host module has ABI " +
                                std::to_string(kAbiVersion));
  }
  BuildInfo info;
  info.architecture = stated<std::string>(build, "architecture");
  info.family = stated<std::string>(build, "family");
  const Family& family = family_of(info.family);
  const auto launch_interface = stated<std::string>(build, "launch_interface");
  if (launch_interface != family.launch_interface) {
    throw std::invalid_argument("the images are of the launch interface " + launch_interface + " of " + info.family +
                                ", the host module has " + family.launch_interface);
  }
  info.target = stated<std::string>(build, "target");
  info.toolchain = stated<std::string>(build, "toolchain") + ", " + HOST_TOOLCHAIN;
  info.minimum_driver = stated<std::string>(build, "minimum_driver");
  info.minimum_driver_version = stated<int>(build, "minimum_driver_version");
  info.modes = stated<std::vector<std::string>>(build, "modes");
  info.pv_formats = stated<std::vector<std::string>>(build, "pv_formats");
  info.pv_accumulators = stated<std::vector<std::string>>(build, "pv_accumulators");
  info.capabilities = stated<std::vector<std::pair<int, int>>>(build, "capabilities");
  info.half_values = stated<bool>(build, "half_values");
  return std::make_shared<Kernels>(std::move(info));
}

void set_error(PyObject* type, const char* text) {
  // The driver's and the dynamic linker's words may be in any encoding.
  PyObject* message = PyUnicode_DecodeUTF8(text, static_cast<Py_ssize_t>(std::strlen(text)), "backslashreplace");
  if (!message) return;
  PyErr_SetObject(type, message);
  Py_DECREF(message);
}

}  // namespace

const Family& family_of(const std::string& name) {
  for (std::size_t index = 0; index < kFamilyCount; ++index)
    if (name == kFamilies[index].name) return kFamilies[index];
  throw std::invalid_argument("the host module has no launch code for kernels of the family " + name);
}

// Several of these modules may be loaded at once, each with a C++ library of its own. A translator that another
// module registered would not recognize this module's exceptions, so each translates its own.
void translate(std::exception_ptr exception) {
  try {
    if (exception) std::rethrow_exception(exception);
  } catch (py::error_already_set& error) {
    error.restore();
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

PYBIND11_MODULE(_C, module) {
  py::register_local_exception_translator(translate);
  module.doc() = "Launch code of quantized attention kernels";
  module.attr("abi_version") = kAbiVersion;
  module.attr("toolchain") = HOST_TOOLCHAIN;
  py::dict interfaces;
  for (std::size_t index = 0; index < kFamilyCount; ++index)
    interfaces[kFamilies[index].name] = kFamilies[index].launch_interface;
  module.attr("launch_interfaces") = interfaces;
  // Other host modules in the process have classes of their own.
  KernelsClass kernels(module, "Kernels", py::module_local(),
                       "The kernels of one architecture. Safe to use from several threads.");
  kernels
      .def(py::init(&make_kernels),
           "Of images whose build says this of itself: the fields of their build.json as keywords. ValueError for "
           "images that this module cannot launch.")
      .def_property_readonly_static("abi_version", [](const py::object&) { return kAbiVersion; })
      .def_property_readonly_static("slice_multiple", [](const py::object&) { return kSliceMultiple; })
      .def_property_readonly_static("least_sliced_tokens", [](const py::object&) { return kLeastSlicedTokens; })
      .def_property_readonly("architecture", [](const Kernels& self) { return self.build.architecture; })
      .def_property_readonly("target", [](const Kernels& self) { return self.build.target; })
      .def_property_readonly("toolchain", [](const Kernels& self) { return self.build.toolchain; })
      .def_property_readonly("minimum_driver", [](const Kernels& self) { return self.build.minimum_driver; })
      .def_property_readonly("minimum_driver_version",
                             [](const Kernels& self) { return self.build.minimum_driver_version; })
      .def_property_readonly("modes", [](const Kernels& self) { return py::tuple(py::cast(self.build.modes)); })
      .def_property_readonly("pv_formats",
                             [](const Kernels& self) { return py::tuple(py::cast(self.build.pv_formats)); })
      .def_property_readonly("pv_accumulators",
                             [](const Kernels& self) { return py::tuple(py::cast(self.build.pv_accumulators)); })
      .def_property_readonly("capabilities",
                             [](const Kernels& self) { return py::tuple(py::cast(self.build.capabilities)); })
      .def(
          "add_cubin",
          [](Kernels& self, const std::string& name, std::string image) { self.images.add(name, std::move(image)); },
          py::arg("name"), py::arg("image"), "Make a compiled image (bytes) known under its name.")
      .def_static(
          "driver_version", &driver::version,
          "The CUDA version of the installed driver, 1000 * major + 10 * minor. RuntimeError without a driver.");
  bind_plans(module, kernels);
  bind_block_selection(module, kernels);
}
