// The Python module of the extension, with the version of torch it was built against. Loading the library
// registers the ops.
#include <Python.h>

#include <torch/headeronly/version.h>

PyMODINIT_FUNC PyInit__C() {
  static PyModuleDef definition = {
      PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  PyObject* module = PyModule_Create(&definition);
  if (module != nullptr && PyModule_AddStringConstant(module, "torch_version", TORCH_VERSION) < 0) {
    Py_DECREF(module);
    return nullptr;
  }
  return module;
}
