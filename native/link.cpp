#include "link.hpp"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <system_error>
#include <utility>

#include "event_loop.hpp"

namespace gradwire {
namespace {

constexpr size_t READ_BYTES = 64 * 1024;
// At once into an attachment. The session is locked meanwhile.
constexpr size_t READ_IN_PLACE_BYTES = 256 * 1024;
// So often a socket is read before others get their turn.
constexpr int MOST_READS = 8;
// How much one thread writes before others get their turn: a caller has more to do than to write large attachments.
constexpr uint64_t MOST_WRITTEN = 4 << 20;
// Of pieces in one system call; IOV_MAX is 1024.
constexpr size_t MOST_PIECES = 64;

// Of descriptors in one system call. The kernel closes those that do not fit.
constexpr size_t MOST_DESCRIPTORS = 64;

std::string error_text(int number) { return std::generic_category().message(number); }

// Descriptors that have been received. Those that nobody takes are closed.
class Descriptors {
 public:
  Descriptors() = default;
  Descriptors(const Descriptors&) = delete;
  Descriptors& operator=(const Descriptors&) = delete;
  ~Descriptors() {
    for (size_t i = 0; i < count_; i++) ::close(found_[i]);
  }

  ssize_t receive(int socket, std::span<uint8_t> room) {
    alignas(cmsghdr) char control[CMSG_SPACE(MOST_DESCRIPTORS * sizeof(int))];
    iovec place{room.data(), room.size()};
    msghdr message{};
    message.msg_iov = &place;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    ssize_t size = ::recvmsg(socket, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (size < 0) return size;
    for (cmsghdr* header = CMSG_FIRSTHDR(&message); header; header = CMSG_NXTHDR(&message, header)) {
      if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
      size_t more = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
      std::memcpy(found_ + count_, CMSG_DATA(header), more * sizeof(int));
      count_ += more;
    }
    is_truncated_ = message.msg_flags & MSG_CTRUNC;
    return size;
  }

  // Whether this process could not have as many as were sent.
  bool are_lost() const { return is_truncated_ && count_ < MOST_DESCRIPTORS; }

  void move_to(SharedMemory& shared) {
    if (is_truncated_) throw ProtocolError("too many descriptors at once");
    for (; count_; count_--) {
      shared.add_descriptor(found_[0]);
      std::memmove(found_, found_ + 1, (count_ - 1) * sizeof(int));
    }
  }

 private:
  int found_[MOST_DESCRIPTORS];
  size_t count_ = 0;
  bool is_truncated_ = false;
};

bool is_outcome(Event::Kind kind) {
  switch (kind) {
    case Event::Kind::response:
    case Event::Kind::error:
    case Event::Kind::expired:
    case Event::Kind::no_memory:
    case Event::Kind::unreachable: return true;
    default: return false;
  }
}

}  // namespace

// -- Socket

static std::atomic<uint64_t> last_socket{0};

Socket::Socket(int descriptor, bool is_accepted)
    : descriptor(descriptor), is_accepted(is_accepted), number(++last_socket), wake_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
  if (wake_ < 0) {
    ::close(descriptor);
    throw std::system_error(errno, std::generic_category(), "no descriptor to wake the thread that reads");
  }
}

Socket::~Socket() {
  ::close(descriptor);
  ::close(wake_);
}

void Socket::shut_down() {
  if (forks_ == forks) ::shutdown(descriptor, SHUT_RDWR);
}

void Socket::wake_reader() { eventfd_write(wake_, 1); }

bool Socket::wait(Seconds seconds) {
  bool was_interrupted = false;
  if (!spinning_([&] { return poll(0, was_interrupted); }))
    poll(static_cast<int>(std::clamp(seconds, 0.0, 1e5) * 1000) + 1, was_interrupted);
  return !was_interrupted;
}

bool Socket::poll(int milliseconds, bool& was_interrupted) {
  pollfd polled[] = {{descriptor, static_cast<short>(is_full_ ? POLLIN | POLLOUT : POLLIN), 0}, {wake_, POLLIN, 0}};
  int ready = ::poll(polled, 2, milliseconds);
  was_interrupted = ready < 0 && errno == EINTR;
  if (ready <= 0) return was_interrupted;
  if (polled[1].revents) {
    eventfd_t count;
    eventfd_read(wake_, &count);
  }
  if (polled[0].revents & (POLLOUT | POLLERR | POLLHUP)) is_full_ = false;
  return true;
}

// -- Link: events

Link::~Link() {
  if (forks_ == forks) disconnect();
}

// The lock is held.
void Link::collect_events() {
  if (Seconds next = session_.next_tick(); socket_ && next < reported_tick_) {
    reported_tick_ = next;
    events_.push_back({});
    events_.back().kind = Event::Kind::timer;
  }
  if (session_.has_ended())
    for (auto& [_, waiter] : waiters_) wake(*waiter);
  if (!session_.has_events()) return;
  for (Event& event : session_.take_events()) {
    if (is_outcome(event.kind))
      if (auto it = waiters_.find(event.id); it != waiters_.end()) wake(*it->second);
    events_.push_back(std::move(event));
  }
}

bool Link::trim(Seconds seconds) {
  std::vector<std::shared_ptr<Segment>> trimmed;  // ends after the lock
  std::lock_guard lock(mutex_);
  if (!socket_ || !socket_->shared_) return false;
  trimmed = socket_->shared_->trim(seconds);
  return socket_->shared_->has_free();
}

void Link::tick(Seconds now) {
  std::lock_guard lock(mutex_);
  session_.tick(now);
  reported_tick_ = NEVER;
  collect_events();
}

void Link::wake(Waiter& waiter) {
  if (waiter.thread == std::this_thread::get_id()) return;
  if (waiter.is_reading && socket_) socket_->wake_reader();
  else waiter.woken.notify_one();
}

void Link::wake(CallHandle call) {
  std::lock_guard lock(mutex_);
  if (auto it = waiters_.find(call); it != waiters_.end()) wake(*it->second);
}

// Not if another thread waits for it.
bool Link::is_for(const Event& event, CallHandle call) const {
  return !is_outcome(event.kind) || event.id == call || !waiters_.contains(event.id);
}

bool Link::has_something_for(CallHandle call) const {
  return std::ranges::any_of(events_, [&](const Event& event) { return is_for(event, call); });
}

bool Link::has_events() {
  std::lock_guard lock(mutex_);
  return has_something_for(0);
}

// Whether there is something besides requests, and what came after them.
bool Link::has_more_than_requests() const {
  for (const Event& event : events_) {
    if (event.kind == Event::Kind::request) return false;
    if (is_for(event, 0)) return true;
  }
  return false;
}

std::vector<Event> Link::take_events(CallHandle call, size_t most_requests) {
  bool is_enough = false;
  return take(call, [&](const Event& event) {
    bool is_request = event.kind == Event::Kind::request;
    is_enough |= is_request && !most_requests;
    if (is_enough || !is_for(event, call)) return false;
    is_enough = is_request && !--most_requests;
    return true;
  });
}

std::vector<Event> Link::take_checks() {
  return take(0, [](const Event& event) { return event.kind == Event::Kind::check; });
}

template <typename Condition>
std::vector<Event> Link::take(CallHandle call, Condition is_taken) {
  std::vector<Event> taken;
  Cookie owner;  // released after the lock
  std::unique_lock lock(mutex_);
  collect_events();
  auto kept = events_.begin();
  for (Event& event : events_) {
    if (is_taken(event)) {
      // Its cancellation may be behind it.
      if (event.kind == Event::Kind::request) event.flag = session_.is_cancelled(event.id);
      taken.push_back(std::move(event));
    } else {
      if (&event != &*kept) *kept = std::move(event);
      kept++;
    }
  }
  events_.erase(kept, events_.end());
  if (events_.empty() && !socket_ && !is_fed_) owner = std::move(owner_);
  bool is_for_others = has_something_for(call);
  lock.unlock();
  if (is_for_others) EventLoop::instance().put_back(shared_from_this());
  return taken;
}

// -- Link: a stream that others read and write

void Link::attach(Seconds now, Cookie owner) {
  EventLoop& loop = EventLoop::instance();  // may throw
  disconnect();
  loop.add_fed(1);
  bool has_events;
  {
    std::lock_guard lock(mutex_);
    is_fed_ = true;
    is_deaf_ = false;
    owner_ = std::move(owner);
    session_.attach(now);
    collect_events();
    has_events = has_something_for(0);
  }
  if (has_events) loop.put_back(shared_from_this());
}

bool Link::feed(Bytes bytes) {
  bool has_events, has_output;
  {
    std::lock_guard lock(mutex_);
    if (!is_fed_ || is_deaf_) return false;
    Seconds next = session_.next_tick();
    Event event;
    try {
      session_.receive(monotonic_now(), bytes);
      event.kind = Event::Kind::timer;
    } catch (const std::exception& error) {
      is_deaf_ = true;
      event.kind = Event::Kind::broken;
      event.body = error.what();
    }
    collect_events();
    if (is_deaf_ || session_.next_tick() < next) events_.push_back(std::move(event));
    has_output = session_.has_output();
    has_events = has_something_for(0);
  }
  if (has_events) EventLoop::instance().put_back(shared_from_this());
  return has_output;
}

// -- Link: the socket

void Link::connect(std::shared_ptr<Socket> socket, Cookie owner, uint64_t max_shared_bytes) {
  EventLoop* loop = &EventLoop::instance();  // may throw
  disconnect();
  if (max_shared_bytes && is_shared_memory_supported()) {
    auto write = [weak = weak_from_this(), loop] { EventLoop::write_urgently(loop, weak); };
    socket->shared_ = std::make_shared<SharedMemory>(max_shared_bytes, std::move(write));
  }
  {
    std::lock_guard lock(mutex_);
    socket_ = socket;
    owner_ = std::move(owner);
    session_.attach(monotonic_now(), socket->shared_);
    collect_events();
  }
  loop->add(shared_from_this(), socket);
  write(socket);
  std::lock_guard lock(mutex_);
  if (in_background_ > 0 || has_something_for(0)) loop->left(*socket, true);
}

void Link::disconnect() {
  std::shared_ptr<Socket> socket;
  Cookie owner;  // released after the lock
  bool was_fed, has_events;
  {
    std::lock_guard lock(mutex_);
    session_.detach();
    socket = std::exchange(socket_, nullptr);
    has_events = has_something_for(0);
    if (!has_events) owner = std::move(owner_);  // else `take_events` does so
    was_fed = std::exchange(is_fed_, false);
    for (auto& [_, waiter] : waiters_) socket && waiter->is_reading ? socket->wake_reader() : waiter->woken.notify_one();
  }
  auto self = weak_from_this().lock();  // null in the destructor
  if (has_events && self) EventLoop::instance().put_back(std::move(self));
  if (was_fed) EventLoop::instance().add_fed(-1);
  if (!socket) return;
  socket->is_over_ = true;
  socket->shut_down();
  EventLoop::instance().remove(*socket);
}

Cookie Link::owner() {
  std::lock_guard lock(mutex_);
  return owner_;
}

// The lock is held.
void Link::end(const std::shared_ptr<Socket>& socket, Event::Kind kind, std::string_view reason, bool flag) {
  if (socket_ != socket || socket->is_over_) return;
  socket->is_over_ = true;
  if (kind == Event::Kind::disconnected) {
    socket->shut_down();
    session_.detach();
  }
  Event event;
  event.kind = kind;
  event.id = socket->number;
  event.body = reason;
  event.flag = flag;
  events_.push_back(std::move(event));
  for (auto& [_, waiter] : waiters_) wake(*waiter);
}

// -- Link: reading

// Returns how much was read; 0 if nothing more is to be expected for now.
ssize_t Link::read_once(Socket& socket) {
  static thread_local std::unique_ptr<uint8_t[]> buffer(new uint8_t[READ_BYTES]);
  std::unique_lock lock(mutex_, std::defer_lock);
  ssize_t size;
  size_t room = READ_BYTES;
  std::span<uint8_t> place;
  if (socket.is_read_in_place_) {
    mutex_.let_others_first();
    lock.lock();
    if (socket_.get() != &socket) return 0;
    place = session_.place();
    room = std::min(place.size(), READ_IN_PLACE_BYTES);
  }
  std::span<uint8_t> target = place.empty() ? std::span(buffer.get(), READ_BYTES) : place.first(room);
  room = target.size();
  Descriptors descriptors;
  if (socket.shared_) size = descriptors.receive(socket.descriptor, target);
  else size = ::recv(socket.descriptor, target.data(), target.size(), MSG_DONTWAIT);
  if (size < 0 && (errno == EAGAIN || errno == EINTR)) return 0;
  std::string reason = size ? error_text(errno) : "the other peer closed the socket";
  if (!lock) lock.lock();
  if (socket_.get() != &socket) return 0;
  if (size <= 0) {
    end(socket_, Event::Kind::disconnected, reason);
    return 0;
  }
  if (descriptors.are_lost()) {  // which is not the other peer's fault: it sends them again
    end(socket_, Event::Kind::disconnected, "no descriptor is left for shared memory", true);
    return 0;
  }
  try {
    if (socket.shared_) descriptors.move_to(*socket.shared_);
    if (place.empty()) session_.receive(monotonic_now(), {buffer.get(), static_cast<size_t>(size)});
    else session_.received_in_place(monotonic_now(), size);
  } catch (const std::exception& error) {
    collect_events();
    end(socket_, Event::Kind::broken, error.what());
    return 0;
  }
  collect_events();
  socket.is_read_in_place_ = !session_.place().empty();
  // A socket that was read empty is asked again when there is something.
  return static_cast<size_t>(size) < room ? 0 : size;
}

// The right to read is the caller's.
void Link::read(const std::shared_ptr<Socket>& socket, CallHandle call) {
  for (int reads = 0; reads < MOST_READS && !socket->is_over_ && read_once(*socket); reads++) {
    std::lock_guard lock(mutex_);
    if (has_something_for(call)) break;
  }
  bool has_output;
  {
    std::lock_guard lock(mutex_);
    has_output = socket_ == socket && this->has_output(*socket);
  }
  if (has_output) write(socket);
}

Link::Waited Link::wait(CallHandle call, Seconds until) {
  std::unique_lock lock(mutex_);
  Waiter me;
  if (!waiters_.emplace(call, &me).second) return Waited::unread;  // another thread waits for it
  Waited result;
  while (true) {
    std::shared_ptr<Socket> socket = socket_;
    if (has_something_for(call)) {
      result = Waited::events;
    } else if (!session_.is_open(call)) {
      result = Waited::settled;
    } else if (socket ? socket->is_over_ || socket->is_accepted : !is_fed_) {
      result = Waited::unread;
    } else if (monotonic_now() >= until) {
      result = Waited::interrupted;
    } else if (!socket || socket->is_read_by_caller_) {
      me.woken.wait_for(lock, std::chrono::duration<double>(until - monotonic_now()));
      continue;
    } else {
      socket->is_read_by_caller_ = true;
      me.is_reading = true;
      lock.unlock();
      bool was_interrupted = false;
      try {
        was_interrupted = !read_as_caller(socket, call, until);
      } catch (const std::bad_alloc&) {  // others must still be able to read
        was_interrupted = true;
      }
      lock.lock();
      me.is_reading = false;
      socket->left_at_ = monotonic_now();
      socket->is_read_by_caller_ = false;
      if (!was_interrupted) continue;
      result = Waited::interrupted;
    }
    break;
  }
  waiters_.erase(call);
  std::shared_ptr<Socket> left;
  if (waiters_.empty()) left = socket_;  // also if another thread has read it, and expected this one to go on
  else if (Waiter& next = *waiters_.begin()->second; !next.is_reading) next.woken.notify_one();  // it reads now
  bool is_needed = left && (in_background_ > 0 || left->is_full_);
  bool leaves_events = is_fed_ && result == Waited::interrupted && has_something_for(0);
  lock.unlock();
  if (leaves_events) EventLoop::instance().put_back(shared_from_this());
  if (left) EventLoop::instance().left(*left, is_needed);
  return result;
}

// Returns false after a signal.
bool Link::read_as_caller(const std::shared_ptr<Socket>& socket, CallHandle call, Seconds until) {
  if (socket->is_watched_) EventLoop::instance().unwatch(*socket);
  std::lock_guard reading(socket->reading_);
  while (true) {
    read(socket, call);
    if (!socket->is_full_) flush();
    {
      std::lock_guard lock(mutex_);
      if (has_something_for(call) || !session_.is_open(call) || socket_ != socket || socket->is_over_) return true;
    }
    Seconds left = until - monotonic_now();
    if (left <= 0) return true;
    if (!socket->wait(left)) return false;
  }
}

void Link::read_in_background(int more) {
  std::shared_ptr<Socket> socket;
  {
    std::lock_guard lock(mutex_);
    in_background_ += more;
    if (more > 0) socket = socket_;
  }
  if (socket && !socket->is_read_by_caller_) EventLoop::instance().left(*socket, true);
}

// -- Link: writing

bool Link::flush() {
  std::shared_ptr<Socket> socket;
  {
    std::lock_guard lock(mutex_);
    if (socket_ && (has_output(*socket_) || session_.has_ended())) socket = socket_;
    if (!socket) return has_more_than_requests();
  }
  write(socket);
  std::lock_guard lock(mutex_);
  return has_more_than_requests();
}

bool Link::flush_soon() {
  if (EventLoop::instance().is_leader() && has_events()) {
    EventLoop::instance().write_later(shared_from_this());
    return false;
  }
  return flush();
}

void Link::write(const std::shared_ptr<Socket>& socket) {
  bool has_output;
  do {
    std::unique_lock writing(socket->writing_, std::try_to_lock);
    if (!writing) return;  // its owner looks again after it has let go
    try {
      write_output(*socket);
    } catch (const std::exception& error) {
      // Without memory. What was taken is incomplete, and is sent again over another connection.
      std::lock_guard lock(mutex_);
      end(socket, Event::Kind::disconnected, error.what());
    }
    writing.unlock();
    std::lock_guard lock(mutex_);
    has_output = socket_ == socket && this->has_output(*socket);
  } while (has_output);
}

// The lock is held.
bool Link::has_output(Socket& socket) const {
  return !socket.is_full_ && !socket.is_over_ && (socket.has_rest_ || session_.has_output());
}

// Takes what to write next, and copies what goes into shared memory. Returns whether there was anything. The right to
// write is the caller's, who `goes_on` if it has written something already.
bool Link::take_output(Socket& socket, bool goes_on) {
  // What was written is released after the lock.
  Output written = std::exchange(socket.output_, {});
  socket.piece_ = socket.offset_ = 0;
  socket.has_rest_ = false;
  bool has_more;
  if (goes_on) mutex_.let_others_first();
  {
    std::lock_guard lock(mutex_);
    if (socket_.get() != &socket) return false;
    socket.output_ = session_.take_output();
    collect_events();
    has_more = session_.has_output();
    if (!has_more && socket.output_.pieces.empty() && session_.has_ended()) ::shutdown(socket.descriptor, SHUT_WR);
  }
  for (const Output::Copy& copy : socket.output_.copies) std::memcpy(copy.to, copy.from, copy.size);
  socket.has_rest_ = !socket.output_.pieces.empty();
  // There may be no bytes now although there are later: something was copied, or is being checked.
  return socket.has_rest_ || has_more;
}

// Has whoever waits for the socket write when there is room.
void Link::go_on_later(Socket& socket) {
  socket.is_full_ = true;
  if (socket.is_read_by_caller_) socket.wake_reader();
  else EventLoop::instance().left(socket, true);
}

// Writes until there is nothing to write, or no room. The right to write is the caller's.
void Link::write_output(Socket& socket) {
  uint64_t written = 0;
  while (true) {
    if (written > MOST_WRITTEN) {
      go_on_later(socket);  // there is room
      return;
    }
    if (socket.piece_ == socket.output_.pieces.size()) {
      if (!take_output(socket, written > 0)) return;
      written += socket.output_.size;
      continue;
    }
    const auto& all = socket.output_.pieces;
    // A descriptor goes with the first byte of its piece, which is the first of a system call.
    Segment* announced = socket.offset_ ? nullptr : all[socket.piece_].announced;
    iovec pieces[MOST_PIECES];
    size_t count = 0;
    for (size_t i = socket.piece_; i < all.size() && count < MOST_PIECES; i++, count++) {
      if (all[i].announced && count) break;
      size_t skipped = i == socket.piece_ ? socket.offset_ : 0;
      pieces[count] = {const_cast<uint8_t*>(all[i].data) + skipped, all[i].size - skipped};
    }
    msghdr message{};
    message.msg_iov = pieces;
    message.msg_iovlen = count;
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))]{};
    if (announced) {
      message.msg_control = control;
      message.msg_controllen = sizeof control;
      cmsghdr* header = CMSG_FIRSTHDR(&message);
      header->cmsg_level = SOL_SOCKET;
      header->cmsg_type = SCM_RIGHTS;
      header->cmsg_len = CMSG_LEN(sizeof(int));
      int descriptor = announced->descriptor();
      std::memcpy(CMSG_DATA(header), &descriptor, sizeof descriptor);
    }
    ssize_t size = ::sendmsg(socket.descriptor, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (size < 0) {
      if (errno == EINTR) continue;
      std::string reason = error_text(errno);
      if (errno == EAGAIN || errno == ENOBUFS || errno == ENOMEM || errno == ETOOMANYREFS) {
        go_on_later(socket);
      } else {
        std::lock_guard lock(mutex_);
        if (socket_.get() == &socket) end(socket_, Event::Kind::disconnected, reason);
      }
      return;
    }
    if (announced) announced->close_descriptor();
    for (size_t left = size; left;) {
      size_t piece = std::min(left, all[socket.piece_].size - socket.offset_);
      left -= piece;
      socket.offset_ += piece;
      if (socket.offset_ == all[socket.piece_].size) socket.piece_++, socket.offset_ = 0;
    }
  }
}

}  // namespace gradwire
