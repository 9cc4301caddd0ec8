// Block, Budget, Event and Session for Python. The interpreter's lock guards all of them.

#include <algorithm>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "python.hpp"
#include "session.hpp"

namespace gradwire::python {
namespace {

// The types of this module. There is one module in a process: subinterpreters are not supported.
PyTypeObject* block_type;
PyTypeObject* budget_type;
PyTypeObject* event_type;
PyObject* protocol_error;

// -- Python's memory in messages

// A buffer or an object of Python that a message uses.
struct Held {
  Py_buffer buffer{};
  PyObject* object = nullptr;
  Held* next = nullptr;
};

// Those that messages no longer use. A message may end on a thread without the interpreter's lock, so they wait here
// for one that has it. (A list that needs no memory to grow: it grows where nothing may fail.)
class Unused {
 public:
  void add(Held* held) {
    std::lock_guard lock(mutex_);
    held->next = first_;
    first_ = held;
  }

  void release() {
    Held* held;
    {
      std::lock_guard lock(mutex_);
      held = std::exchange(first_, nullptr);
    }
    while (held) {
      std::unique_ptr<Held> owned(held);
      held = held->next;
      // This may run any code.
      if (owned->object) Py_DECREF(owned->object);
      else PyBuffer_Release(&owned->buffer);
    }
  }

 private:
  std::mutex mutex_;
  Held* first_ = nullptr;
};

Unused& unused() {
  static Unused& unused = *new Unused();  // never destroyed: threads may go on while the process ends
  return unused;
}

std::shared_ptr<const void> shared(std::unique_ptr<Held> held) {
  return {held.release(), [](const void* p) { unused().add(static_cast<Held*>(const_cast<void*>(p))); }};
}

Attachment attachment(PyObject* object) {
  auto held = std::make_unique<Held>();
  check(PyObject_GetBuffer(object, &held->buffer, PyBUF_SIMPLE));
  auto data = static_cast<const uint8_t*>(held->buffer.buf);
  auto size = static_cast<size_t>(held->buffer.len);
  return {data, size, shared(std::move(held))};
}

std::vector<Attachment> attachments(PyObject* sequence) {
  std::vector<Attachment> result;
  if (!sequence) return result;
  Ref items(checked(PySequence_Tuple(sequence)));
  Py_ssize_t size = PyTuple_Size(items.get());
  result.reserve(size);
  for (Py_ssize_t i = 0; i < size; i++) result.push_back(attachment(PyTuple_GetItem(items.get(), i)));
  return result;
}

Cookie cookie(PyObject* object) {
  if (!object || object == Py_None) return nullptr;
  auto held = std::make_unique<Held>();
  held->object = Py_NewRef(object);
  return shared(std::move(held));
}

PyObject* to_object(const Cookie& cookie) {
  return Py_NewRef(cookie ? static_cast<const Held*>(cookie.get())->object : Py_None);
}

// For PyArg_Parse...: an unsigned number, without the wrapping of its own formats.
int to_number(PyObject* object, void* result) {
  unsigned long long number = PyLong_AsUnsignedLongLong(object);
  if (PyErr_Occurred()) return 0;
  *static_cast<unsigned long long*>(result) = number;
  return 1;
}

std::string_view bytes(PyObject* object) {
  char* data;
  Py_ssize_t size;
  check(PyBytes_AsStringAndSize(object, &data, &size));
  return {data, static_cast<size_t>(size)};
}

PyObject* to_bytes(std::string_view text) {
  return checked(PyBytes_FromStringAndSize(text.data(), static_cast<Py_ssize_t>(text.size())));
}

PyObject* to_time(Seconds seconds) { return seconds < NEVER ? checked(PyFloat_FromDouble(seconds)) : Py_NewRef(Py_None); }

template <typename Type, typename... Arguments>
PyObject* allocate(PyTypeObject* type, Arguments&&... arguments) {
  auto make = reinterpret_cast<allocfunc>(PyType_GetSlot(type, Py_tp_alloc));
  Ref object(checked(make(type, 0)));
  new (&reinterpret_cast<Type*>(object.get())->value) decltype(Type::value)(std::forward<Arguments>(arguments)...);
  return object.release();
}

template <typename Type>
void deallocate(PyObject* self) {
  using Value = decltype(Type::value);
  reinterpret_cast<Type*>(self)->value.~Value();
  PyTypeObject* type = Py_TYPE(self);
  auto release = reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free));
  release(self);
  Py_DECREF(type);
}

// -- Block

struct PyBlock {
  PyObject_HEAD
  Block value;
};

int block_buffer(PyObject* self, Py_buffer* view, int flags) {
  Block& block = reinterpret_cast<PyBlock*>(self)->value;
  static uint8_t empty;
  return PyBuffer_FillInfo(view, self, block.size() ? block.data() : &empty, block.size(), 0, flags);
}

Py_ssize_t block_size(PyObject* self) { return reinterpret_cast<PyBlock*>(self)->value.size(); }

PyType_Slot block_slots[] = {
    {Py_tp_doc, const_cast<char*>("Memory that an attachment arrived in. It belongs to the receiver.")},
    {Py_tp_dealloc, reinterpret_cast<void*>(deallocate<PyBlock>)},
    {Py_bf_getbuffer, reinterpret_cast<void*>(block_buffer)},
    {Py_sq_length, reinterpret_cast<void*>(block_size)},
    {0, nullptr},
};
PyType_Spec block_spec = {"gradwire.transport.native.Block", sizeof(PyBlock), 0,
                          Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, block_slots};

// -- Budget

struct PyBudget {
  PyObject_HEAD
  std::shared_ptr<Budget> value;
};

PyObject* budget_new(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  return guarded(protocol_error, [&] {
    unsigned long long max_bytes;
    static const char* names[] = {"max_bytes", nullptr};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&", const_cast<char**>(names), to_number, &max_bytes))
      throw Raised();
    return allocate<PyBudget>(type, std::make_shared<Budget>(max_bytes));
  });
}

PyObject* budget_used(PyObject* self, void*) {
  return PyLong_FromUnsignedLongLong(reinterpret_cast<PyBudget*>(self)->value->used());
}

PyGetSetDef budget_properties[] = {
    {"used", budget_used, nullptr, "How many bytes all sessions together use.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};
PyType_Slot budget_slots[] = {
    {Py_tp_doc, const_cast<char*>("What several sessions may use together for large requests.")},
    {Py_tp_new, reinterpret_cast<void*>(budget_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(deallocate<PyBudget>)},
    {Py_tp_getset, budget_properties},
    {0, nullptr},
};
PyType_Spec budget_spec = {"gradwire.transport.native.Budget", sizeof(PyBudget), 0, Py_TPFLAGS_DEFAULT, budget_slots};

// -- Event

PyStructSequence_Field event_fields[] = {
    {"kind", "One of the kinds that the module lists."},
    {"id", "Of the request, or the handle of the call."},
    {"method", "Of a request: a value of link_pb2.Method."},
    {"deadline", "Of a request: when the requester stops waiting; None: never."},
    {"flag", "CHECK: whether the message is a response. GOODBYE: whether the other process goes away."},
    {"body", "Of a request or response; of an error, the serialized Error."},
    {"attachments", "The Blocks that the attachments arrived in."},
    {"cookie", "What was given with the call; CHECK of a response: with the response."},
    {nullptr, nullptr},
};
PyStructSequence_Desc event_description = {"gradwire.transport.native.Event", "Something that happened in a session.",
                                           event_fields, 8};

PyObject* to_event(Event& event) {
  Ref result(checked(PyStructSequence_New(event_type)));
  Py_ssize_t field = 0;
  auto set = [&](PyObject* value) { PyStructSequence_SetItem(result.get(), field++, checked(value)); };
  set(PyLong_FromLong(static_cast<long>(event.kind)));
  set(PyLong_FromUnsignedLongLong(event.id));
  set(PyLong_FromUnsignedLong(event.method));
  set(to_time(event.deadline));
  set(PyBool_FromLong(event.flag));
  set(to_bytes(event.body));
  Ref blocks(checked(PyTuple_New(static_cast<Py_ssize_t>(event.attachments.size()))));
  for (size_t i = 0; i < event.attachments.size(); i++)
    check(PyTuple_SetItem(blocks.get(), static_cast<Py_ssize_t>(i),
                          allocate<PyBlock>(block_type, std::move(event.attachments[i]))));
  set(blocks.release());
  set(to_object(event.cookie));
  return result.release();
}

constexpr std::pair<const char*, Event::Kind> KINDS[] = {
    {"REQUEST", Event::Kind::request},     {"RESPONSE", Event::Kind::response},
    {"ERROR", Event::Kind::error},         {"EXPIRED", Event::Kind::expired},
    {"NO_MEMORY", Event::Kind::no_memory}, {"DISCARDED", Event::Kind::discarded},
    {"UNREACHABLE", Event::Kind::unreachable},
    {"CANCELLED", Event::Kind::cancelled}, {"ACKNOWLEDGED", Event::Kind::acknowledged}, {"CHECK", Event::Kind::check},
    {"GOODBYE", Event::Kind::goodbye},
};

// -- Session

struct PySession {
  PyObject_HEAD
  std::unique_ptr<Session> value;
};

PyObject* session_new(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  return guarded(protocol_error, [&] {
    Settings settings;
    PyObject* budget = nullptr;
    PyObject *refusal = nullptr, *cancelled = nullptr, *no_memory = nullptr;
    unsigned long long max_body = settings.max_body_bytes, max_message = settings.max_message_bytes,
                       quota = settings.max_quota_bytes, window = settings.max_window_bytes,
                       inbound = settings.max_inbound_calls, chunk = settings.chunk_bytes, seed = 0;
    static const char* names[] = {"seed",           "refusal",           "cancelled",       "no_memory",
                                  "budget",         "max_body_bytes",    "max_message_bytes", "max_quota_bytes",
                                  "max_window_bytes", "max_inbound_calls", "chunk_bytes",   nullptr};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|$O&SSSO!O&O&O&O&O&O&", const_cast<char**>(names), to_number, &seed,
                                     &refusal, &cancelled, &no_memory, budget_type, &budget, to_number, &max_body,
                                     to_number, &max_message, to_number, &quota, to_number, &window, to_number,
                                     &inbound, to_number, &chunk))
      throw Raised();
    if (!refusal || !cancelled || !no_memory)
      throw std::invalid_argument("refusal, cancelled and no_memory are needed: each a serialized Error");
    if (max_body > uint64_t{1} << 40) throw std::invalid_argument("max_body_bytes must not exceed 2**40");
    if (chunk == 0) throw std::invalid_argument("chunk_bytes must not be 0");
    settings.refusal = bytes(refusal);
    settings.cancelled = bytes(cancelled);
    settings.no_memory = bytes(no_memory);
    settings.max_body_bytes = max_body;
    settings.max_message_bytes = max_message;
    settings.max_quota_bytes = quota;
    settings.max_window_bytes = window;
    settings.max_inbound_calls = inbound;
    settings.chunk_bytes = chunk;
    settings.seed = seed;
    auto shared = budget ? reinterpret_cast<PyBudget*>(budget)->value : std::make_shared<Budget>();
    return allocate<PySession>(type, std::make_unique<Session>(std::move(settings), std::move(shared)));
  });
}

// Releases what is unused, whether an error was raised or not.
struct ReleaseUnused {
  ~ReleaseUnused() {
    PyObject *type, *error, *traceback;
    PyErr_Fetch(&type, &error, &traceback);
    unused().release();
    PyErr_Restore(type, error, traceback);
  }
};

// A method: parses its arguments and runs `code` with the session.
template <typename Code, typename... Targets>
PyObject* method(PyObject* self, PyObject* args, const char* format, Code code, Targets*... targets) {
  return guarded(protocol_error, [&]() -> PyObject* {
    ReleaseUnused at_the_end;
    if (!PyArg_ParseTuple(args, format, targets...)) throw Raised();
    return checked(code(*reinterpret_cast<PySession*>(self)->value));
  });
}

PyObject* none() { return Py_NewRef(Py_None); }

PyObject* session_call(PyObject* self, PyObject* args) {
  double now;
  unsigned long long number;
  PyObject *body, *parts = nullptr, *timeout = Py_None;
  PyObject* given = nullptr;
  int nested = 0, is_checked = 0, waits = 1;
  return method(
      self, args, "dO&S|OOppOp",
      [&](Session& session) {
        Session::CallOptions options;
        options.nested = nested != 0;
        options.waits_for_connection = waits != 0;
        options.checked = is_checked != 0;
        options.cookie = cookie(given);
        if (timeout != Py_None) {
          options.timeout = PyFloat_AsDouble(timeout);
          if (PyErr_Occurred()) throw Raised();
        }
        if (number > UINT32_MAX) throw std::invalid_argument("there is no such method");
        auto sent = attachments(parts);
        return PyLong_FromUnsignedLongLong(
            session.call(now, number, bytes(body), std::move(sent), std::move(options)));
      },
      &now, to_number, &number, &body, &parts, &timeout, &nested, &is_checked, &given, &waits);
}

PyObject* session_withdraw(PyObject* self, PyObject* args) {
  double now;
  unsigned long long handle;
  return method(
      self, args, "dO&", [&](Session& session) { return PyBool_FromLong(session.withdraw(now, handle)); }, &now,
      to_number, &handle);
}

PyObject* session_limit_window(PyObject* self, PyObject* args) {
  double now;
  unsigned long long limit;
  return method(
      self, args, "dO&", [&](Session& session) { return session.limit_window(now, limit), none(); }, &now, to_number,
      &limit);
}

PyObject* session_begin(PyObject* self, PyObject* args) {
  unsigned long long id;
  return method(
      self, args, "O&", [&](Session& session) { return session.begin(id), none(); }, to_number, &id);
}

PyObject* session_respond(PyObject* self, PyObject* args) {
  unsigned long long id;
  PyObject *body, *parts = nullptr, *given = nullptr;
  int is_checked = 0;
  return method(
      self, args, "O&S|OpO",
      [&](Session& session) {
        auto sent = attachments(parts);
        return PyBool_FromLong(
            session.respond(id, bytes(body), std::move(sent), is_checked != 0, cookie(given)));
      },
      to_number, &id, &body, &parts, &is_checked, &given);
}

PyObject* session_fail(PyObject* self, PyObject* args) {
  unsigned long long id;
  PyObject* error;
  return method(
      self, args, "O&S", [&](Session& session) { return PyBool_FromLong(session.fail(id, bytes(error))); }, to_number,
      &id, &error);
}

PyObject* session_confirm(PyObject* self, PyObject* args) {
  unsigned long long number;
  return method(
      self, args, "O&", [&](Session& session) { return session.confirm(number), none(); }, to_number, &number);
}

PyObject* session_reject(PyObject* self, PyObject* args) {
  double now;
  unsigned long long number;
  PyObject* error;
  return method(
      self, args, "dO&S", [&](Session& session) { return session.reject(now, number, bytes(error)), none(); }, &now,
      to_number, &number, &error);
}

PyObject* session_attach(PyObject* self, PyObject* args) {
  double now;
  return method(
      self, args, "d", [&](Session& session) { return session.attach(now), none(); }, &now);
}

PyObject* session_detach(PyObject* self, PyObject* args) {
  return method(self, args, "", [&](Session& session) { return session.detach(), none(); });
}

PyObject* session_take_output(PyObject* self, PyObject* args) {
  Py_ssize_t small_bytes = 256 * 1024;
  return method(
      self, args, "|n",
      [&](Session& session) {
        Output output = session.take_output(static_cast<size_t>(small_bytes));
        Ref joined(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(output.size)));
        if (!joined) {
          session.detach();  // without these bytes, what follows would make no sense to the other peer
          throw Raised();
        }
        char* to;
        Py_ssize_t size;
        check(PyBytes_AsStringAndSize(joined.get(), &to, &size));
        for (const Output::Piece& piece : output.pieces) {
          std::memcpy(to, piece.data, piece.size);
          to += piece.size;
        }
        return joined.release();
      },
      &small_bytes);
}

PyObject* session_receive(PyObject* self, PyObject* args) {
  double now;
  Py_buffer data;
  int in_place = 0;
  return method(
      self, args, "dy*|p",
      [&](Session& session) {
        struct Release {
          Py_buffer& buffer;
          ~Release() { PyBuffer_Release(&buffer); }
        } release{data};
        Bytes rest{static_cast<const uint8_t*>(data.buf), static_cast<size_t>(data.len)};
        // As a socket is read: what belongs into a large attachment goes there directly.
        while (in_place && !rest.empty()) {
          std::span<uint8_t> place = session.place();
          size_t size = std::min(rest.size(), place.empty() ? size_t{1} : place.size());
          if (place.empty()) {
            session.receive(now, rest.first(size));
          } else {
            std::memcpy(place.data(), rest.data(), size);
            session.received_in_place(now, size);
          }
          rest = rest.subspan(size);
        }
        if (!rest.empty()) session.receive(now, rest);
        return none();
      },
      &now, &data, &in_place);
}

PyObject* session_tick(PyObject* self, PyObject* args) {
  double now;
  return method(
      self, args, "d", [&](Session& session) { return session.tick(now), none(); }, &now);
}

PyObject* session_close(PyObject* self, PyObject* args) {
  PyObject* error = Py_None;
  int leaving = 0;
  return method(
      self, args, "|Op",
      [&](Session& session) {
        Goodbye goodbye;
        goodbye.leaving = leaving != 0;
        if (error != Py_None) goodbye.error = bytes(error), goodbye.has_error = true;
        return session.close(goodbye), none();
      },
      &error, &leaving);
}

PyObject* session_end(PyObject* self, PyObject* args) {
  return method(self, args, "", [&](Session& session) { return session.end(), none(); });
}

PyObject* session_open_calls(PyObject* self, PyObject* args) {
  return method(self, args, "", [&](Session& session) {
    std::vector<Cookie> cookies = session.open_calls();
    Ref list(checked(PyList_New(static_cast<Py_ssize_t>(cookies.size()))));
    for (size_t i = 0; i < cookies.size(); i++)
      check(PyList_SetItem(list.get(), static_cast<Py_ssize_t>(i), to_object(cookies[i])));
    return list.release();
  });
}

PyObject* session_take_events(PyObject* self, PyObject* args) {
  return method(self, args, "", [&](Session& session) {
    std::vector<Event> events = session.take_events();
    Ref list(checked(PyList_New(static_cast<Py_ssize_t>(events.size()))));
    for (size_t i = 0; i < events.size(); i++)
      check(PyList_SetItem(list.get(), static_cast<Py_ssize_t>(i), to_event(events[i])));
    return list.release();
  });
}

PyObject* session_statistics(PyObject* self, PyObject* args) {
  return method(self, args, "", [&](Session& session) {
    Session::Statistics s = session.statistics();
    return checked(Py_BuildValue("{s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:K}", "sent_bytes", s.sent_bytes,
                                 "received_bytes", s.received_bytes, "calls", s.calls, "inbound_calls",
                                 s.inbound_calls, "kept_back", s.kept_back, "repeated_requests", s.repeated_requests,
                                 "repeated_responses", s.repeated_responses, "retries", s.retries, "bytes_in_window",
                                 s.bytes_in_window, "quota_bytes", s.quota_bytes, "arrived_bytes", s.arrived_bytes));
  });
}

void session_deallocate(PyObject* self) {
  ReleaseUnused at_the_end;
  deallocate<PySession>(self);
}

Session& session_of(PyObject* self) { return *reinterpret_cast<PySession*>(self)->value; }

PyObject* session_attached(PyObject* self, void*) { return PyBool_FromLong(session_of(self).is_attached()); }
PyObject* session_has_output(PyObject* self, void*) { return PyBool_FromLong(session_of(self).has_output()); }
PyObject* session_ended(PyObject* self, void*) { return PyBool_FromLong(session_of(self).has_ended()); }
PyObject* session_all_delivered(PyObject* self, void*) { return PyBool_FromLong(session_of(self).all_delivered()); }
PyObject* session_next_tick(PyObject* self, void*) {
  return guarded(protocol_error, [&] { return to_time(session_of(self).next_tick()); });
}

PyMethodDef session_methods[] = {
    {"call", session_call, METH_VARARGS, "Sends a request; returns the handle of the call, 0 if the session has ended."},
    {"withdraw", session_withdraw, METH_VARARGS, "The response is no longer wanted."},
    {"limit_window", session_limit_window, METH_VARARGS, "Sets how many bytes of large requests the peer accepts."},
    {"begin", session_begin, METH_VARARGS, "A request is served now."},
    {"respond", session_respond, METH_VARARGS, "Responds to a request; returns whether the requester gets it."},
    {"fail", session_fail, METH_VARARGS, "Responds with an Error."},
    {"confirm", session_confirm, METH_VARARGS, "The attachments of a message were not modified."},
    {"reject", session_reject, METH_VARARGS, "The attachments of a message were modified."},
    {"attach", session_attach, METH_VARARGS, "Continues over a new connection."},
    {"detach", session_detach, METH_VARARGS, "The connection was cut."},
    {"take_output", session_take_output, METH_VARARGS, "The bytes to write next."},
    {"receive", session_receive, METH_VARARGS, "Takes bytes that were read."},
    {"tick", session_tick, METH_VARARGS, "Does what is due."},
    {"close", session_close, METH_VARARGS, "Ends the session, and tells the other peer."},
    {"end", session_end, METH_VARARGS, "Ends the session."},
    {"open_calls", session_open_calls, METH_VARARGS, "The cookies of the calls whose response is awaited."},
    {"take_events", session_take_events, METH_VARARGS, "What happened since the last time."},
    {"statistics", session_statistics, METH_VARARGS, "Counters, by name."},
    {nullptr, nullptr, 0, nullptr},
};
PyGetSetDef session_properties[] = {
    {"attached", session_attached, nullptr, "Whether there is a connection.", nullptr},
    {"has_output", session_has_output, nullptr, "Whether there is something to write.", nullptr},
    {"ended", session_ended, nullptr, "Whether the session has ended.", nullptr},
    {"all_delivered", session_all_delivered, nullptr, "Whether all responses with attachments are acknowledged.", nullptr},
    {"next_tick", session_next_tick, nullptr, "When `tick` has something to do; None: not as it is.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};
PyType_Slot session_slots[] = {
    {Py_tp_doc, const_cast<char*>("The state machine of a link between two peers.")},
    {Py_tp_new, reinterpret_cast<void*>(session_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(session_deallocate)},
    {Py_tp_methods, session_methods},
    {Py_tp_getset, session_properties},
    {0, nullptr},
};
PyType_Spec session_spec = {"gradwire.transport.native.Session", sizeof(PySession), 0, Py_TPFLAGS_DEFAULT,
                            session_slots};

// -- the memory that attachments arrive in

PyObject* trim(PyObject*, PyObject* args) {
  double seconds;
  if (!PyArg_ParseTuple(args, "d", &seconds)) return nullptr;
  return PyBool_FromLong(trim_pool(seconds));
}

PyMethodDef functions[] = {
    {"trim_pool", trim, METH_VARARGS, "Gives memory back that was not used again for some seconds."},
    {nullptr, nullptr, 0, nullptr},
};

PyTypeObject* add_type(PyObject* module, const char* name, PyType_Spec& spec) {
  PyObject* type = checked(PyType_FromSpec(&spec));
  check(PyModule_AddObjectRef(module, name, type));
  return reinterpret_cast<PyTypeObject*>(type);
}

}  // namespace

void add_session(PyObject* module) {
  block_type = add_type(module, "Block", block_spec);
  budget_type = add_type(module, "Budget", budget_spec);
  add_type(module, "Session", session_spec);
  event_type = PyStructSequence_NewType(&event_description);
  check(PyModule_AddObjectRef(module, "Event", checked(reinterpret_cast<PyObject*>(event_type))));
  protocol_error = checked(PyErr_NewException("gradwire.transport.native.ProtocolError", nullptr, nullptr));
  check(PyModule_AddObjectRef(module, "ProtocolError", protocol_error));
  check(PyModule_AddFunctions(module, functions));
  check(PyModule_AddIntConstant(module, "MOST_ATTACHMENTS", MOST_ATTACHMENTS));
  for (const auto& [name, kind] : KINDS) check(PyModule_AddIntConstant(module, name, static_cast<long>(kind)));
}

}  // namespace gradwire::python
