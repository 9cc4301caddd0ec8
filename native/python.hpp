// What the Python bindings share.

#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cerrno>
#include <exception>
#include <new>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "frames.hpp"

namespace gradwire::python {

// An owned reference.
class Ref {
 public:
  Ref() = default;
  explicit Ref(PyObject* owned) : object_(owned) {}
  Ref(Ref&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  Ref& operator=(Ref&& other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  ~Ref() { Py_XDECREF(object_); }

  PyObject* get() const { return object_; }
  PyObject* release() { return std::exchange(object_, nullptr); }
  explicit operator bool() const { return object_; }

 private:
  PyObject* object_ = nullptr;
};

// What was raised is already set in the interpreter.
struct Raised : std::exception {};

inline PyObject* checked(PyObject* object) {
  if (!object) throw Raised();
  return object;
}

inline void check(int result) {
  if (result < 0) throw Raised();
}

// Runs C++ code on behalf of Python: its exceptions become Python's.
template <typename Code>
PyObject* guarded(PyObject* protocol_error, Code code) {
  try {
    return code();
  } catch (const Raised&) {
  } catch (const ProtocolError& error) {
    PyErr_SetString(protocol_error, error.what());
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::invalid_argument& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
  } catch (const std::system_error& error) {
    errno = error.code().value();
    PyErr_SetFromErrno(PyExc_OSError);
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

// Adds Block, Budget, Event, Link and ProtocolError to the module.
void add_types(PyObject* module);

}  // namespace gradwire::python
