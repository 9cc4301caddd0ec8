#include "event_loop.hpp"

#include <pthread.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <system_error>
#include <utility>

namespace gradwire {
namespace {

// Work that takes no longer is not worth handing the rest over.
constexpr Seconds INLINE = 0.001;
// The pauses of the watchdog, which grow while the leader handles the same events.
constexpr Seconds SHORTEST_PAUSE = 0.001, LONGEST_PAUSE = 0.008;
// After so long without anything to do the watchdog sleeps.
constexpr int CALM_CHECKS = 50;
// After a caller has read a socket, it is likely to read again soon.
constexpr Seconds GRACE = 0.005;
// A thread that was not needed for so long may end.
constexpr Seconds SPARE = 10;
// So often sockets are looked at while links have events.
constexpr Seconds POLL_PERIOD = 0.001;
constexpr int MOST_EVENTS = 64;

std::atomic<EventLoop*> the_loop{nullptr};
std::mutex making;

std::chrono::duration<double> duration(Seconds seconds) { return std::chrono::duration<double>(seconds); }

}  // namespace

EventLoop& EventLoop::instance() {
  if (EventLoop* loop = the_loop.load(std::memory_order_acquire)) return *loop;
  std::lock_guard lock(making);
  if (!the_loop) the_loop = new EventLoop();
  return *the_loop;
}

void EventLoop::after_fork() {
  forks++;
  new (&making) std::mutex();
  the_loop = nullptr;
}

EventLoop::EventLoop() : epoll_(epoll_create1(EPOLL_CLOEXEC)), wake_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
  if (epoll_ < 0 || wake_ < 0) {
    std::system_error error(errno, std::generic_category(), "no descriptors for the event loop");
    if (epoll_ >= 0) ::close(epoll_);
    if (wake_ >= 0) ::close(wake_);
    throw error;
  }
  epoll_event event{.events = EPOLLIN, .data = {.u64 = 0}};
  epoll_ctl(epoll_, EPOLL_CTL_ADD, wake_, &event);
  // Signals are for other threads: they would not interrupt what waits there.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    std::thread([this] { run_watchdog(); }).detach();
  } catch (const std::system_error&) {  // there are too many threads
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    ::close(epoll_);
    ::close(wake_);
    throw;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

// -- the sockets

void EventLoop::add(const std::shared_ptr<Link>& link, const std::shared_ptr<Socket>& socket) {
  std::lock_guard lock(mutex_);
  sockets_[socket->number] = {link, socket};
  socket->left_at_ = monotonic_now();
  if (socket->is_accepted) watch(*socket);
  keep_watchdog_awake();
}

void EventLoop::remove(Socket& socket) {
  std::lock_guard lock(mutex_);
  if (socket.is_watched_.exchange(false)) epoll_ctl(epoll_, EPOLL_CTL_DEL, socket.descriptor, nullptr);
  sockets_.erase(socket.number);
  let_threads_go();
}

void EventLoop::add_fed(int more) {
  std::lock_guard lock(mutex_);
  fed_ += more;
  let_threads_go();
}

// If there is nothing left for them to wait for. The lock is held.
void EventLoop::let_threads_go() {
  if (has_links()) return;
  wake_leader();
  leader_is_wanted_.notify_all();
}

bool EventLoop::is_used() {
  std::lock_guard lock(mutex_);
  return has_links();
}

bool EventLoop::trim(Seconds seconds) {
  std::vector<std::shared_ptr<Link>> links;
  {
    std::lock_guard lock(mutex_);
    for (auto& [_, known] : sockets_)
      if (auto link = known.link.lock()) links.push_back(std::move(link));
  }
  bool has_more = false;
  for (auto& link : links) has_more |= link->trim(seconds);
  return has_more;
}

bool EventLoop::needs_thread() {
  std::lock_guard lock(mutex_);
  return has_links() && !is_polling_ && !idle_;
}

void EventLoop::unwatch(Socket& socket) {
  std::lock_guard lock(mutex_);
  if (socket.is_watched_.exchange(false)) epoll_ctl(epoll_, EPOLL_CTL_DEL, socket.descriptor, nullptr);
}

void EventLoop::left(Socket& socket, bool is_needed) {
  if (!is_needed) {
    activity_++;
    if (!watchdog_sleeps_) return;
  }
  std::lock_guard lock(mutex_);
  if (is_needed) watch(socket);
  keep_watchdog_awake();
}

// The lock is held.
void EventLoop::watch(Socket& socket) {
  if (!sockets_.contains(socket.number) || socket.is_over_) return;
  uint32_t wanted = socket.is_full_ ? EPOLLIN | EPOLLOUT : EPOLLIN;
  bool was_watched = socket.is_watched_.exchange(true);
  if (!socket.is_accepted && socket.is_read_by_caller_) {
    // It has come meanwhile, and has seen that the socket is watched, or has not.
    if (socket.is_watched_.exchange(false) && was_watched) epoll_ctl(epoll_, EPOLL_CTL_DEL, socket.descriptor, nullptr);
    socket.wake_reader();
    return;
  }
  if (was_watched && wanted == socket.watched_events_) return;
  socket.watched_events_ = wanted;
  epoll_event event{.events = wanted, .data = {.u64 = socket.number}};
  int operation = was_watched ? EPOLL_CTL_MOD : EPOLL_CTL_ADD;
  if (epoll_ctl(epoll_, operation, socket.descriptor, &event) < 0) socket.is_watched_ = false;  // tried again later
}

// The lock is not held. The right to read may be another thread's.
void EventLoop::serve(uint64_t number, uint32_t ready) {
  std::shared_ptr<Link> link;
  std::shared_ptr<Socket> socket;
  {
    std::lock_guard lock(mutex_);
    auto it = sockets_.find(number);
    if (it == sockets_.end()) return;
    socket = it->second.socket;
    link = it->second.link.lock();
  }
  if (!link) return remove(*socket);
  bool was_full = socket->is_full_;
  if (ready & (EPOLLOUT | EPOLLERR | EPOLLHUP)) socket->is_full_ = false, link->flush();
  if (ready & (EPOLLIN | EPOLLERR | EPOLLHUP)) {
    std::unique_lock reading(socket->reading_, std::try_to_lock);
    if (reading) link->read(socket, 0);
  }
  bool has_events = link->has_events();
  std::lock_guard lock(mutex_);
  if (socket->is_over_ && socket->is_watched_.exchange(false)) epoll_ctl(epoll_, EPOLL_CTL_DEL, socket->descriptor, nullptr);
  else if (socket->is_watched_ && (was_full || socket->is_full_)) watch(*socket);
  if (has_events) ready_.push_back(std::move(link));
}

// -- the threads

EventLoop::Work EventLoop::next() {
  std::unique_lock lock(mutex_);
  auto me = std::this_thread::get_id();
  if (leader_ == me) busy_since_ = NEVER;
  Seconds waits_until = monotonic_now() + SPARE;
  while (true) {
    if (!has_links() && ready_.empty()) {
      if (leader_ == me) leader_ = {};
      leader_is_wanted_.notify_all();  // the others are not needed any more, either
      return {};
    }
    if (leader_ != me && leader_ != std::thread::id()) {
      idle_++;
      leader_is_wanted_.wait_for(lock, duration(SPARE));
      idle_--;
      if (leader_ != std::thread::id() && idle_ > 0 && monotonic_now() >= waits_until) return {};
      continue;
    }
    leader_ = me;
    if (ready_.empty() || monotonic_now() - polled_at_ > POLL_PERIOD) lead(lock);
    if (ready_.empty()) continue;
    Work work{.link = std::move(ready_.front()), .needs_thread = idle_ == 0};
    ready_.pop_front();
    busy_since_ = monotonic_now();
    keep_watchdog_awake();
    return work;
  }
}

// Waits for sockets, and reads and writes them.
void EventLoop::lead(std::unique_lock<std::mutex>& lock) {
  write_waiting(lock);
  // Without the lock, others may have brought what nobody would wake this thread for: it was not polling.
  bool may_wait = ready_.empty() && unwritten_.empty() && has_links();
  epoll_event events[MOST_EVENTS];
  is_polling_ = may_wait;
  lock.unlock();
  int count = 0;
  auto look = [&] { return (count = epoll_wait(epoll_, events, MOST_EVENTS, 0)) > 0; };
  if (!may_wait) look();
  else if (!spinning_(look)) count = epoll_wait(epoll_, events, MOST_EVENTS, -1);
  for (int i = 0; i < count; i++) {
    if (events[i].data.u64) {
      serve(events[i].data.u64, events[i].events);
    } else {
      eventfd_t ignored;
      eventfd_read(wake_, &ignored);
    }
  }
  lock.lock();
  is_polling_ = false;
  polled_at_ = monotonic_now();
}

void EventLoop::put_back(std::shared_ptr<Link> link) {
  std::lock_guard lock(mutex_);
  ready_.push_back(std::move(link));
  if (leader_ == std::thread::id()) leader_is_wanted_.notify_one();
  else if (leader_ != std::this_thread::get_id()) wake_leader();
}

// The lock is held.
void EventLoop::wake_leader() {
  if (is_polling_) eventfd_write(wake_, 1);
}

bool EventLoop::is_leader() {
  std::lock_guard lock(mutex_);
  return leader_ == std::this_thread::get_id();
}

void EventLoop::about_to_block() {
  std::lock_guard lock(mutex_);
  if (leader_ == std::this_thread::get_id() && (sockets_.size() + fed_ > 1 || !ready_.empty())) hand_over();
}

// The leader only finishes what it handles. The lock is held.
void EventLoop::hand_over() {
  leader_ = {};
  busy_since_ = NEVER;
  leader_is_wanted_.notify_one();
}

bool EventLoop::has_more_to_do() {
  epoll_event event;
  return !ready_.empty() || epoll_wait(epoll_, &event, 1, 0) > 0;
}

void EventLoop::write_later(std::weak_ptr<Link> link) {
  std::lock_guard lock(mutex_);
  unwritten_.push_back(std::move(link));
  keep_watchdog_awake();
}

void EventLoop::write_urgently(EventLoop* loop, std::weak_ptr<Link> link) {
  if (the_loop.load() != loop) return;
  std::lock_guard lock(loop->mutex_);
  loop->unwritten_.push_back(std::move(link));
  loop->keep_watchdog_awake();
  loop->wake_leader();  // if it is busy, the watchdog writes soon
}

void EventLoop::write_waiting(std::unique_lock<std::mutex>& lock) {
  if (unwritten_.empty()) return;
  auto links = std::exchange(unwritten_, {});
  lock.unlock();
  std::vector<std::shared_ptr<Link>> with_events;
  for (auto& weak : links)
    if (auto link = weak.lock(); link && link->flush()) with_events.push_back(std::move(link));
  links.clear();
  lock.lock();
  for (auto& link : with_events) ready_.push_back(std::move(link));
}

// -- the watchdog

// The lock is held.
void EventLoop::keep_watchdog_awake() {
  activity_++;
  if (!watchdog_sleeps_) return;
  watchdog_sleeps_ = false;
  watchdog_is_wanted_.notify_one();
}

void EventLoop::run_watchdog() {
  pthread_setname_np(pthread_self(), "gradwire-links");
  std::unique_lock lock(mutex_);
  uint64_t seen = 0;
  int calm = 0;
  Seconds pause = SHORTEST_PAUSE, busy_since = NEVER;
  while (true) {
    if (calm > CALM_CHECKS) {
      watchdog_sleeps_ = true;
      // `left` may have looked just before that, and does not wake it.
      watchdog_is_wanted_.wait(lock, [&] { return !watchdog_sleeps_ || activity_ != seen; });
      watchdog_sleeps_ = false;
      calm = 0;
    }
    watchdog_is_wanted_.wait_for(lock, duration(pause));
    bool is_busy = busy_since_ != NEVER;
    pause = is_busy && busy_since_ == busy_since ? std::min(1.5 * pause, LONGEST_PAUSE) : SHORTEST_PAUSE;
    busy_since = busy_since_;
    uint64_t activity = activity_;
    calm = activity == seen && !is_busy ? calm + 1 : 0;
    seen = activity;

    Seconds now = monotonic_now();
    if (is_busy && now - busy_since_ > INLINE && idle_ > 0 && has_more_to_do()) hand_over();
    for (auto& [_, known] : sockets_) {
      Socket& socket = *known.socket;
      if (!socket.is_watched_ && !socket.is_read_by_caller_ && now - socket.left_at_ > GRACE) watch(socket);
    }
    if (is_busy || leader_ == std::thread::id()) {
      size_t before = ready_.size();
      write_waiting(lock);
      if (ready_.size() > before && leader_ == std::thread::id()) leader_is_wanted_.notify_one();
    } else if (!unwritten_.empty()) {
      wake_leader();
    }
  }
}

}  // namespace gradwire
