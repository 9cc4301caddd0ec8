// A session that several threads use, and the socket that carries it, if it has one. Or others read and write a stream
// (`attach`): they pass on what they have read (`feed`), and what no caller waits for is left to the event loop.
//
// Nothing in here knows of Python. Whoever holds Python's lock may call everything but `wait`.
//
// Reading: a thread that waits for a response reads the socket itself (`wait`). If nobody waits, or if the other peer
// has connected to this one, the event loop does. One thread reads at a time.
//
// Writing: whoever has made something to write writes it (`flush`). If the socket is full, the next thread that finds
// room goes on: a thread in `wait`, or the event loop.

#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <vector>

#include "fair_mutex.hpp"
#include "process.hpp"
#include "session.hpp"
#include "spinning.hpp"

namespace gradwire {

// A connected socket. It is closed with its last owner, so that no thread can use another socket of that number.
class Socket {
 public:
  // `is_accepted`: the other peer has connected, and sends requests that nobody here waits for.
  Socket(int descriptor, bool is_accepted);
  ~Socket();
  Socket(const Socket&) = delete;
  Socket& operator=(const Socket&) = delete;

  const int descriptor;
  const bool is_accepted;
  const uint64_t number;  // counted in this process

  // Ends both directions: whoever waits for the socket notices.
  void shut_down();

 private:
  friend class Link;
  friend class EventLoop;

  // Waits until there is something to read, or room to write if it is full, or `wake_reader`. False after a signal.
  bool wait(Seconds seconds);
  bool poll(int milliseconds, bool& was_interrupted);
  void wake_reader();

  const uint64_t forks_ = forks;
  int wake_;  // an eventfd
  std::atomic<bool> is_full_{false};  // there is no room to write
  std::atomic<bool> is_over_{false};  // nothing more is read

  // The right to read.
  std::mutex reading_;
  Spinning spinning_;
  bool is_read_in_place_ = false;  // the next bytes belong into a large attachment
  std::atomic<bool> is_read_by_caller_{false};  // by a thread in Link::wait, or it is about to
  std::atomic<Seconds> left_at_{0};             // when the last of them stopped

  // Descriptors come with the bytes; null: they cannot.
  std::shared_ptr<SharedMemory> shared_;

  // The right to write, and what remains of what is being written.
  std::mutex writing_;
  Output output_;
  size_t piece_ = 0, offset_ = 0;
  std::atomic<bool> has_rest_{false};

  // Whether the event loop watches it. Changed under the event loop's lock.
  std::atomic<bool> is_watched_{false};
  uint32_t watched_events_ = 0;
};

class Link : public std::enable_shared_from_this<Link> {
 public:
  Link(Settings settings, std::shared_ptr<Budget> budget) : session_(std::move(settings), std::move(budget)) {}
  ~Link();

  // The session, under its lock.
  class Use {
   public:
    Use(Link& link, std::unique_lock<FairMutex> lock) : link_(link), lock_(std::move(lock)) {}
    ~Use() { link_.collect_events(); }
    Session& session() { return link_.session_; }

   private:
    Link& link_;
    std::unique_lock<FairMutex> lock_;
  };
  Use use() { return {*this, std::unique_lock(mutex_)}; }
  FairMutex& mutex() { return mutex_; }
  // Frees shared memory that was not used for so long. Returns whether there is other unused memory.
  bool trim(Seconds seconds);
  // Does what is due. From then on `timer` is reported again.
  void tick(Seconds now);

  // -- a stream that others read and write, as gRPC does

  // Continues over such a stream. `owner` is what EventLoop::next leads to.
  void attach(Seconds now, Cookie owner);
  // Takes bytes that were read, and leaves to the event loop what no caller waits for. Returns whether there is
  // something to write.
  bool feed(Bytes bytes);

  // -- the socket

  // Continues over a socket. `owner` is what EventLoop::next leads to. A unix socket may have so many bytes of shared
  // memory beside it.
  void connect(std::shared_ptr<Socket> socket, Cookie owner, uint64_t max_shared_bytes = 0);
  // The connection was cut, or is to be.
  void disconnect();
  Cookie owner();

  // Writes what there is to write, unless another thread does, until the socket is full. Returns whether there are
  // events before any request.
  bool flush();
  // As `flush`, but if the calling thread is about to make more to write, all of it is written together.
  bool flush_soon();

  enum class Waited {
    events,       // there is something to handle
    settled,      // there is no such call any more
    unread,       // it is not for this thread to read, or there is no connection
    interrupted,  // by the time, or a signal
  };
  // Waits until there is something to handle, at best the outcome of the call. Reads the socket meanwhile; if there is
  // none, others read what carries the session.
  Waited wait(CallHandle call, Seconds until);
  // How many threads wait otherwise, so that the event loop has to read: `more` is 1 or -1.
  void read_in_background(int more);
  // A thread that waits for the call is to look again.
  void wake(CallHandle call);

  // What has happened, in order, except outcomes that other threads wait for than the one that waits for `call`. It ends
  // with the last of so many requests, or before the first if there are to be none: what follows must not wait for a
  // request that the calling thread serves. What is left is the event loop's.
  std::vector<Event> take_events(CallHandle call, size_t most_requests);
  // Only the checks (Event::Kind::check), for a thread that goes on writing.
  std::vector<Event> take_checks();
  bool has_events();

 private:
  friend class EventLoop;

  // A thread in `wait`.
  struct Waiter {
    std::condition_variable_any woken;
    std::thread::id thread = std::this_thread::get_id();
    bool is_reading = false;
  };

  void collect_events();
  void wake(Waiter& waiter);
  void end(const std::shared_ptr<Socket>& socket, Event::Kind kind, std::string_view reason, bool flag = false);
  void read(const std::shared_ptr<Socket>& socket, CallHandle call);
  ssize_t read_once(Socket& socket);
  bool read_as_caller(const std::shared_ptr<Socket>& socket, CallHandle call, Seconds until);
  void write(const std::shared_ptr<Socket>& socket);
  void write_output(Socket& socket);
  bool take_output(Socket& socket, bool goes_on);
  static void go_on_later(Socket& socket);
  bool has_output(Socket& socket) const;
  template <typename Condition>
  std::vector<Event> take(CallHandle call, Condition is_taken);
  bool is_for(const Event& event, CallHandle call) const;
  bool has_something_for(CallHandle call) const;
  bool has_more_than_requests() const;

  const uint64_t forks_ = forks;
  FairMutex mutex_;
  Session session_;
  std::shared_ptr<Socket> socket_;
  bool is_fed_ = false;   // there is a stream that others read
  bool is_deaf_ = false;  // what comes over it broke the protocol
  Cookie owner_;
  Seconds reported_tick_ = NEVER;
  int in_background_ = 0;
  std::vector<Event> events_;
  std::unordered_map<CallHandle, Waiter*> waiters_;
};

}  // namespace gradwire
