// The part of CPython's stable ABI (abi3, 3.11 and later) that the native module uses, in the place of CPython's own
// Python.h: many Pythons come without theirs (Debian's is in python3-dev), and gradwire needs nothing but Python.
//
// What is declared here cannot change: keeping to it is what "stable" means, and why one build serves all versions. The
// names and their meaning are those of https://docs.python.org/3.11/c-api/stable.html. Whatever else of that list is
// wanted gets a line here. tests/unit/test_native_build.py compares all of it with CPython's own header, where there is
// one. Free-threaded builds of CPython have another layout of objects; they have no abi3 and refuse this module.

#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <utility>

#ifndef Py_PYTHON_H  // CPython's header has been read: only the functions are declared again, to compare them

using Py_ssize_t = ssize_t;
using Py_hash_t = Py_ssize_t;

extern "C" {

struct PyTypeObject;
struct PyThreadState;

struct PyObject {
  Py_ssize_t ob_refcnt;
  PyTypeObject* ob_type;
};
#define PyObject_HEAD PyObject ob_base;

using PyCFunction = PyObject* (*)(PyObject*, PyObject*);
using PyCFunctionWithKeywords = PyObject* (*)(PyObject*, PyObject*, PyObject*);
using _PyCFunctionFast = PyObject* (*)(PyObject*, PyObject* const*, Py_ssize_t);
using visitproc = int (*)(PyObject*, void*);
using traverseproc = int (*)(PyObject*, visitproc, void*);
using inquiry = int (*)(PyObject*);
using destructor = void (*)(PyObject*);
using freefunc = void (*)(void*);
using allocfunc = PyObject* (*)(PyTypeObject*, Py_ssize_t);
using newfunc = PyObject* (*)(PyTypeObject*, PyObject*, PyObject*);
using getter = PyObject* (*)(PyObject*, void*);
using setter = int (*)(PyObject*, PyObject*, void*);

struct PyMethodDef {
  const char* ml_name;
  PyCFunction ml_meth;
  int ml_flags;
  const char* ml_doc;
};
#define METH_VARARGS 0x0001
#define METH_KEYWORDS 0x0002
#define METH_NOARGS 0x0004
#define METH_O 0x0008
#define METH_CLASS 0x0010
#define METH_STATIC 0x0020
#define METH_FASTCALL 0x0080

struct PyGetSetDef {
  const char* name;
  getter get;
  setter set;
  const char* doc;
  void* closure;
};

struct PyType_Slot {
  int slot;
  void* pfunc;
};

struct PyType_Spec {
  const char* name;
  int basicsize;
  int itemsize;
  unsigned int flags;
  PyType_Slot* slots;
};
#define Py_TPFLAGS_DISALLOW_INSTANTIATION (1UL << 7)
#define Py_TPFLAGS_IMMUTABLETYPE (1UL << 8)
#define Py_TPFLAGS_BASETYPE (1UL << 10)
#define Py_TPFLAGS_HAVE_GC (1UL << 14)
#define Py_TPFLAGS_DEFAULT 0
#define Py_bf_getbuffer 1
#define Py_bf_releasebuffer 2
#define Py_mp_length 4
#define Py_mp_subscript 5
#define Py_sq_item 44
#define Py_sq_length 45
#define Py_tp_alloc 47
#define Py_tp_call 50
#define Py_tp_clear 51
#define Py_tp_dealloc 52
#define Py_tp_doc 56
#define Py_tp_hash 59
#define Py_tp_init 60
#define Py_tp_iter 62
#define Py_tp_iternext 63
#define Py_tp_methods 64
#define Py_tp_new 65
#define Py_tp_repr 66
#define Py_tp_traverse 71
#define Py_tp_members 72
#define Py_tp_getset 73
#define Py_tp_free 74

struct PyModuleDef_Slot {
  int slot;
  void* value;
};
#define Py_mod_create 1
#define Py_mod_exec 2

struct PyModuleDef_Base {
  PyObject ob_base;
  PyObject* (*m_init)();
  Py_ssize_t m_index;
  PyObject* m_copy;
};
// clang-format off
#define PyModuleDef_HEAD_INIT {{1, nullptr}, nullptr, 0, nullptr}
// clang-format on

struct PyModuleDef {
  PyModuleDef_Base m_base;
  const char* m_name;
  const char* m_doc;
  Py_ssize_t m_size;
  PyMethodDef* m_methods;
  PyModuleDef_Slot* m_slots;
  traverseproc m_traverse;
  inquiry m_clear;
  freefunc m_free;
};
#define PyMODINIT_FUNC extern "C" __attribute__((visibility("default"))) PyObject*

struct PyStructSequence_Field {
  const char* name;
  const char* doc;
};

struct PyStructSequence_Desc {
  const char* name;
  const char* doc;
  PyStructSequence_Field* fields;
  int n_in_sequence;
};

struct Py_buffer {
  void* buf;
  PyObject* obj;
  Py_ssize_t len;
  Py_ssize_t itemsize;
  int readonly;
  int ndim;
  char* format;
  Py_ssize_t* shape;
  Py_ssize_t* strides;
  Py_ssize_t* suboffsets;
  void* internal;
};
#define PyBUF_SIMPLE 0
#define PyBUF_WRITABLE 0x0001
#define PyBUF_FORMAT 0x0004
#define PyBUF_ND 0x0008
#define PyBUF_CONTIG (PyBUF_ND | PyBUF_WRITABLE)
#define PyBUF_CONTIG_RO PyBUF_ND
#define PyBUF_READ 0x100
#define PyBUF_WRITE 0x200

enum PyGILState_STATE { PyGILState_LOCKED, PyGILState_UNLOCKED };

extern PyObject _Py_NoneStruct, _Py_TrueStruct, _Py_FalseStruct;
#define Py_None (&_Py_NoneStruct)
#define Py_True (&_Py_TrueStruct)
#define Py_False (&_Py_FalseStruct)

extern PyObject *PyExc_BaseException, *PyExc_BufferError, *PyExc_ConnectionError, *PyExc_Exception, *PyExc_IndexError,
    *PyExc_KeyError, *PyExc_MemoryError, *PyExc_OSError, *PyExc_OverflowError, *PyExc_RuntimeError, *PyExc_SystemError,
    *PyExc_TimeoutError, *PyExc_TypeError, *PyExc_ValueError;

extern PyTypeObject PyBytes_Type, PyDict_Type, PyFloat_Type, PyList_Type, PyLong_Type, PyTuple_Type, PyUnicode_Type;

}  // extern "C"

#endif

extern "C" {
// References
void Py_IncRef(PyObject*);
void Py_DecRef(PyObject*);
PyObject* Py_NewRef(PyObject* obj);
PyObject* Py_XNewRef(PyObject* obj);

// Modules and types
PyObject* PyModuleDef_Init(PyModuleDef*);
int PyModule_AddObjectRef(PyObject* mod, const char* name, PyObject* value);
int PyModule_AddFunctions(PyObject*, PyMethodDef*);
int PyModule_AddIntConstant(PyObject*, const char*, long);
int PyModule_AddStringConstant(PyObject*, const char*, const char*);
void* PyModule_GetState(PyObject*);
PyObject* PyType_FromSpec(PyType_Spec*);
PyObject* PyType_FromModuleAndSpec(PyObject*, PyType_Spec*, PyObject*);
void* PyType_GetSlot(PyTypeObject*, int);
unsigned long PyType_GetFlags(PyTypeObject*);
int PyType_IsSubtype(PyTypeObject*, PyTypeObject*);
PyTypeObject* PyStructSequence_NewType(PyStructSequence_Desc* desc);
PyObject* PyStructSequence_New(PyTypeObject* type);
void PyStructSequence_SetItem(PyObject*, Py_ssize_t, PyObject*);

// Objects
PyObject* PyObject_GetAttrString(PyObject*, const char*);
int PyObject_SetAttrString(PyObject*, const char*, PyObject*);
int PyObject_IsTrue(PyObject*);
Py_ssize_t PyObject_Size(PyObject* o);
int PyCallable_Check(PyObject*);
PyObject* PyObject_CallNoArgs(PyObject* func);
PyObject* PyObject_CallObject(PyObject* callable, PyObject* args);
PyObject* PyObject_CallFunctionObjArgs(PyObject* callable, ...);
PyObject* PyObject_CallMethodObjArgs(PyObject* obj, PyObject* name, ...);
PyObject* PyObject_GetIter(PyObject*);
PyObject* PyIter_Next(PyObject*);
void PyObject_GC_Track(void*);
void PyObject_GC_UnTrack(void*);
void PyObject_GC_Del(void*);

// Buffers
int PyObject_CheckBuffer(PyObject* obj);
int PyObject_GetBuffer(PyObject* obj, Py_buffer* view, int flags);
void PyBuffer_Release(Py_buffer* view);
int PyBuffer_FillInfo(Py_buffer* view, PyObject* o, void* buf, Py_ssize_t len, int readonly, int flags);
int PyBuffer_IsContiguous(const Py_buffer* view, char fort);
PyObject* PyMemoryView_FromObject(PyObject* base);
PyObject* PyMemoryView_FromMemory(char* mem, Py_ssize_t size, int flags);
PyObject* PyMemoryView_FromBuffer(const Py_buffer* info);

// Errors
void PyErr_SetString(PyObject* exception, const char* string);
void PyErr_SetObject(PyObject*, PyObject*);
void PyErr_SetNone(PyObject*);
PyObject* PyErr_Format(PyObject* exception, const char* format, ...);
PyObject* PyErr_Occurred();
void PyErr_Fetch(PyObject**, PyObject**, PyObject**);
void PyErr_Restore(PyObject*, PyObject*, PyObject*);
void PyErr_Clear();
void PyErr_Fetch(PyObject**, PyObject**, PyObject**);
void PyErr_Restore(PyObject*, PyObject*, PyObject*);
int PyErr_ExceptionMatches(PyObject*);
PyObject* PyErr_NoMemory();
PyObject* PyErr_SetFromErrno(PyObject*);
void PyErr_WriteUnraisable(PyObject*);
int PyErr_CheckSignals();
PyObject* PyErr_NewException(const char* name, PyObject* base, PyObject* dict);
PyObject* PyErr_NewExceptionWithDoc(const char* name, const char* doc, PyObject* base, PyObject* dict);

// Numbers
PyObject* PyBool_FromLong(long);
PyObject* PyLong_FromLong(long);
PyObject* PyLong_FromLongLong(long long);
PyObject* PyLong_FromUnsignedLong(unsigned long);
PyObject* PyLong_FromUnsignedLongLong(unsigned long long);
PyObject* PyLong_FromSsize_t(Py_ssize_t);
PyObject* PyLong_FromSize_t(size_t);
long PyLong_AsLong(PyObject*);
long long PyLong_AsLongLong(PyObject*);
unsigned long PyLong_AsUnsignedLong(PyObject*);
unsigned long long PyLong_AsUnsignedLongLong(PyObject*);
Py_ssize_t PyLong_AsSsize_t(PyObject*);
size_t PyLong_AsSize_t(PyObject*);
PyObject* PyFloat_FromDouble(double);
double PyFloat_AsDouble(PyObject*);

// Bytes and text
PyObject* PyBytes_FromStringAndSize(const char*, Py_ssize_t);
char* PyBytes_AsString(PyObject*);
int PyBytes_AsStringAndSize(PyObject* obj, char** s, Py_ssize_t* len);
Py_ssize_t PyBytes_Size(PyObject*);
PyObject* PyUnicode_FromString(const char* u);
PyObject* PyUnicode_FromStringAndSize(const char* u, Py_ssize_t size);
PyObject* PyUnicode_FromFormat(const char* format, ...);
const char* PyUnicode_AsUTF8AndSize(PyObject* unicode, Py_ssize_t* size);

// Containers
PyObject* PyTuple_New(Py_ssize_t size);
Py_ssize_t PyTuple_Size(PyObject*);
PyObject* PyTuple_GetItem(PyObject*, Py_ssize_t);
int PyTuple_SetItem(PyObject*, Py_ssize_t, PyObject*);
PyObject* PyTuple_Pack(Py_ssize_t, ...);
PyObject* PyList_New(Py_ssize_t size);
Py_ssize_t PyList_Size(PyObject*);
PyObject* PyList_GetItem(PyObject*, Py_ssize_t);
int PyList_SetItem(PyObject*, Py_ssize_t, PyObject*);
int PyList_Append(PyObject*, PyObject*);
PyObject* PyDict_New();
int PyDict_SetItem(PyObject* mp, PyObject* key, PyObject* item);
int PyDict_SetItemString(PyObject* dp, const char* key, PyObject* item);
PyObject* PyDict_GetItemWithError(PyObject* mp, PyObject* key);
int PySequence_Check(PyObject* o);
Py_ssize_t PySequence_Size(PyObject* o);
PyObject* PySequence_GetItem(PyObject* o, Py_ssize_t i);
PyObject* PySequence_Tuple(PyObject* o);

// Arguments. Those with a length, as in "y#", have it as Py_ssize_t: what PY_SSIZE_T_CLEAN asks CPython's header for.
int _PyArg_ParseTuple_SizeT(PyObject*, const char*, ...);
int _PyArg_ParseTupleAndKeywords_SizeT(PyObject*, PyObject*, const char*, char**, ...);
int PyArg_UnpackTuple(PyObject*, const char*, Py_ssize_t, Py_ssize_t, ...);
PyObject* _Py_BuildValue_SizeT(const char*, ...);

// Imports and threads
PyObject* PyImport_ImportModule(const char* name);
PyGILState_STATE PyGILState_Ensure();
void PyGILState_Release(PyGILState_STATE);
PyThreadState* PyEval_SaveThread();
void PyEval_RestoreThread(PyThreadState*);

}  // extern "C"

#ifndef Py_PYTHON_H

#define PyArg_ParseTuple _PyArg_ParseTuple_SizeT
#define PyArg_ParseTupleAndKeywords _PyArg_ParseTupleAndKeywords_SizeT
#define Py_BuildValue _Py_BuildValue_SizeT

// Not the fields themselves: newer versions of CPython do not count the references of some objects.
template <typename Object>
void Py_INCREF(Object* object) {
  Py_IncRef(reinterpret_cast<PyObject*>(object));
}
template <typename Object>
void Py_DECREF(Object* object) {
  Py_DecRef(reinterpret_cast<PyObject*>(object));
}
#define Py_XINCREF Py_INCREF
#define Py_XDECREF Py_DECREF
#define Py_CLEAR(reference) Py_DECREF(std::exchange(reference, nullptr))

inline PyTypeObject* Py_TYPE(PyObject* object) { return object->ob_type; }
inline bool PyObject_TypeCheck(PyObject* object, PyTypeObject* type) {
  return Py_TYPE(object) == type || PyType_IsSubtype(Py_TYPE(object), type);
}

#define Py_RETURN_NONE return Py_NewRef(Py_None)
#define Py_RETURN_TRUE return Py_NewRef(Py_True)
#define Py_RETURN_FALSE return Py_NewRef(Py_False)
#define Py_BEGIN_ALLOW_THREADS { PyThreadState* saved_ = PyEval_SaveThread();
#define Py_END_ALLOW_THREADS PyEval_RestoreThread(saved_); }

#endif
