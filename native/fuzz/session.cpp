// A fuzz target: two sessions and what their applications do, or one session and bytes from nowhere. The input says
// what happens; a model beside it says what must come out. What is wrong ends in abort() or in a sanitizer.
//
// Its entry point is that of libFuzzer; driver.cpp is for where there is none.

#include "session.hpp"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <set>
#include <utility>

#include "fuzz/blocks.hpp"

using namespace gradwire;

namespace {

#define REQUIRE(condition)                                                     \
  do {                                                                         \
    if (!(condition)) {                                                        \
      std::fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                            \
    }                                                                          \
  } while (false)

// Serialized Errors: 7 is retry_after_seconds, 8 is not_started, 2 is the message.
const std::string REFUSAL("\x39\x9a\x99\x99\x99\x99\x99\xb9\x3f\x40\x01", 11);
const std::string CANCELLED("\x12\x09" "cancelled", 11);
const std::string NO_MEMORY("\x12\x09" "no memory", 11);
const std::string FAILED("\x12\x06" "failed", 8);

// With and without attachments, copied and not, on both sides of what is worth a place of its own.
const std::vector<std::vector<uint64_t>> SIZES = {
    {}, {0}, {10}, {100, 0, 7}, {5000}, {65536}, {65537}, {1, 70000, 0}, {0, 30000, 30000, 9000, 1}, {150000},
};
const uint64_t LARGE_BODY = 66000;
const Seconds TIMEOUTS[] = {NEVER, NEVER, NEVER, 0.5, 3.0, 0.0, -1.0};

// The bytes of an attachment: each begins somewhere else in a sequence that does not repeat.
const uint8_t* content(uint64_t key, uint64_t part) {
  static const std::vector<uint8_t> sequence = [] {
    std::vector<uint8_t> bytes(300000);
    uint32_t random = 1;
    for (uint8_t& byte : bytes) byte = static_cast<uint8_t>((random = random * 1664525 + 1013904223) >> 24);
    return bytes;
  }();
  return sequence.data() + (key * 131 + part * 17) % 100000;
}

// What the input says next. At its end there are zeros.
class Input {
 public:
  explicit Input(Bytes bytes) : rest_(bytes) {}
  bool empty() const { return rest_.empty(); }
  uint8_t byte() {
    if (rest_.empty()) return 0;
    uint8_t value = rest_[0];
    rest_ = rest_.subspan(1);
    return value;
  }
  bool flag() { return byte() & 1; }
  size_t below(size_t limit) { return limit ? byte() % limit : 0; }
  // Small and large ones about equally often.
  size_t size() {
    uint8_t value = byte();
    if (value < 64) return value;
    return value < 128 ? 64u * (value - 63) : value < 192 ? 4096u * (value - 127) : size_t{1} << 30;
  }
  Bytes take(size_t size) {
    Bytes taken = rest_.first(std::min(size, rest_.size()));
    rest_ = rest_.subspan(taken.size());
    return taken;
  }

 private:
  Bytes rest_;
};

int live_attachments = 0;

std::vector<Attachment> attachments_of(uint64_t key, const std::vector<uint64_t>& sizes) {
  std::vector<Attachment> result;
  for (size_t part = 0; part < sizes.size(); part++) {
    auto* data = new uint8_t[sizes[part]];
    if (sizes[part]) std::memcpy(data, content(key, part), sizes[part]);
    live_attachments++;
    std::shared_ptr<const void> owner(data, [](const void* p) {
      live_attachments--;
      delete[] static_cast<const uint8_t*>(p);
    });
    result.push_back({data, static_cast<size_t>(sizes[part]), std::move(owner)});
  }
  return result;
}

// A body names its message, the sizes of its attachments, and is as long as that says.
struct Body {
  char kind;  // 'q' or 'r'
  uint8_t sizes;
  uint8_t is_large;
  uint8_t peer;
  uint32_t key;

  std::string text() const {
    std::string result(reinterpret_cast<const char*>(this), sizeof *this);
    if (is_large) result.append(LARGE_BODY, static_cast<char>(key));
    return result;
  }
};

struct Call {
  Body body;
  Seconds deadline = NEVER;
  bool withdrawn = false;
  bool is_over = false;
  Event::Kind outcome = Event::Kind::request;
  int discarded = 0;
};

CallHandle handle_in(const Cookie& cookie) { return cookie ? *static_cast<const CallHandle*>(cookie.get()) : 0; }

struct World;

// One peer, and what its application does.
struct Peer {
  World& world;
  uint8_t index;
  Settings settings;
  Session session;
  std::map<CallHandle, Call> calls;
  std::map<uint64_t, Body> open_requests;  // served, without a response
  std::set<uint64_t> arrived;
  std::set<uint64_t> cancelled, acknowledged;
  std::map<uint32_t, int> served;  // by the key of the call
  std::map<uint64_t, CallHandle> checks;  // and the call of the request that is checked; 0: a response
  std::string under_way;  // bytes to this peer
  std::vector<Output> being_written;
  std::vector<Output::Copy> being_copied;
  std::shared_ptr<SharedMemory> shared;
  bool has_handled_the_end = false;

  Peer(World& world, uint8_t index, Settings settings, std::shared_ptr<Budget> budget)
      : world(world), index(index), settings(settings), session(settings, std::move(budget)) {}

  Peer& other() const;
  void call(Input& input);
  void withdraw_one(Input& input);
  void respond_to_one(Input& input);
  void answer_a_check(Input& input);
  bool is_awaited(CallHandle handle) const;
  void do_something_odd(Input& input);
  void detach();
  void attach();
  void write(size_t small_bytes);
  void copy();
  void flush();
  void read(size_t size, bool in_place);
  void receive(Bytes bytes, bool in_place);
  void tick();
  void handle_events();
  void on_outcome(Event& event);
  void check_message(const Event& event, const Body& body, bool is_response);
  void check_state() const;
};

struct World {
  Seconds now = 0;
  bool is_exact = true;  // no byte of a stream was changed
  bool has_shared_memory = false;
  std::shared_ptr<Budget> budget;
  std::vector<std::unique_ptr<Peer>> peers;
  uint32_t last_key = 0;

  explicit World(Input& input, bool is_exact);
  ~World();
  void connect();
  void cut(Input& input);
  void change_bytes(Input& input);
  void step(Input& input);
  void check_state() const;
  void settle();
  void finish();
};

Peer& Peer::other() const { return *world.peers[1 - index]; }

void Peer::call(Input& input) {
  Body body{'q', static_cast<uint8_t>(input.below(SIZES.size())), 0, index, ++world.last_key};
  uint8_t options = input.byte();
  body.is_large = options % 16 == 15;
  Seconds timeout = TIMEOUTS[input.below(std::size(TIMEOUTS))];
  auto cookie = std::make_shared<CallHandle>();
  CallHandle handle = session.call(
      world.now, 1, body.text(), attachments_of(body.key, SIZES[body.sizes]),
      {.timeout = timeout, .nested = (options & 16) != 0, .checked = (options & 32) != 0, .cookie = cookie});
  *cookie = handle;
  REQUIRE(!handle == session.has_ended());
  if (!handle) return;
  REQUIRE(!calls.contains(handle));
  calls[handle] = {.body = body, .deadline = timeout < NEVER ? world.now + timeout : NEVER};
}

void Peer::withdraw_one(Input& input) {
  if (calls.empty()) return;
  auto& [handle, call] = *std::next(calls.begin(), static_cast<long>(input.below(calls.size())));
  handle_events();
  bool was_awaited = !call.withdrawn && !call.is_over && !session.has_ended();
  REQUIRE(session.withdraw(world.now, handle) == was_awaited);
  if (was_awaited) call.withdrawn = true;
}

void Peer::respond_to_one(Input& input) {
  if (open_requests.empty()) return;
  auto it = std::next(open_requests.begin(), static_cast<long>(input.below(open_requests.size())));
  auto [id, request] = *it;
  uint8_t kind = input.byte();
  if (kind & 1) session.begin(id);
  if (kind & 2) return;
  open_requests.erase(it);
  bool is_wanted = !cancelled.contains(id);
  if (kind % 32 == 28) {
    served[request.key]--;  // nothing ran
    REQUIRE(session.fail(id, REFUSAL) || session.has_ended());
  } else if (kind % 32 == 24) {
    REQUIRE(session.fail(id, FAILED) || session.has_ended());
  } else {
    Body body{'r', static_cast<uint8_t>(input.below(SIZES.size())), kind % 32 == 20, index, request.key};
    bool is_sent = session.respond(id, body.text(), attachments_of(body.key, SIZES[body.sizes]), (kind & 128) != 0);
    REQUIRE(is_sent == (is_wanted && !session.has_ended()));
  }
}

void Peer::answer_a_check(Input& input) {
  if (checks.empty()) return;
  auto it = std::next(checks.begin(), static_cast<long>(input.below(checks.size())));
  auto [check, handle] = *it;
  checks.erase(it);
  if (input.byte() % 4) {
    session.confirm(check);
    return;
  }
  bool was_awaited = is_awaited(handle);
  session.reject(world.now, check, FAILED);
  // Unless it is of an earlier connection.
  if (was_awaited && !is_awaited(handle)) calls.at(handle).withdrawn = true;
}

bool Peer::is_awaited(CallHandle handle) const {
  return std::ranges::any_of(session.open_calls(), [&](const Cookie& cookie) { return handle_in(cookie) == handle; });
}

// What a careless application does, with ids that may be anything.
void Peer::do_something_odd(Input& input) {
  uint8_t kind = input.byte();
  uint64_t id = input.byte();
  switch (kind % 8) {
    case 0: session.confirm(id); break;
    case 1: session.begin(id); break;
    case 2: session.limit_window(world.now, id * 4096); break;
    case 3:
      if (!open_requests.contains(id)) REQUIRE(!session.respond(id, "none", {}));
      break;
    case 4:
      if (!open_requests.contains(id)) REQUIRE(!session.fail(id, FAILED));
      break;
    case 5:
      if (!calls.contains(id)) REQUIRE(!session.withdraw(world.now, id));
      break;
    case 6: attach(), other().detach(), world.connect(); break;
    case 7: session.take_output(id); if (!session.has_ended()) world.connect(); break;
  }
}

void Peer::detach() {
  session.detach();
  under_way.clear();
  being_written.clear();
  being_copied.clear();
  shared.reset();
}

void Peer::attach() {
  // Too little for everything: some attachments go through the stream.
  if (world.has_shared_memory) shared = std::make_shared<SharedMemory>(1 << 20, [] {});
  session.attach(world.now, shared);
}

// As late as it may be.
void Peer::copy() {
  for (const Output::Copy& copy : being_copied) std::memcpy(copy.to, copy.from, copy.size);
  being_copied.clear();
}

void Peer::write(size_t small_bytes) {
  copy();
  bool had_output = session.has_output();
  Output output = session.take_output(small_bytes);
  size_t size = 0;
  for (const Output::Piece& piece : output.pieces) size += piece.size;
  for (const Output::Copy& copy : output.copies) size += copy.size;
  REQUIRE(size == output.size);
  REQUIRE(had_output || !size);
  being_copied = output.copies;
  if (size) being_written.push_back(std::move(output));
}

// What is being written is read from its memory as late as this.
void Peer::flush() {
  copy();
  for (const Output& output : being_written)
    for (const Output::Piece& piece : output.pieces) {
      if (piece.announced) {
        if (other().shared) other().shared->add_descriptor(dup(piece.announced->descriptor()));
        piece.announced->close_descriptor();
      }
      other().under_way.append(reinterpret_cast<const char*>(piece.data), piece.size);
    }
  being_written.clear();
}

void Peer::read(size_t size, bool in_place) {
  size = std::min(size, under_way.size());
  std::string bytes = under_way.substr(0, size);
  under_way.erase(0, size);
  receive({reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()}, in_place);
}

void Peer::receive(Bytes bytes, bool in_place) {
  if (!session.is_attached()) return;
  try {
    while (in_place && !bytes.empty()) {
      std::span<uint8_t> place = session.place();
      REQUIRE(place.empty() || place.size() >= 4096);
      size_t size = std::min(bytes.size(), place.empty() ? size_t{16} : place.size());
      if (place.empty()) {
        session.receive(world.now, bytes.first(size));
      } else {
        std::memcpy(place.data(), bytes.data(), size);
        session.received_in_place(world.now, size);
      }
      bytes = bytes.subspan(size);
    }
    // A copy of just that size, so that a sanitizer sees reads beyond it.
    std::vector<uint8_t> exact(bytes.begin(), bytes.end());
    if (!exact.empty()) session.receive(world.now, exact);
  } catch (const ProtocolError& error) {
    if (world.is_exact) std::fprintf(stderr, "%s\n", error.what());
    REQUIRE(!world.is_exact);
    handle_events();
    session.close({.error = FAILED, .has_error = true});
  }
}

void Peer::tick() {
  session.tick(world.now);
  REQUIRE(session.next_tick() > world.now);
}

void Peer::handle_events() {
  bool had_ended = session.has_ended() && has_handled_the_end;
  has_handled_the_end = session.has_ended();
  for (Event& event : session.take_events()) {
    REQUIRE(!had_ended);
    switch (event.kind) {
      case Event::Kind::request: {
        REQUIRE(arrived.insert(event.id).second);
        Body body{};
        std::memcpy(&body, event.body.data(), std::min(sizeof body, event.body.size()));
        open_requests[event.id] = body;
        if (!world.is_exact) break;
        check_message(event, body, false);
        REQUIRE(++served[body.key] == 1);
        break;
      }
      case Event::Kind::cancelled:
        REQUIRE(arrived.contains(event.id));
        REQUIRE(cancelled.insert(event.id).second);
        break;
      case Event::Kind::acknowledged:
        REQUIRE(!open_requests.contains(event.id));
        REQUIRE(acknowledged.insert(event.id).second);
        break;
      case Event::Kind::check:
        REQUIRE(event.flag || calls.contains(handle_in(event.cookie)));
        REQUIRE(checks.emplace(event.id, event.flag ? 0 : handle_in(event.cookie)).second);
        break;
      case Event::Kind::goodbye:
        REQUIRE(!world.is_exact || other().session.has_ended());
        session.end();
        break;
      case Event::Kind::discarded: {
        Call& call = calls.at(event.id);
        REQUIRE(call.withdrawn || call.outcome == Event::Kind::expired || call.outcome == Event::Kind::no_memory);
        REQUIRE(++call.discarded == 1);
        REQUIRE(event.attachments.empty() && handle_in(event.cookie) == event.id);
        break;
      }
      default: on_outcome(event);
    }
  }
}

void Peer::on_outcome(Event& event) {
  REQUIRE(calls.contains(event.id) && handle_in(event.cookie) == event.id);
  Call& call = calls.at(event.id);
  REQUIRE(!call.is_over && !call.withdrawn);
  call.is_over = true;
  call.outcome = event.kind;
  if (event.kind == Event::Kind::expired) REQUIRE(call.deadline <= world.now);
  if (!world.is_exact) return;
  if (event.kind == Event::Kind::error)
    REQUIRE(event.body == FAILED || event.body == REFUSAL || event.body == NO_MEMORY);
  if (event.kind != Event::Kind::response) return;
  Body body{};
  REQUIRE(event.body.size() >= sizeof body);
  std::memcpy(&body, event.body.data(), sizeof body);
  REQUIRE(body.key == call.body.key);
  REQUIRE(other().served.at(body.key) == 1);
  check_message(event, body, true);
}

void Peer::check_message(const Event& event, const Body& body, bool is_response) {
  REQUIRE(body.kind == (is_response ? 'r' : 'q') && body.peer == 1 - index);
  REQUIRE(event.body == body.text());
  const std::vector<uint64_t>& sizes = SIZES.at(body.sizes);
  REQUIRE(event.attachments.size() == sizes.size());
  for (size_t part = 0; part < sizes.size(); part++) {
    const Block& block = event.attachments[part];
    REQUIRE(block.size() == sizes[part]);
    REQUIRE(!block.size() || !std::memcmp(block.data(), content(body.key, part), block.size()));
  }
}

void Peer::check_state() const {
  Session::Statistics statistics = session.statistics();
  if (!session.is_attached()) REQUIRE(!session.has_output() && session.place().empty());
  uint64_t largest = settings.max_message_bytes + settings.max_body_bytes;
  REQUIRE(statistics.quota_bytes <= std::max(settings.max_quota_bytes, largest));
  REQUIRE(statistics.inbound_calls <= settings.max_inbound_calls);
  if (session.has_ended()) {
    REQUIRE(session.next_tick() == NEVER);
    REQUIRE(!statistics.calls && !statistics.inbound_calls && !statistics.quota_bytes && !statistics.bytes_in_window);
    return;
  }
  for (const auto& [handle, call] : calls)
    if (!call.is_over && !call.withdrawn) REQUIRE(session.next_tick() <= call.deadline);
}

World::World(Input& input, bool is_exact) : is_exact(is_exact) {
  uint8_t options = input.byte();
  Settings settings;
  settings.refusal = REFUSAL, settings.cancelled = CANCELLED, settings.no_memory = NO_MEMORY;
  settings.max_body_bytes = 100000;
  settings.max_message_bytes = 1 << 20;
  settings.max_inbound_calls = is_exact ? 1000 : 12;
  if (options & 1) settings.max_quota_bytes = 140000;
  if (options & 2) settings.max_window_bytes = 170000;
  settings.chunk_bytes = options & 4 ? 7000 : options & 8 ? 40000 : 256 * 1024;
  fuzz_largest_block = options & 16 ? 100000 : SIZE_MAX;
  settings.smallest_shared_bytes = 20000;
  has_shared_memory = options & 64;
  budget = std::make_shared<Budget>(options & 32 ? 150000 : uint64_t{1} << 40);
  for (uint8_t index = 0; index < 2; index++) {
    settings.seed = options + index;
    peers.push_back(std::make_unique<Peer>(*this, index, settings, budget));
  }
  connect();
}

World::~World() { finish(); }

// A new connection; what was under way is lost.
void World::connect() {
  for (auto& peer : peers) {
    peer->detach();
    REQUIRE(!peer->session.has_output());
    REQUIRE(!peer->session.take_output().size);
  }
  for (auto& peer : peers) peer->attach();
}

// One peer notices first, or both do; things may happen before the new connection.
void World::cut(Input& input) {
  uint8_t kind = input.byte();
  for (auto& peer : peers) {
    if (!(kind & (1 << peer->index))) continue;
    peer->detach();
  }
  if (kind & 4) connect();
}

void World::change_bytes(Input& input) {
  std::string& bytes = peers[input.below(2)]->under_way;
  size_t at = input.size();
  uint8_t kind = input.byte(), value = input.byte();
  if (at >= bytes.size()) return;
  is_exact = false;
  size_t size = std::min<size_t>(value, bytes.size() - at);
  switch (kind % 5) {
    case 0: bytes[at] = static_cast<char>(value); break;
    case 1: bytes[at] = static_cast<char>(bytes[at] ^ (1 << (value % 8))); break;
    case 2: bytes.erase(at, size); break;
    case 3: bytes.insert(at, bytes.substr(at, size)); break;
    case 4: {
      Bytes given = input.take(value % 64);
      bytes.insert(at, reinterpret_cast<const char*>(given.data()), given.size());
      break;
    }
  }
}

void World::step(Input& input) {
  uint8_t what = input.byte();
  Peer& peer = *peers[what & 1];
  switch ((what >> 1) % 16) {
    case 0: case 1: peer.call(input); break;
    case 2: peer.withdraw_one(input); break;
    case 3: case 4: peer.respond_to_one(input); break;
    case 5: peer.answer_a_check(input); break;
    case 6:
      now += 0.001 * static_cast<double>(input.size() % 4000);
      peer.tick();
      break;
    case 7: cut(input); break;
    case 8: peer.write(input.flag() ? 256 * 1024 : input.size()); break;
    case 9: case 10: peer.write(256 * 1024), peer.flush(); break;
    case 11: peer.flush(); break;
    case 12: case 13: {
      uint8_t how = input.byte();
      peer.read(how & 2 ? size_t{1} << 30 : input.size(), how & 1);
      break;
    }
    case 14:
      if (what & 32) change_bytes(input);
      else peer.do_something_odd(input);
      break;
    case 15: {
      uint8_t how = input.byte();
      if (how % 8 == 0) peer.session.close({.error = FAILED, .has_error = (how & 8) != 0, .leaving = (how & 16) != 0});
      else if (how % 8 == 1) peer.session.end();
      else for (auto& each : peers) each->write(1 << 20), each->flush(), each->read(1 << 30, how & 2);
      break;
    }
  }
  for (auto& each : peers) each->handle_events();
  check_state();
}

void World::check_state() const {
  uint64_t quotas = 0;
  for (auto& peer : peers) peer->check_state(), quotas += peer->session.statistics().quota_bytes;
  REQUIRE(budget->used() == quotas);
}

// No further calls and cuts: everything has to come to an end.
void World::settle() {
  fuzz_largest_block = SIZE_MAX;
  connect();
  for (int round = 0;; round++) {
    REQUIRE(round < 2000);
    bool is_busy = false;
    for (auto& peer : peers) {
      while (peer->session.has_output()) peer->write(256 * 1024), peer->flush(), is_busy = true;
    }
    for (auto& peer : peers) {
      peer->read(SIZE_MAX, round & 1);
      peer->handle_events();
      is_busy |= !peer->open_requests.empty() || !peer->checks.empty();
      for (auto& [id, request] : std::exchange(peer->open_requests, {})) {
        Body body{'r', 7, 0, peer->index, request.key};
        REQUIRE(peer->session.respond(id, body.text(), attachments_of(body.key, SIZES[body.sizes])) !=
                peer->cancelled.contains(id));
      }
      for (auto [check, _] : std::exchange(peer->checks, {})) peer->session.confirm(check);
    }
    check_state();
    if (is_busy) continue;
    Seconds next = std::min(peers[0]->session.next_tick(), peers[1]->session.next_tick());
    if (next == NEVER) break;
    now = std::max(now, next);
    for (auto& peer : peers) peer->tick(), peer->handle_events();
  }
  for (auto& peer : peers) {
    Session::Statistics statistics = peer->session.statistics();
    REQUIRE(!statistics.calls && !statistics.quota_bytes && !statistics.bytes_in_window);
    REQUIRE(statistics.inbound_calls < 32);  // what is not acknowledged yet
    REQUIRE(peer->session.all_delivered());
    for (auto& [handle, call] : peer->calls) {
      REQUIRE(call.is_over || call.withdrawn);
      REQUIRE(call.outcome != Event::Kind::response || peer->other().served[call.body.key] == 1);
    }
  }
}

void World::finish() {
  for (auto& peer : peers) {
    peer->session.end();
    peer->detach();
    Session::Statistics statistics = peer->session.statistics();
    REQUIRE(!statistics.calls && !statistics.inbound_calls && !statistics.kept_back);
    REQUIRE(!statistics.bytes_in_window && !statistics.quota_bytes);
    REQUIRE(!peer->session.has_output() && peer->session.next_tick() == NEVER);
    REQUIRE(peer->session.call(now, 1, "", {}, {}) == 0);
    peer->handle_events();
  }
  REQUIRE(!budget->used());
  REQUIRE(!live_attachments);
}

// Two sessions under everything at once.
void run_two(Input& input) {
  World world(input, true);
  for (int steps = 0; !input.empty() && steps < 500; steps++) world.step(input);
  if (world.is_exact && !world.peers[0]->session.has_ended() && !world.peers[1]->session.has_ended()) world.settle();
}

// One session with calls and requests, and the bytes of the input instead of a peer. Those come in pieces, and
// between these the application goes on.
void run_one(Input& input) {
  World world(input, false);
  Peer& peer = *world.peers[0];
  uint8_t options = input.byte();
  uint32_t random = input.byte();
  const uint8_t calls[] = {0, 0, 0, 3, 0, 0, 7, 32, 3, 9, 16, 0, 6, 0, 4};  // sizes, options, timeout
  for (size_t at = 0; at < std::size(calls); at += 3) {
    Input call(Bytes(calls).subspan(at, 3));
    peer.call(call);
  }
  if (options & 1) peer.session.take_output();
  if (options & 2) peer.session.take_output();
  std::string requests;
  for (uint64_t id = 1; id <= 4; id++) {
    const std::vector<uint64_t> sizes = id == 3 ? std::vector<uint64_t>{70000} : std::vector<uint64_t>{};
    write_request(requests, {.id = id, .method = 1, .body = "r", .attachments = sizes});
  }
  peer.receive({reinterpret_cast<const uint8_t*>(requests.data()), requests.size()}, false);
  peer.handle_events();
  peer.session.respond(2, "small", {}), peer.open_requests.erase(2);
  peer.session.respond(4, "large", attachments_of(1, {70000})), peer.open_requests.erase(4);
  if (options & 4) peer.session.take_output();
  while (!input.empty()) {
    random = random * 1664525 + 1013904223;
    uint32_t draw = random >> 8;
    size_t size = options & 8 ? size_t{1} << 30 : options & 16 ? draw % 4 + 1 : draw % 200 + 1;
    peer.receive(input.take(size), options & 32);
    peer.handle_events();
    if (options & 64) {
      uint8_t bytes[] = {static_cast<uint8_t>(draw >> 4), static_cast<uint8_t>(draw >> 9)};
      Input choice(bytes);
      switch (draw % 16) {
        case 0: peer.session.take_output(); break;
        case 1: peer.withdraw_one(choice); break;
        case 2: peer.respond_to_one(choice); break;
        case 3: peer.answer_a_check(choice); break;
        case 4: world.now += 0.4, peer.tick(); break;
        case 5: if (options & 128) peer.detach(), peer.attach(); break;
      }
      peer.handle_events();
    }
    world.check_state();
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Input input({data, size});
  if (input.flag()) run_two(input);
  else run_one(input);
  return 0;
}
