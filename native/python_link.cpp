// Block, Budget, Event and Link for Python.
//
// Threads that come from here hold the interpreter's lock while they hold that of a link, and never wait for it then.
// So what holds the lock of a link must not wait for the interpreter's.

#include <algorithm>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "event_loop.hpp"
#include "link.hpp"
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

Unused* the_unused = new Unused();  // never destroyed: threads may go on while the process ends

Unused& unused() { return *the_unused; }

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
    {"flag",
     "REQUEST: whether it has been cancelled meanwhile. CHECK: whether the message is a response. GOODBYE: whether the "
     "other process goes away. DISCONNECTED: whether this process had no descriptor left for shared memory."},
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
    {"GOODBYE", Event::Kind::goodbye},     {"TIMER", Event::Kind::timer}, {"DISCONNECTED", Event::Kind::disconnected}, {"BROKEN", Event::Kind::broken},
};

// -- Link

// To copy more takes longer than the interpreter's lock takes to be given up.
constexpr size_t LARGE_BYTES = 64 * 1024;

struct PyLink {
  PyObject_HEAD
  std::shared_ptr<Link> value;
};

Link& link_of(PyObject* self) { return *reinterpret_cast<PyLink*>(self)->value; }

// Runs what may take long without the interpreter's lock. Nothing may be thrown where that is taken again: if the
// process ends meanwhile, Python ends the thread there.
template <typename Code>
auto without_gil(Code code) {
  std::exception_ptr error;
  decltype(code()) result{};
  PyThreadState* state = PyEval_SaveThread();
  try {
    result = code();
  } catch (const std::exception&) {
    error = std::current_exception();
  }
  PyEval_RestoreThread(state);
  if (error) std::rethrow_exception(error);
  return result;
}

std::unique_lock<FairMutex> locked(Link& link) {
  std::unique_lock lock(link.mutex(), std::try_to_lock);
  if (lock) return lock;
  // Without the interpreter's lock, until it is free. It is not kept while the interpreter's is taken: whoever has that
  // may be waiting for this one. Others may be first to take it then, but nobody holds it for longer than a moment.
  without_gil([&] {
    std::lock_guard wait(link.mutex());
    return 0;
  });
  lock.lock();
  return lock;
}

Link::Use use(Link& link) { return {link, locked(link)}; }

PyObject* link_new(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  return guarded(protocol_error, [&] {
    Settings settings;
    PyObject* budget = nullptr;
    PyObject *refusal = nullptr, *cancelled = nullptr, *no_memory = nullptr;
    unsigned long long max_body = settings.max_body_bytes, max_message = settings.max_message_bytes,
                       quota = settings.max_quota_bytes, window = settings.max_window_bytes,
                       inbound = settings.max_inbound_calls, chunk = settings.chunk_bytes, seed = 0;
    double patience = settings.patience;
    static const char* names[] = {"seed",           "refusal",           "cancelled",       "no_memory",
                                  "budget",         "max_body_bytes",    "max_message_bytes", "max_quota_bytes",
                                  "max_window_bytes", "max_inbound_calls", "chunk_bytes",   "patience",
                                  nullptr};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|$O&SSSO!O&O&O&O&O&O&d", const_cast<char**>(names), to_number, &seed,
                                     &refusal, &cancelled, &no_memory, budget_type, &budget, to_number, &max_body,
                                     to_number, &max_message, to_number, &quota, to_number, &window, to_number,
                                     &inbound, to_number, &chunk, &patience))
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
    settings.patience = patience;
    auto shared = budget ? reinterpret_cast<PyBudget*>(budget)->value : std::make_shared<Budget>();
    return allocate<PyLink>(type, std::make_shared<Link>(std::move(settings), std::move(shared)));
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

// For a method: parses its arguments and runs `code` with the session, under its lock. It must not make containers of
// Python's: that may collect garbage, whose destructors may use this very session.
template <typename Code, typename... Targets>
PyObject* with_session(PyObject* self, PyObject* args, const char* format, Code code, Targets*... targets) {
  return guarded(protocol_error, [&]() -> PyObject* {
    ReleaseUnused at_the_end;
    if (!PyArg_ParseTuple(args, format, targets...)) throw Raised();
    return checked(code(use(link_of(self)).session()));
  });
}

// The same with the link.
template <typename Code, typename... Targets>
PyObject* with_link(PyObject* self, PyObject* args, const char* format, Code code, Targets*... targets) {
  return guarded(protocol_error, [&]() -> PyObject* {
    ReleaseUnused at_the_end;
    if (!PyArg_ParseTuple(args, format, targets...)) throw Raised();
    return checked(code(link_of(self)));
  });
}

PyObject* none() { return Py_NewRef(Py_None); }

PyObject* link_call(PyObject* self, PyObject* args) {
  double now;
  unsigned long long number;
  PyObject *body, *parts = nullptr, *timeout = Py_None;
  PyObject* given = nullptr;
  int nested = 0, is_checked = 0, waits = 1;
  return with_link(
      self, args, "dO&S|OOppOp",
      [&](Link& link) {
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
            use(link).session().call(now, number, bytes(body), std::move(sent), std::move(options)));
      },
      &now, to_number, &number, &body, &parts, &timeout, &nested, &is_checked, &given, &waits);
}

PyObject* link_withdraw(PyObject* self, PyObject* args) {
  double now;
  unsigned long long handle;
  return with_link(
      self, args, "dO&",
      [&](Link& link) {
        bool was_awaited = use(link).session().withdraw(now, handle);
        link.wake(handle);
        return PyBool_FromLong(was_awaited);
      },
      &now, to_number, &handle);
}

PyObject* link_limit_window(PyObject* self, PyObject* args) {
  double now;
  unsigned long long limit;
  return with_session(
      self, args, "dO&", [&](Session& session) { return session.limit_window(now, limit), none(); }, &now, to_number,
      &limit);
}

PyObject* link_begin(PyObject* self, PyObject* args) {
  unsigned long long id;
  return with_session(
      self, args, "O&", [&](Session& session) { return session.begin(id), none(); }, to_number, &id);
}

PyObject* link_respond(PyObject* self, PyObject* args) {
  unsigned long long id;
  PyObject *body, *parts = nullptr, *given = nullptr;
  int is_checked = 0;
  return with_link(
      self, args, "O&S|OpO",
      [&](Link& link) {
        auto sent = attachments(parts);
        Cookie kept = cookie(given);
        return PyBool_FromLong(
            use(link).session().respond(id, bytes(body), std::move(sent), is_checked != 0, std::move(kept)));
      },
      to_number, &id, &body, &parts, &is_checked, &given);
}

PyObject* link_fail(PyObject* self, PyObject* args) {
  unsigned long long id;
  PyObject* error;
  return with_session(
      self, args, "O&S", [&](Session& session) { return PyBool_FromLong(session.fail(id, bytes(error))); }, to_number,
      &id, &error);
}

PyObject* link_confirm(PyObject* self, PyObject* args) {
  unsigned long long number;
  return with_session(
      self, args, "O&", [&](Session& session) { return session.confirm(number), none(); }, to_number, &number);
}

PyObject* link_reject(PyObject* self, PyObject* args) {
  double now;
  unsigned long long number;
  PyObject* error;
  return with_session(
      self, args, "dO&S", [&](Session& session) { return session.reject(now, number, bytes(error)), none(); }, &now,
      to_number, &number, &error);
}

PyObject* link_attach(PyObject* self, PyObject* args) {
  double now;
  PyObject* owner = nullptr;
  return with_link(
      self, args, "d|O",
      [&](Link& link) {
        if (!owner) return use(link).session().attach(now), none();
        Cookie kept = cookie(owner);
        without_gil([&] { return link.attach(now, std::move(kept)), 0; });
        return none();
      },
      &now, &owner);
}

PyObject* link_detach(PyObject* self, PyObject* args) {
  return with_session(self, args, "", [&](Session& session) { return session.detach(), none(); });
}

PyObject* link_take_output(PyObject* self, PyObject* args) {
  Py_ssize_t small_bytes = 256 * 1024, bulk_bytes = 0;
  PyObject* before = nullptr;
  return with_link(
      self, args, "|nnS",
      [&](Link& link) {
        std::string_view begin = before ? bytes(before) : std::string_view();
        Output output = use(link).session().take_output(static_cast<size_t>(small_bytes), static_cast<size_t>(bulk_bytes));
        Ref joined(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(begin.size() + output.size)));
        if (!joined) {
          // Without these bytes, what follows would make no sense to the other peer.
          use(link).session().detach();
          throw Raised();
        }
        char* to;
        Py_ssize_t size;
        check(PyBytes_AsStringAndSize(joined.get(), &to, &size));
        auto join = [&] {
          to = std::copy(begin.begin(), begin.end(), to);
          for (const Output::Piece& piece : output.pieces) {
            std::memcpy(to, piece.data, piece.size);
            to += piece.size;
          }
          return 0;
        };
        output.size > LARGE_BYTES ? without_gil(join) : join();
        return joined.release();
      },
      &small_bytes, &bulk_bytes, &before);
}

PyObject* link_receive(PyObject* self, PyObject* args) {
  double now;
  Py_buffer data;
  int in_place = 0;
  return with_session(
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

// Without the interpreter's lock if there is much to copy.
PyObject* link_feed(PyObject* self, PyObject* args) {
  Py_buffer data;
  return with_link(
      self, args, "y*",
      [&](Link& link) {
        struct Release {
          Py_buffer& buffer;
          ~Release() { PyBuffer_Release(&buffer); }
        } release{data};
        Bytes bytes{static_cast<const uint8_t*>(data.buf), static_cast<size_t>(data.len)};
        auto feed = [&] { return link.feed(bytes); };
        if (bytes.size() > LARGE_BYTES) return PyBool_FromLong(without_gil(feed));
        locked(link).unlock();  // the next line waits for no longer than it takes to run
        return PyBool_FromLong(feed());
      },
      &data);
}

PyObject* link_tick(PyObject* self, PyObject* args) {
  double now;
  return with_link(
      self, args, "d", [&](Link& link) { return link.tick(now), none(); }, &now);
}

PyObject* link_close(PyObject* self, PyObject* args) {
  PyObject* error = Py_None;
  int leaving = 0;
  return with_session(
      self, args, "|Op",
      [&](Session& session) {
        Goodbye goodbye;
        goodbye.leaving = leaving != 0;
        if (error != Py_None) goodbye.error = bytes(error), goodbye.has_error = true;
        return session.close(goodbye), none();
      },
      &error, &leaving);
}

PyObject* link_end(PyObject* self, PyObject* args) {
  return with_session(self, args, "", [&](Session& session) { return session.end(), none(); });
}

PyObject* link_open_calls(PyObject* self, PyObject* args) {
  return with_link(self, args, "", [&](Link& link) {
    std::vector<Cookie> cookies = use(link).session().open_calls();
    Ref list(checked(PyList_New(static_cast<Py_ssize_t>(cookies.size()))));
    for (size_t i = 0; i < cookies.size(); i++)
      check(PyList_SetItem(list.get(), static_cast<Py_ssize_t>(i), to_object(cookies[i])));
    return list.release();
  });
}

// -- its socket

PyObject* link_connect(PyObject* self, PyObject* args) {
  int descriptor, is_accepted;
  PyObject* owner;
  unsigned long long max_shared_bytes = 0;
  return with_link(
      self, args, "ipO|O&",
      [&](Link& link) {
        auto socket = std::make_shared<Socket>(descriptor, is_accepted != 0);
        Cookie kept = cookie(owner);
        without_gil([&] { return link.connect(socket, std::move(kept), max_shared_bytes), 0; });
        return PyLong_FromUnsignedLongLong(socket->number);
      },
      &descriptor, &is_accepted, &owner, to_number, &max_shared_bytes);
}

PyObject* link_disconnect(PyObject* self, PyObject* args) {
  return with_link(self, args, "", [&](Link& link) { return link.disconnect(), none(); });
}

// Small output takes no longer to write than the interpreter's lock takes to be given up.
PyObject* link_flush(PyObject* self, PyObject* args) {
  int is_large = 1;
  return with_link(
      self, args, "|p",
      [&](Link& link) {
        return PyBool_FromLong(is_large ? without_gil([&] { return link.flush(); }) : link.flush());
      },
      &is_large);
}

PyObject* link_flush_soon(PyObject* self, PyObject* args) {
  int is_large = 1;
  return with_link(
      self, args, "|p",
      [&](Link& link) {
        return PyBool_FromLong(is_large ? without_gil([&] { return link.flush(); }) : link.flush_soon());
      },
      &is_large);
}

PyObject* link_wait(PyObject* self, PyObject* args) {
  unsigned long long handle;
  double seconds;
  return with_link(
      self, args, "O&d",
      [&](Link& link) {
        return PyLong_FromLong(without_gil([&] { return static_cast<long>(link.wait(handle, monotonic_now() + seconds)); }));
      },
      to_number, &handle, &seconds);
}

PyObject* link_read_in_background(PyObject* self, PyObject* args) {
  int more;
  return with_link(
      self, args, "i", [&](Link& link) { return link.read_in_background(more), none(); }, &more);
}

PyObject* to_list(std::vector<Event> events) {
  Ref list(checked(PyList_New(static_cast<Py_ssize_t>(events.size()))));
  for (size_t i = 0; i < events.size(); i++)
    check(PyList_SetItem(list.get(), static_cast<Py_ssize_t>(i), to_event(events[i])));
  return list.release();
}

PyObject* link_take_events(PyObject* self, PyObject* args) {
  unsigned long long handle = 0;
  unsigned long long most_requests = SIZE_MAX;
  return with_link(
      self, args, "|O&O&",
      [&](Link& link) {
        locked(link).unlock();  // waits without the interpreter's lock; that it is taken below is then seldom
        return to_list(link.take_events(handle, most_requests));
      },
      to_number, &handle, to_number, &most_requests);
}

PyObject* link_take_checks(PyObject* self, PyObject* args) {
  return with_link(self, args, "", [&](Link& link) {
    locked(link).unlock();
    return to_list(link.take_checks());
  });
}

PyObject* link_statistics(PyObject* self, PyObject* args) {
  return with_link(self, args, "", [&](Link& link) {
    Session::Statistics s = use(link).session().statistics();
    return checked(Py_BuildValue("{s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:K}", "sent_bytes", s.sent_bytes,
                                 "received_bytes", s.received_bytes, "calls", s.calls, "inbound_calls",
                                 s.inbound_calls, "kept_back", s.kept_back, "repeated_requests", s.repeated_requests,
                                 "repeated_responses", s.repeated_responses, "retries", s.retries, "bytes_in_window",
                                 s.bytes_in_window, "quota_bytes", s.quota_bytes, "arrived_bytes", s.arrived_bytes));
  });
}

void link_deallocate(PyObject* self) {
  ReleaseUnused at_the_end;
  deallocate<PyLink>(self);
}

template <bool (Session::*what)() const>
PyObject* link_property(PyObject* self, void*) {
  return guarded(protocol_error, [&] { return PyBool_FromLong((use(link_of(self)).session().*what)()); });
}

PyObject* link_next_tick(PyObject* self, void*) {
  return guarded(protocol_error, [&] { return to_time(use(link_of(self)).session().next_tick()); });
}

PyMethodDef link_methods[] = {
    {"call", link_call, METH_VARARGS, "Sends a request; returns the handle of the call, 0 if the session has ended."},
    {"withdraw", link_withdraw, METH_VARARGS, "The response is no longer wanted."},
    {"limit_window", link_limit_window, METH_VARARGS, "Sets how many bytes of large requests the peer accepts."},
    {"begin", link_begin, METH_VARARGS, "A request is served now."},
    {"respond", link_respond, METH_VARARGS, "Responds to a request; returns whether the requester gets it."},
    {"fail", link_fail, METH_VARARGS, "Responds with an Error."},
    {"confirm", link_confirm, METH_VARARGS, "The attachments of a message were not modified."},
    {"reject", link_reject, METH_VARARGS, "The attachments of a message were modified."},
    {"attach", link_attach, METH_VARARGS, "Continues over a new connection."},
    {"detach", link_detach, METH_VARARGS, "The connection was cut."},
    {"take_output", link_take_output, METH_VARARGS, "The bytes to write next."},
    {"receive", link_receive, METH_VARARGS, "Takes bytes that were read."},
    {"feed", link_feed, METH_VARARGS, "Takes bytes that were read from a stream; returns whether to write."},
    {"tick", link_tick, METH_VARARGS, "Does what is due."},
    {"close", link_close, METH_VARARGS, "Ends the session, and tells the other peer."},
    {"end", link_end, METH_VARARGS, "Ends the session."},
    {"open_calls", link_open_calls, METH_VARARGS, "The cookies of the calls whose response is awaited."},
    {"take_events", link_take_events, METH_VARARGS, "What happened since the last time."},
    {"take_checks", link_take_checks, METH_VARARGS, "The attachments that are to be checked."},
    {"connect", link_connect, METH_VARARGS, "Continues over a connected socket; returns its number."},
    {"disconnect", link_disconnect, METH_VARARGS, "Closes the socket."},
    {"flush", link_flush, METH_VARARGS, "Writes to the socket; returns whether there are events."},
    {"flush_soon", link_flush_soon, METH_VARARGS, "As flush, but responses that are made together leave together."},
    {"wait", link_wait, METH_VARARGS, "Waits for events, and reads the socket meanwhile."},
    {"read_in_background", link_read_in_background, METH_VARARGS, "Has the event loop read the socket."},
    {"statistics", link_statistics, METH_VARARGS, "Counters, by name."},
    {nullptr, nullptr, 0, nullptr},
};
PyGetSetDef link_properties[] = {
    {"attached", link_property<&Session::is_attached>, nullptr, "Whether there is a connection.", nullptr},
    {"has_output", link_property<&Session::has_output>, nullptr, "Whether there is something to write.", nullptr},
    {"heard_goodbye", link_property<&Session::heard_goodbye>, nullptr, "Whether the peer has ended the session.", nullptr},
    {"ended", link_property<&Session::has_ended>, nullptr, "Whether the session has ended.", nullptr},
    {"all_delivered", link_property<&Session::all_delivered>, nullptr, "Whether all responses with attachments are acknowledged.", nullptr},
    {"next_tick", link_next_tick, nullptr, "When `tick` has something to do; None: not as it is.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};
PyType_Slot link_slots[] = {
    {Py_tp_doc, const_cast<char*>("A session that several threads use, and its socket.")},
    {Py_tp_new, reinterpret_cast<void*>(link_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(link_deallocate)},
    {Py_tp_methods, link_methods},
    {Py_tp_getset, link_properties},
    {0, nullptr},
};
PyType_Spec link_spec = {"gradwire.transport.native.Link", sizeof(PyLink), 0, Py_TPFLAGS_DEFAULT,
                            link_slots};

// -- the memory that attachments arrive in

PyObject* trim(PyObject*, PyObject* args) {
  return guarded(protocol_error, [&] {
    double seconds;
    if (!PyArg_ParseTuple(args, "d", &seconds)) throw Raised();
    bool has_more = trim_pool(seconds);
    has_more |= without_gil([&] { return EventLoop::instance().trim(seconds); });
    return PyBool_FromLong(has_more);
  });
}

// -- the event loop

PyObject* next_work(PyObject*, PyObject*) {
  return guarded(protocol_error, [&]() -> PyObject* {
    ReleaseUnused at_the_end;
    while (true) {
      EventLoop::Work work = without_gil([] { return EventLoop::instance().next(); });
      Cookie owner = work.link ? work.link->owner() : nullptr;
      if (work.link && !owner) continue;  // it was disconnected meanwhile
      Ref object(to_object(owner));
      return checked(Py_BuildValue("OO", object.get(), work.needs_thread ? Py_True : Py_False));
    }
  });
}

PyObject* is_used(PyObject*, PyObject*) {
  return guarded(protocol_error, [] { return PyBool_FromLong(EventLoop::instance().is_used()); });
}

PyObject* needs_thread(PyObject*, PyObject*) {
  return guarded(protocol_error, [] { return PyBool_FromLong(EventLoop::instance().needs_thread()); });
}

PyObject* about_to_block(PyObject*, PyObject*) {
  return guarded(protocol_error, [] { return EventLoop::instance().about_to_block(), none(); });
}

PyObject* after_fork(PyObject*, PyObject*) {
  EventLoop::after_fork();
  forget_pool();
  the_unused = new Unused();
  return none();
}

PyMethodDef functions[] = {
    {"next_work", next_work, METH_NOARGS, "Waits for a session with events that no caller reads."},
    {"is_used", is_used, METH_NOARGS, "Whether any session has a connection that next_work may lead to."},
    {"needs_thread", needs_thread, METH_NOARGS, "Whether one more thread should call next_work."},
    {"about_to_block", about_to_block, METH_NOARGS, "The calling thread is about to wait."},
    {"after_fork", after_fork, METH_NOARGS, "Forgets the event loop of the parent process."},
    {"trim_pool", trim, METH_VARARGS, "Gives memory back that was not used again for some seconds."},
    {nullptr, nullptr, 0, nullptr},
};

PyTypeObject* add_type(PyObject* module, const char* name, PyType_Spec& spec) {
  PyObject* type = checked(PyType_FromSpec(&spec));
  check(PyModule_AddObjectRef(module, name, type));
  return reinterpret_cast<PyTypeObject*>(type);
}

}  // namespace

void add_types(PyObject* module) {
  block_type = add_type(module, "Block", block_spec);
  budget_type = add_type(module, "Budget", budget_spec);
  add_type(module, "Link", link_spec);
  event_type = PyStructSequence_NewType(&event_description);
  check(PyModule_AddObjectRef(module, "Event", checked(reinterpret_cast<PyObject*>(event_type))));
  protocol_error = checked(PyErr_NewException("gradwire.transport.native.ProtocolError", nullptr, nullptr));
  check(PyModule_AddObjectRef(module, "ProtocolError", protocol_error));
  check(PyModule_AddFunctions(module, functions));
  check(PyModule_AddIntConstant(module, "MOST_ATTACHMENTS", MOST_ATTACHMENTS));
  for (const auto& [name, kind] : KINDS) check(PyModule_AddIntConstant(module, name, static_cast<long>(kind)));
  constexpr std::pair<const char*, Link::Waited> WAITED[] = {{"EVENTS", Link::Waited::events},
                                                             {"SETTLED", Link::Waited::settled},
                                                             {"UNREAD", Link::Waited::unread},
                                                             {"INTERRUPTED", Link::Waited::interrupted}};
  for (const auto& [name, waited] : WAITED) check(PyModule_AddIntConstant(module, name, static_cast<long>(waited)));
}

}  // namespace gradwire::python
