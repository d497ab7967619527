/* The minimum that the loader requires of a host module or an installed one. Define ARCHITECTURE, VERSION, ABI. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* Keeps its last arguments. */
static PyObject* add_cubin(PyObject* self, PyObject* arguments) {
  if (PyObject_SetAttrString(self, "added", arguments)) return NULL;
  Py_RETURN_NONE;
}
static PyObject* driver_version(PyObject* self, PyObject* arguments) { return PyLong_FromLong(12080); }

/* The kernels of some images: a namespace of this module's contents and the images' build info. */
static PyObject* kernels(PyObject* self, PyObject* arguments, PyObject* build) {
  PyObject* types = PyImport_ImportModule("types");
  PyObject* type = types ? PyObject_GetAttrString(types, "SimpleNamespace") : NULL;
  PyObject* fields = type ? PyDict_Copy(PyModule_GetDict(self)) : NULL;
  PyObject* made = fields && (!build || PyDict_Update(fields, build) == 0) ? PyObject_Call(type, arguments, fields) : NULL;
  Py_XDECREF(fields);
  Py_XDECREF(type);
  Py_XDECREF(types);
  return made;
}

static PyMethodDef methods[] = {
    {"Kernels", (PyCFunction)(void (*)(void))kernels, METH_VARARGS | METH_KEYWORDS, NULL},
    {"add_cubin", add_cubin, METH_VARARGS, NULL},
    {"driver_version", driver_version, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static int execute(PyObject* module) {
  return PyModule_AddIntConstant(module, "abi_version", ABI) ||
                 PyModule_AddStringConstant(module, "architecture", ARCHITECTURE) ||
                 PyModule_AddStringConstant(module, "version", VERSION) ||
                 PyModule_AddStringConstant(module, "target", "a test") ||
                 PyModule_AddIntConstant(module, "minimum_driver_version", 12000)
             ? -1
             : 0;
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, execute}, {0, NULL}};
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_C", NULL, 0, methods, slots, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__C(void) { return PyModuleDef_Init(&definition); }
