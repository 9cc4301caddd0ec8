// Reads the sockets that no caller reads.
//
// Its threads are those that call `next`. One of them, the leader, waits for all sockets. When there is something to
// handle, `next` returns it to be handled on that very thread: handing a request over to another takes longer than
// most requests. A watchdog makes another thread the leader if that takes long and there is more to do.
//
// The lock is a leaf: no other lock is taken while it is held.

#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <vector>

#include "link.hpp"

namespace gradwire {

class EventLoop {
 public:
  // That of this process. It is never destroyed: its threads may go on while the process ends.
  static EventLoop& instance();
  // To be called in a forked process, which has none of the threads.
  static void after_fork();

  // From now on the loop knows a socket. It watches an accepted one at once.
  void add(const std::shared_ptr<Link>& link, const std::shared_ptr<Socket>& socket);
  void remove(Socket& socket);
  // There is one more link, or one less, that others read (Link::feed): the loop has threads for its events.
  void add_fed(int more);
  // Whether there are links whose events may be for the loop.
  bool is_used();
  // Frees shared memory of all links that was not used for so long. Returns whether there is other unused memory.
  bool trim(Seconds seconds);
  // Whether it is used, and no thread waits: all handle something, or there is none.
  bool needs_thread();
  // The socket is to be read or written, and no caller does: it is watched at once if `is_needed`, else soon, unless
  // another caller reads it before.
  void left(Socket& socket, bool is_needed);
  // A caller reads the socket now.
  void unwatch(Socket& socket);

  struct Work {
    std::shared_ptr<Link> link;  // has events; null: the thread may not be needed any more
    bool needs_thread = false;   // no other thread is in `next`
  };
  // Waits until a link has events.
  Work next();
  // The link has events, or more of them than the thread handles that got it from `next`.
  void put_back(std::shared_ptr<Link> link);
  // The calling thread, which got a link from `next`, is about to wait for something.
  void about_to_block();
  // Whether the calling thread got a link from `next`, and no other thread leads meanwhile.
  bool is_leader();
  // The link has something to write that may wait for a moment.
  void write_later(std::weak_ptr<Link> link);
  // The same, but a thread is woken for it. `loop` may be that of a process from which this one was forked: then
  // nothing happens.
  static void write_urgently(EventLoop* loop, std::weak_ptr<Link> link);

 private:
  EventLoop();
  void lead(std::unique_lock<std::mutex>& lock);
  void serve(uint64_t number, uint32_t ready);
  void write_waiting(std::unique_lock<std::mutex>& lock);
  void watch(Socket& socket);
  void wake_leader();
  void hand_over();
  void let_threads_go();
  bool has_more_to_do();
  bool has_links() const { return !sockets_.empty() || fed_ > 0; }
  void keep_watchdog_awake();
  void run_watchdog();

  struct Known {
    std::weak_ptr<Link> link;
    std::shared_ptr<Socket> socket;
  };

  std::mutex mutex_;
  int epoll_, wake_;
  std::unordered_map<uint64_t, Known> sockets_;  // by number
  int fed_ = 0;                                  // how many links others read
  std::deque<std::shared_ptr<Link>> ready_;      // links with events
  std::vector<std::weak_ptr<Link>> unwritten_;
  Seconds polled_at_ = 0;
  Spinning spinning_;

  size_t idle_ = 0;  // threads in `next` that do not lead
  std::condition_variable leader_is_wanted_;
  std::thread::id leader_;      // none: the default
  bool is_polling_ = false;     // the leader waits for sockets
  Seconds busy_since_ = NEVER;  // since when the leader has been handling events

  std::condition_variable watchdog_is_wanted_;
  std::atomic<bool> watchdog_sleeps_{false};
  std::atomic<uint64_t> activity_{0};
};

}  // namespace gradwire
