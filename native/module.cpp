// The module gradwire.transport.native: what it is made of, and what it was built with.

#include "python.hpp"

namespace {

#define TEXT_(macro) #macro
#define TEXT(macro) TEXT_(macro)

// The compiler and its version, e.g. "g++ 12.2.0".
const char* compiler() {
#if defined(__clang__)
#ifdef ZIG
#define CLANG "zig/clang "
#else
#define CLANG "clang "
#endif
  return CLANG TEXT(__clang_major__) "." TEXT(__clang_minor__) "." TEXT(__clang_patchlevel__);
#else
  return "g++ " TEXT(__GNUC__) "." TEXT(__GNUC_MINOR__) "." TEXT(__GNUC_PATCHLEVEL__);
#endif
}

int execute(PyObject* module) {
  try {
    gradwire::python::check(PyModule_AddStringConstant(module, "compiler", compiler()));
    gradwire::python::add_types(module);
  } catch (const gradwire::python::Raised&) {
    return -1;
  }
  return 0;
}

PyModuleDef_Slot slots[] = {
    {Py_mod_exec, reinterpret_cast<void*>(execute)},
    {0, nullptr},
};

// The state of the module, if any, is in C++ globals: subinterpreters and free threading are not supported.
PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "native", "What is faster in C++.", 0, nullptr, slots, nullptr, nullptr, nullptr,
};

}  // namespace

PyMODINIT_FUNC PyInit_native() { return PyModuleDef_Init(&definition); }
