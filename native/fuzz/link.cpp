// A stress test of links and the event loop: threads that call, respond, wait, withdraw and cut the connections of
// several links in one process, at random. Every call must get one outcome, the right one, and nothing may hang.
//
// It goes on in rounds with pauses between them. While calls come all the time, any of them mends what another one
// forgot to wake; a round that stays alone hangs instead.

#include <fcntl.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <queue>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <unordered_map>
#include <variant>
#include <vector>

// What hangs is to be told from the state of links, sockets and the loop, which nobody else needs to see.
#define private public
#include "event_loop.hpp"
#include "link.hpp"
#undef private

using namespace gradwire;

namespace {

// Serialized Errors: 7 is retry_after_seconds, 8 is not_started, 2 is the message.
const std::string REFUSAL("\x39\x9a\x99\x99\x99\x99\x99\xa9\x3f\x40\x01", 11);
const std::string CANCELLED("\x12\x09" "cancelled", 11);
const std::string NO_MEMORY("\x12\x09" "no memory", 11);
const std::string FAILED("\x12\x06" "failed", 8);

constexpr size_t LARGEST = 5 << 20;
const std::vector<std::vector<size_t>> SIZES = {
    {}, {}, {}, {0}, {10}, {5000}, {70000}, {200000, 3}, {1 << 20}, {130000, 0, 300000}, {LARGEST}, {140000, 140000},
};
// Whatever takes longer hangs.
constexpr Seconds STUCK = 20;
constexpr int CALLERS = 5;

std::atomic<bool> is_over{false};
std::atomic<int64_t> live_attachments{0};
std::atomic<uint64_t> calls_made{0}, bytes_moved{0}, cuts{0};
void print_state();

[[noreturn]] void fail(const char* file, int line, const std::string& what) {
  std::fprintf(stderr, "%s:%d: %s\n", file, line, what.c_str());
  print_state();
  std::abort();
}

#define REQUIRE(condition)                                                  \
  do {                                                                      \
    if (!(condition)) fail(__FILE__, __LINE__, "not so: " #condition);      \
  } while (false)

class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed) {}
  uint64_t below(uint64_t limit) { return engine_() % limit; }
  bool one_in(uint64_t n) { return below(n) == 0; }

 private:
  std::mt19937_64 engine_;
};

void pause(Seconds seconds) { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); }

// The bytes of an attachment: each begins somewhere else in a sequence that does not repeat.
const uint8_t* content(uint64_t key, size_t part) {
  static const std::vector<uint8_t> sequence = [] {
    std::vector<uint8_t> bytes(LARGEST + 100000);
    uint32_t random = 1;
    for (uint8_t& byte : bytes) byte = static_cast<uint8_t>((random = random * 1664525 + 1013904223) >> 24);
    return bytes;
  }();
  return sequence.data() + (key * 131 + part * 17) % 100000;
}

// In memory of their own: a sanitizer sees when it is used too late.
std::vector<Attachment> attachments_of(uint64_t key, const std::vector<size_t>& sizes) {
  std::vector<Attachment> result;
  for (size_t part = 0; part < sizes.size(); part++) {
    auto* data = new uint8_t[sizes[part]];
    if (sizes[part]) std::memcpy(data, content(key, part), sizes[part]);
    live_attachments++;
    result.push_back({data, sizes[part], std::shared_ptr<const void>(data, [](const void* p) {
                        live_attachments--;
                        delete[] static_cast<const uint8_t*>(p);
                      })});
  }
  return result;
}

void require_content(const Event& event, uint64_t key, const std::vector<size_t>& sizes) {
  REQUIRE(event.attachments.size() == sizes.size());
  for (size_t part = 0; part < sizes.size(); part++) {
    const Block& block = event.attachments[part];
    REQUIRE(block.size() == sizes[part]);
    REQUIRE(!block.size() || !std::memcmp(block.data(), content(key, part), block.size()));
    bytes_moved += block.size();
  }
}

// A request says how to respond to it; the response repeats that.
struct Body {
  uint64_t key;
  uint8_t sizes, response_sizes;
  enum class Way : uint8_t { at_once, later, blocking, failing, spoilt } way;
  uint8_t milliseconds;
  uint8_t unused[4]{};  // no byte is left out when it is copied

  std::string_view text() const { return {reinterpret_cast<const char*>(this), sizeof *this}; }
  static Body from(std::string_view text) {
    Body body;
    REQUIRE(text.size() == sizeof body);
    std::memcpy(&body, text.data(), sizeof body);
    return body;
  }
};

struct Call {
  Body body{};
  bool is_checked_badly = false;  // its attachments count as modified
  bool has_timeout = false;
  CallHandle handle = 0;
  std::atomic<int> served{0};

  std::mutex mutex;
  std::condition_variable changed;
  int outcomes = 0;
  bool is_withdrawn = false;

  bool is_settled() { return std::lock_guard(mutex), outcomes > 0; }
};

// What a response leads to when it is to be checked.
struct Answer {
  bool is_bad;
};

// One end of a link, and its application: what client/gradwire/transport/session.py does in Python.
struct End {
  std::string name;
  bool is_accepted = false;
  std::shared_ptr<Link> link;
  std::mutex connecting;
  uint64_t socket_number = 0;
  std::weak_ptr<Socket> socket;
  std::atomic<bool> is_lost{true}, heard_goodbye{false}, is_broken{false};
  std::string why_broken;  // of a raw peer
  std::atomic<Seconds> due{NEVER};

  End(std::string name, bool is_accepted, Settings settings, std::shared_ptr<Budget> budget)
      : name(std::move(name)), is_accepted(is_accepted),
        link(std::make_shared<Link>(std::move(settings), std::move(budget))) {}

  void connect(int descriptor, uint64_t shared_bytes);
  void disconnect(uint64_t number = 0);
  void flush() {
    if (link->flush()) handle(0, 0);
  }
  void flush_soon() {
    if (link->flush_soon()) handle(0, 0);
  }
  void handle(CallHandle call, size_t most_requests);
  void handle(Event& event);
  void respond(uint64_t request, const Body& body);
  void set_timer() {
    due = link->use().session().next_tick();
  }
};

// The ends that there are, so that timers find them, and what hangs can be printed.
std::mutex ends_mutex;
std::vector<std::shared_ptr<End>> ends;

std::mutex open_mutex;
std::map<uint64_t, std::pair<std::shared_ptr<End>, std::shared_ptr<Call>>> open_calls;  // by key

std::shared_ptr<Call> open_call(uint64_t key) {
  std::lock_guard lock(open_mutex);
  auto it = open_calls.find(key);
  return it == open_calls.end() ? nullptr : it->second.second;
}

void End::connect(int descriptor, uint64_t shared_bytes) {
  {
    std::lock_guard lock(connecting);
    auto made = std::make_shared<Socket>(descriptor, is_accepted);
    socket = made;
    socket_number = made->number;
    is_lost = false;
    // It lives as long as the link is connected, or longer.
    link->connect(std::move(made), Cookie(this, [](const void*) {}), shared_bytes);
  }
  handle(0, 0);
}

void End::disconnect(uint64_t number) {
  std::lock_guard lock(connecting);
  if (number && number != socket_number) return;
  link->disconnect();
  is_lost = true;
}

void End::handle(CallHandle call, size_t most_requests) {
  for (Event& event : link->take_events(call, most_requests)) handle(event);
}

// What responds later, on another thread.
std::mutex later_mutex;
std::condition_variable later_changed;
struct Later {
  Seconds when;
  std::function<void()> run;
  bool operator<(const Later& other) const { return when > other.when; }
};
std::priority_queue<Later> later;

void run_later(Seconds seconds, std::function<void()> run) {
  std::lock_guard lock(later_mutex);
  later.push({monotonic_now() + seconds, std::move(run)});
  later_changed.notify_one();
}

void End::handle(Event& event) {
  switch (event.kind) {
    case Event::Kind::request: {
      Body body = Body::from(event.body);
      require_content(event, body.key, SIZES[body.sizes]);
      if (auto call = open_call(body.key)) REQUIRE(call->served++ == 0);
      link->use().session().begin(event.id);
      Seconds seconds = body.milliseconds / 1000.0;
      if (body.way == Body::Way::later) {
        run_later(seconds, [this, id = event.id, body] { respond(id, body); });
        return;
      }
      if (body.way == Body::Way::blocking) {
        if (body.key & 1) EventLoop::instance().about_to_block();
        pause(seconds);
      }
      // As long as a request is served, its attachments stay.
      respond(event.id, body);
      return;
    }
    case Event::Kind::check: {
      bool is_bad;
      if (event.flag) {
        is_bad = static_cast<const Answer*>(event.cookie.get())->is_bad;
      } else {
        auto* call = static_cast<Call*>(const_cast<void*>(event.cookie.get()));
        is_bad = call->is_checked_badly;
        if (is_bad) {
          std::lock_guard lock(call->mutex);
          // It may have expired, or been withdrawn.
          if (!call->outcomes && !call->is_withdrawn) call->outcomes++;
          call->changed.notify_all();
        }
      }
      if (is_bad) link->use().session().reject(monotonic_now(), event.id, FAILED);
      else link->use().session().confirm(event.id);
      flush();
      return;
    }
    case Event::Kind::response:
    case Event::Kind::error:
    case Event::Kind::expired: {
      auto* call = static_cast<Call*>(const_cast<void*>(event.cookie.get()));
      if (event.kind == Event::Kind::response) {
        Body body = Body::from(event.body);
        REQUIRE(body.text() == call->body.text());
        REQUIRE(body.way != Body::Way::failing && call->served == 1);
        require_content(event, body.key + 1, SIZES[body.response_sizes]);
      } else if (event.kind == Event::Kind::error) {
        // A request that is refused is sent again, unless its time would be over by then.
        bool is_refusal = event.body == REFUSAL && call->has_timeout;
        REQUIRE(event.body == FAILED || is_refusal);
        REQUIRE(is_refusal || call->body.way == Body::Way::failing || call->body.way == Body::Way::spoilt);
      } else {
        REQUIRE(call->has_timeout);
      }
      std::lock_guard lock(call->mutex);
      REQUIRE(!call->is_withdrawn);
      REQUIRE(++call->outcomes == 1 || call->is_checked_badly);
      call->changed.notify_all();
      return;
    }
    case Event::Kind::timer: set_timer(); return;
    case Event::Kind::disconnected: disconnect(event.id); return;
    case Event::Kind::goodbye:
      heard_goodbye = true;
      link->use().session().end();
      flush();
      return;
    case Event::Kind::broken:
      why_broken = event.body;
      is_broken = true;
      if (name != "raw") fail(__FILE__, __LINE__, name + " is broken: " + event.body);
      return;
    case Event::Kind::discarded:
    case Event::Kind::cancelled:
    case Event::Kind::acknowledged: return;
    default: fail(__FILE__, __LINE__, "an event of kind " + std::to_string(static_cast<int>(event.kind)));
  }
}

void End::respond(uint64_t request, const Body& body) {
  if (body.way == Body::Way::failing) {
    link->use().session().fail(request, FAILED);
  } else {
    auto sent = attachments_of(body.key + 1, SIZES[body.response_sizes]);
    auto answer = std::make_shared<Answer>(Answer{body.way == Body::Way::spoilt});
    bool is_checked = body.way == Body::Way::spoilt || body.key & 2;
    link->use().session().respond(request, body.text(), std::move(sent), is_checked, std::move(answer));
  }
  flush_soon();
}

// -- the threads

// One of the event loop. It starts others that are needed.
std::atomic<int> loop_threads{0};

void run_loop() {
  while (true) {
    EventLoop::Work work = EventLoop::instance().next();
    if (!work.link) {
      if (is_over) break;
      pause(0.002);
      continue;
    }
    if (work.needs_thread && loop_threads < 8) {
      loop_threads++;
      std::thread(run_loop).detach();
    }
    Cookie owner = work.link->owner();
    if (!owner) continue;
    static_cast<End*>(const_cast<void*>(owner.get()))->handle(0, 1);
  }
  loop_threads--;
}

void run_timers() {
  while (!is_over) {
    pause(0.002);
    std::vector<std::shared_ptr<End>> all;
    {
      std::lock_guard lock(ends_mutex);
      all = ends;
    }
    for (auto& end : all) {
      if (end->due > monotonic_now()) continue;
      end->due = NEVER;
      end->link->tick(monotonic_now());
      end->set_timer();
      end->handle(0, 0);
      end->flush();
    }
  }
}

void run_later_ones() {
  std::unique_lock lock(later_mutex);
  while (!is_over) {
    if (later.empty()) {
      later_changed.wait_for(lock, std::chrono::milliseconds(100));
    } else if (Seconds left = later.top().when - monotonic_now(); left > 0) {
      later_changed.wait_for(lock, std::chrono::duration<double>(left));
    } else {
      auto run = later.top().run;
      later.pop();
      lock.unlock();
      run();
      lock.lock();
    }
  }
}

// -- links

std::array<int, 2> socket_pair(bool is_tcp) {
  std::array<int, 2> made;
  if (!is_tcp) {
    REQUIRE(!socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, made.data()));
    return made;
  }
  int listening = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  auto* generic = reinterpret_cast<sockaddr*>(&address);
  REQUIRE(!bind(listening, generic, size) && !listen(listening, 1) && !getsockname(listening, generic, &size));
  made[0] = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  REQUIRE(!::connect(made[0], generic, size));
  made[1] = accept4(listening, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
  REQUIRE(made[1] >= 0 && !fcntl(made[0], F_SETFL, O_NONBLOCK));
  close(listening);
  return made;
}

auto budget = std::make_shared<Budget>();

struct Pair {
  bool is_tcp;
  uint64_t shared_bytes;
  std::array<std::shared_ptr<End>, 2> ends;

  explicit Pair(int number) : is_tcp(number == 2), shared_bytes(number == 0 ? 64 << 20 : number == 1 ? 4 << 20 : 0) {
    for (int side = 0; side < 2; side++) {
      Settings settings;
      settings.refusal = REFUSAL, settings.cancelled = CANCELLED, settings.no_memory = NO_MEMORY;
      settings.patience = 2 * STUCK;
      if (number == 1) settings.max_quota_bytes = 8 << 20;
      if (number == 2) settings.max_window_bytes = 8 << 20;
      settings.seed = side;
      ends[side] = std::make_shared<End>(std::to_string(number) + "ab"[side], side == 1, settings, budget);
    }
    std::lock_guard lock(ends_mutex);
    ::ends.insert(::ends.end(), ends.begin(), ends.end());
  }

  void connect(Random& random) {
    auto sockets = socket_pair(is_tcp);
    int little = random.one_in(3) ? 4096 : 0;
    for (int socket : sockets)
      if (little) setsockopt(socket, SOL_SOCKET, SO_SNDBUF, &little, sizeof little);
    size_t first = random.below(2);
    ends[first]->connect(sockets[first], shared_bytes);
    if (random.one_in(3)) pause(random.below(3000) * 1e-6);
    ends[1 - first]->connect(sockets[1 - first], shared_bytes);
  }

  void cut(Random& random) {
    End& end = *ends[random.below(2)];
    switch (random.below(3)) {
      case 0: end.disconnect(); break;
      case 1:
        if (auto socket = (std::lock_guard(end.connecting), end.socket.lock())) socket->shut_down();
        break;
      case 2: connect(random); break;
    }
    cuts++;
  }

  // The first end closes the session, and the other one hears of it.
  void end() {
    Random random(1);
    connect(random);
    ends[0]->link->use().session().close({});
    ends[0]->flush();
    for (Seconds until = monotonic_now() + STUCK; !ends[1]->heard_goodbye || !ends[0]->is_lost; pause(0.001))
      REQUIRE(monotonic_now() < until);
    for (auto& end : ends) end->disconnect();
    std::lock_guard lock(ends_mutex);
    for (auto& end : ends) std::erase(::ends, end);
  }
};

// Connects links again that were cut, and cuts them when it is told to.
std::mutex pairs_mutex;  // whoever replaces a pair
std::vector<std::unique_ptr<Pair>> pairs;
std::atomic<bool> is_cutting{false};

void run_cutter(uint64_t seed) {
  Random random(seed);
  while (!is_over) {
    pause(random.below(random.one_in(2) ? 30000 : 3000) * 1e-6);
    std::lock_guard lock(pairs_mutex);
    for (auto& pair : pairs) {
      if (pair->ends[0]->is_lost || pair->ends[1]->is_lost) pair->connect(random);
      else if (is_cutting && random.one_in(3)) pair->cut(random);
    }
  }
}

// -- callers

// The callers' rounds.
std::mutex round_mutex;
std::condition_variable round_changed;
uint64_t round_number = 0;
int callers_left = 0;
Seconds round_since = 0;
std::atomic<uint64_t> last_key{0};
// All calls of a round are of one end, and their responses come in few bursts: who leaves last has to see to the rest.
std::atomic<int> only_pair{-1};

struct Started {
  std::shared_ptr<End> end;
  std::shared_ptr<Call> call;
};

Started start_call(Random& random) {
  int only = only_pair;
  auto& ends = pairs[only < 0 ? random.below(pairs.size()) : only]->ends;
  Started started{ends[only < 0 && random.one_in(3)], std::make_shared<Call>()};
  auto& [end, call] = started;
  call->body.key = last_key += 4;
  call->body.key += random.below(4);
  bool is_small = random.one_in(2);
  call->body.sizes = is_small ? 0 : random.below(SIZES.size());
  call->body.response_sizes = is_small ? 0 : random.below(SIZES.size());
  constexpr Body::Way WAYS[] = {Body::Way::at_once, Body::Way::at_once,  Body::Way::later,
                                Body::Way::later,   Body::Way::blocking, Body::Way::failing};
  call->body.way = random.one_in(40) ? Body::Way::spoilt : WAYS[random.below(std::size(WAYS))];
  call->body.milliseconds = random.one_in(3) ? 100 : random.below(10);
  if (only >= 0) call->body.way = Body::Way::later, call->body.milliseconds = 80 * (1 + random.below(3));
  call->is_checked_badly = random.one_in(40);
  call->has_timeout = random.one_in(8);
  {
    std::lock_guard lock(open_mutex);
    open_calls[call->body.key] = {end, call};
  }
  auto sent = attachments_of(call->body.key, SIZES[call->body.sizes]);
  Session::CallOptions options;
  if (call->has_timeout) options.timeout = random.below(100) / 1000.0;
  options.checked = call->is_checked_badly || random.one_in(2);
  options.cookie = call;
  {
    auto use = end->link->use();
    call->handle = use.session().call(monotonic_now(), 1, call->body.text(), std::move(sent), options);
  }
  REQUIRE(call->handle);
  if (call->has_timeout) end->set_timer();
  end->flush();
  calls_made++;
  return started;
}

void await_in_background(Started& started) {
  auto& [end, call] = started;
  end->link->read_in_background(1);
  {
    std::unique_lock lock(call->mutex);
    if (!call->changed.wait_for(lock, std::chrono::duration<double>(STUCK), [&] { return call->outcomes > 0; })) {
      lock.unlock();
      fail(__FILE__, __LINE__, "stuck: " + end->name + " call " + std::to_string(call->handle));
    }
  }
  end->link->read_in_background(-1);
}

// As Session.read_for in Python.
void await(Started& started) {
  auto& [end, call] = started;
  Seconds since = monotonic_now();
  while (!call->is_settled()) {
    Seconds until = monotonic_now() + 0.1;
    Link::Waited waited = end->link->wait(call->handle, until);
    REQUIRE(monotonic_now() < until + STUCK && monotonic_now() < since + STUCK);
    if (waited == Link::Waited::events) end->handle(call->handle, SIZE_MAX);
    else if (waited != Link::Waited::interrupted) break;
  }
  if (!call->is_settled()) await_in_background(started);
}

void withdraw(Started& started, Random& random) {
  auto& [end, call] = started;
  pause(random.below(5000) * 1e-6);
  bool was_awaited;
  {
    auto use = end->link->use();
    was_awaited = use.session().withdraw(monotonic_now(), call->handle);
    std::lock_guard lock(call->mutex);
    call->is_withdrawn = was_awaited;
    REQUIRE(!was_awaited || !call->outcomes || call->is_checked_badly);
  }
  end->link->wake(call->handle);
  end->flush();
  end->handle(0, 0);
  if (!was_awaited) await_in_background(started);
}

void run_caller(uint64_t seed) {
  Random random(seed);
  uint64_t seen = 0;
  while (true) {
    {
      std::unique_lock lock(round_mutex);
      round_changed.wait(lock, [&] { return round_number != seen || is_over; });
      if (is_over) return;
      seen = round_number;
    }
    std::vector<Started> all;
    if (!random.one_in(4))
      for (uint64_t count = random.below(3) + 1; count; count--) all.push_back(start_call(random));
    for (Started& started : all) {
      switch (random.below(6)) {
        case 0: withdraw(started, random); break;
        case 1: await_in_background(started); break;
        default: await(started);
      }
      std::lock_guard lock(open_mutex);
      open_calls.erase(started.call->body.key);
    }
    std::lock_guard lock(round_mutex);
    if (--callers_left == 0) round_changed.notify_all();
  }
}

// -- what hangs

void print_state() {
  std::vector<std::shared_ptr<End>> all;
  {
    std::unique_lock lock(ends_mutex, std::try_to_lock);
    all = ends;
  }
  Seconds now = monotonic_now();
  for (auto& end : all) {
    Link& link = *end->link;
    std::unique_lock lock(link.mutex_, std::try_to_lock);
    Session::Statistics s = link.session_.statistics();
    std::fprintf(stderr, "%s: %s calls %lu inbound %lu kept back %lu has_output %d events %zu waiters %zu background %d\n",
                 end->name.c_str(), lock ? "" : "(locked)", s.calls, s.inbound_calls, s.kept_back,
                 link.session_.has_output(), link.events_.size(), link.waiters_.size(), link.in_background_);
    for (const Event& event : link.events_)
      std::fprintf(stderr, "  event %d of %lu\n", static_cast<int>(event.kind), event.id);
    for (auto& [call, waiter] : link.waiters_)
      std::fprintf(stderr, "  waiter for %lu%s\n", call, waiter->is_reading ? " reads" : "");
    if (!link.socket_) continue;
    Socket& socket = *link.socket_;
    std::unique_lock reading(socket.reading_, std::try_to_lock), writing(socket.writing_, std::try_to_lock);
    std::fprintf(stderr, "  socket %lu: full %d over %d read by caller %d watched %d (%x) rest %d reading %d writing %d left %.3f s ago\n",
                 socket.number, socket.is_full_.load(), socket.is_over_.load(), socket.is_read_by_caller_.load(),
                 socket.is_watched_.load(), socket.watched_events_, socket.has_rest_.load(), !reading, !writing,
                 now - socket.left_at_);
  }
  EventLoop& loop = EventLoop::instance();
  std::unique_lock lock(loop.mutex_, std::try_to_lock);
  std::fprintf(stderr, "loop%s: sockets %zu ready %zu unwritten %zu idle %zu leader %d polling %d busy %d watchdog sleeps %d\n",
               lock ? "" : " (locked)", loop.sockets_.size(), loop.ready_.size(), loop.unwritten_.size(), loop.idle_,
               loop.leader_ != std::thread::id(), loop.is_polling_, loop.busy_since_ != NEVER,
               loop.watchdog_sleeps_.load());
}

// Ends the process if a round does not end, wherever it hangs.
void run_monitor() {
  while (!is_over) {
    pause(0.1);
    std::unique_lock lock(round_mutex);
    if (callers_left && monotonic_now() > round_since + 3 * STUCK) {
      lock.unlock();
      fail(__FILE__, __LINE__, "a round hangs");
    }
  }
}

size_t open_descriptors() {
  size_t count = 0;
  for ([[maybe_unused]] auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) count++;
  return count;
}

Seconds cpu_seconds() {
  rusage use{};
  getrusage(RUSAGE_SELF, &use);
  return use.ru_utime.tv_sec + use.ru_stime.tv_sec + (use.ru_utime.tv_usec + use.ru_stime.tv_usec) * 1e-6;
}

void require_calm(const char* when) {
  pause(0.1);
  Seconds before = cpu_seconds();
  pause(0.3);
  Seconds used = cpu_seconds() - before;
  if (used > 0.15) fail(__FILE__, __LINE__, std::string("busy without anything to do: ") + when);
}

// -- a peer that is no link

void send_descriptors(int socket, size_t count, std::string_view bytes) {
  std::vector<int> descriptors(count, 0);
  std::vector<char> control(CMSG_SPACE(count * sizeof(int)));
  iovec place{const_cast<char*>(bytes.data()), bytes.size()};
  msghdr message{};
  message.msg_iov = &place;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(count * sizeof(int));
  std::memcpy(CMSG_DATA(header), descriptors.data(), count * sizeof(int));
  sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
}

void run_raw_peers() {
  auto wait_for = [](auto condition) {
    for (Seconds until = monotonic_now() + STUCK; !condition(); pause(0.001)) REQUIRE(monotonic_now() < until);
  };
  for (int what = 0; what < 7; what++) {
    auto end = std::make_shared<End>("raw", what % 2 == 0, Settings(), budget);
    auto sockets = socket_pair(false);
    size_t before = open_descriptors();
    end->connect(sockets[0], 64 << 20);
    Session::CallOptions options;
    auto call = std::make_shared<Call>();
    options.cookie = call;
    switch (what) {
      case 0:  // never reads
      case 1: {
        Body body{};
        for (int count = 0; count < 30; count++)
          end->link->use().session().call(monotonic_now(), 1, body.text(), attachments_of(0, {100000}), options);
        end->flush();
        pause(0.02);
        require_calm("the other peer does not read");
        break;
      }
      case 2: {  // sends descriptors that belong to nothing
        const std::string large_frame("\x0a\xc0\x84\x3d");
        for (int count = 0; count < 1000 && !end->is_broken; count++) {
          send_descriptors(sockets[1], 1, count ? "A" : large_frame);
          pause(0.0001);
        }
        wait_for([&] { return end->is_broken.load(); });
        REQUIRE(end->why_broken.find("descriptors") != std::string::npos);
        REQUIRE(open_descriptors() < before + 100);
        require_calm("the protocol is broken");
        break;
      }
      case 3:  // sends more at once than fit
        end->link->read_in_background(1);
        send_descriptors(sockets[1], 200, "\x0a");
        wait_for([&] { return end->is_broken.load(); });
        REQUIRE(end->why_broken.find("descriptors") != std::string::npos);
        require_calm("the protocol is broken");
        break;
      case 4:  // closes one direction
      case 5:
        shutdown(sockets[1], SHUT_WR);
        wait_for([&] { return end->is_lost.load(); });
        require_calm("the other peer has closed one direction");
        break;
    }
    if (what == 6) {  // sends one where this process can have no more
      rlimit before_it{}, none_left{};
      getrlimit(RLIMIT_NOFILE, &before_it);
      none_left = before_it;
      none_left.rlim_cur = 0;
      setrlimit(RLIMIT_NOFILE, &none_left);
      send_descriptors(sockets[1], 1, "\x0a");
      wait_for([&] { return end->is_lost.load() || end->is_broken.load(); });
      setrlimit(RLIMIT_NOFILE, &before_it);
      REQUIRE(!end->is_broken);
    }
    end->disconnect();
    end->link->use().session().end();
    close(sockets[1]);
  }
}

// -- what chance seldom brings about

// Two threads wait, one of them reads the responses to both, and a third call is left to the event loop: whoever of the
// two goes last has to leave the socket to it. Nothing else happens meanwhile, so that the watchdog sleeps.
void run_last_waiter(Pair& pair) {
  auto& [end, other] = pair.ends;
  for (int times = 0; times < 10; times++) {
    std::vector<Started> all;
    Session::CallOptions options;
    for (int i = 0; i < 3; i++) {
      auto call = std::make_shared<Call>();
      // Nobody responds but the lines below.
      call->body.key = last_key += 4, call->body.way = Body::Way::later, call->body.milliseconds = i < 2 ? 90 : 200;
      options.cookie = call;
      call->handle = end->link->use().session().call(monotonic_now(), 1, call->body.text(), {}, options);
      call->served = 1;
      all.push_back({end, call});
    }
    end->flush();
    std::vector<std::thread> waiting;
    for (int i = 0; i < 2; i++)
      waiting.emplace_back([&, i] {
        while (!all[i].call->is_settled() &&
               end->link->wait(all[i].call->handle, monotonic_now() + STUCK) == Link::Waited::events)
          end->handle(all[i].call->handle, SIZE_MAX);
      });
    await_in_background(all[2]);
    for (auto& thread : waiting) thread.join();
  }
}

}  // namespace

int main(int count, char** arguments) {
  Seconds seconds = 60;
  uint64_t seed = std::random_device{}();
  for (int i = 1; i + 1 < count; i += 2) {
    std::string_view name = arguments[i];
    if (name == "--seconds") seconds = std::atof(arguments[i + 1]);
    else if (name == "--seed") seed = std::strtoull(arguments[i + 1], nullptr, 10);
  }
  std::printf("seed %lu\n", seed);
  content(0, 0);
  EventLoop::instance();
  size_t descriptors = open_descriptors();
  loop_threads++;
  std::thread(run_loop).detach();
  run_raw_peers();

  for (int number = 0; number < 3; number++) pairs.push_back(std::make_unique<Pair>(number));
  std::vector<std::thread> threads;
  threads.emplace_back(run_timers);
  threads.emplace_back(run_later_ones);
  Random first(seed);
  for (auto& pair : pairs) pair->connect(first), run_last_waiter(*pair);
  threads.emplace_back(run_cutter, seed);
  threads.emplace_back(run_monitor);
  for (int caller = 0; caller < CALLERS; caller++) threads.emplace_back(run_caller, seed + 1 + caller);
  Random random(seed + 100);
  Seconds until = monotonic_now() + seconds;
  uint64_t rounds = 0;
  std::vector<std::shared_ptr<End>> ended;  // what responds late may still come
  for (; monotonic_now() < until; rounds++) {
    only_pair = random.one_in(4) ? random.below(pairs.size()) : -1;
    is_cutting = only_pair < 0 && random.one_in(2);
    {
      std::unique_lock lock(round_mutex);
      round_number++;
      callers_left = CALLERS;
      round_since = monotonic_now();
      round_changed.notify_all();
      round_changed.wait(lock, [] { return !callers_left; });
    }
    is_cutting = false;
    if (random.one_in(2)) pause(random.below(80000) * 1e-6);
    if (random.one_in(8)) EventLoop::instance().trim(random.below(2) * 0.05);
    if (random.one_in(20)) {
      std::lock_guard lock(pairs_mutex);
      size_t number = random.below(pairs.size());
      pairs[number]->end();
      ended.insert(ended.end(), pairs[number]->ends.begin(), pairs[number]->ends.end());
      pairs[number] = std::make_unique<Pair>(number);
    }
  }
  require_calm("nobody calls");
  {
    std::lock_guard lock(pairs_mutex);
    for (auto& pair : pairs) pair->end();
    pause(0.3);  // for what responds late
    is_over = true;
  }
  round_changed.notify_all();
  for (std::thread& thread : threads) thread.join();
  for (Seconds stop = monotonic_now() + STUCK; loop_threads; pause(0.001)) REQUIRE(monotonic_now() < stop);
  pairs.clear();
  ended.clear();
  later = {};
  REQUIRE(!live_attachments && !budget->used());
  REQUIRE(open_descriptors() == descriptors);
  std::printf("%lu rounds, %lu calls, %lu MB, %lu cuts\n", rounds, calls_made.load(), bytes_moved.load() >> 20, cuts.load());
  return 0;
}
