// The state machine of a link between two peers: bytes and calls in, bytes and events out.
//
// It does no I/O, never blocks, starts no thread, asks no clock and knows nothing of Python. Whoever drives it
// moves its bytes, tells it the time and takes its events. It is not thread-safe: its driver holds a lock.
//
// What it guarantees, however often the connection is cut:
// - a request that its requester has not given up is served once, and its response arrives once;
// - messages from a peer are complete or not there; nobody sees a part of an attachment;
// - small messages wait for one chunk of another one's attachments at most (bodies are not cut into chunks), or, where
//   the driver asks for more at once and none came for a while, for as many.
//
// How:
// - Both peers number their requests from 1, and requests are sent in the order of their numbers. So a request
//   with a number that is not above all before it is a repetition, and served only if it had not arrived.
// - Every request gets one response, cancelled ones included. The requester keeps the request until the response
//   is there, the responder keeps the response until it is acknowledged, and both are sent again over a new
//   connection.
// - A message goes out as one frame, which announces the sizes of its attachments, followed by chunks with their
//   bytes. Chunks of several messages alternate, and other frames go between them.

#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <queue>
#include <string>
#include <unordered_map>
#include <vector>

#include "frames.hpp"
#include "memory.hpp"
#include "shared_memory.hpp"

namespace gradwire {

using Seconds = double;  // of a monotonic clock, or a duration
constexpr Seconds NEVER = 1e300;

// A call that this peer made. Unlike the id of its request it stays the same if the request is sent again because
// the peer was too busy for it.
using CallHandle = uint64_t;

// More attachments than this are refused: their sizes take little of a frame, but memory where they arrive.
constexpr size_t MOST_ATTACHMENTS = 1 << 16;

struct Settings {
  uint64_t max_body_bytes = 64 << 20;              // of a message that arrives, without attachments
  uint64_t max_message_bytes = uint64_t{1} << 40;  // of a message that arrives
  uint64_t max_quota_bytes = uint64_t{4} << 30;    // of large requests that arrive, or wait to be served
  uint64_t max_window_bytes = uint64_t{4} << 30;   // of large requests of this peer without a response
  uint64_t max_inbound_calls = 100'000;            // without an acknowledgement
  size_t chunk_bytes = 256 * 1024;                 // of attachments between other frames
  size_t smallest_shared_bytes = 128 * 1024;       // of attachments that go through shared memory, if there is any
  Seconds patience = 120;                          // how long a refused request without a deadline is sent again
  uint64_t seed = 0;                               // of the pauses before a refused request is sent again
  std::string refusal;    // the Error for requests that exceed the quota
  std::string cancelled;  // the Error for requests that were cancelled
  std::string no_memory;  // the Error for requests for whose attachments there is no memory
};

// What all sessions of a process may use together for large requests that arrive, or wait to be served. Several
// threads may use it at once.
class Budget {
 public:
  explicit Budget(uint64_t max_bytes = uint64_t{1} << 62) : max_bytes_(max_bytes) {}
  // Returns whether the bytes of a request fit. A request that is larger than the whole budget fits if nothing
  // else is there.
  bool take(uint64_t size);
  void give_back(uint64_t size);
  uint64_t used() const;

 private:
  mutable std::mutex mutex_;
  const uint64_t max_bytes_;
  uint64_t used_ = 0;
};

// Something of the application's that belongs to a call or response. The session only keeps it and hands it back.
using Cookie = std::shared_ptr<const void>;

struct Event {
  enum class Kind {
    request,    // a request is to be served; id: of the request
    response,   // of a call; id: its handle
    error,      // the call failed; body: the Error
    expired,    // the call's time is over
    no_memory,  // there is no memory for the attachments of the call's response
    unreachable,  // the call would have had to wait for a connection
    discarded,  // the response to a call that was cancelled, or had expired; its attachments are left out
    cancelled,     // the requester no longer wants the response; id: of the request
    acknowledged,  // the requester has the response, or does not want it; id: of the request
    check,      // all of an outbound message but its last bytes has been sent; id: for `confirm` or `reject`
    goodbye,    // the peer ended the session, and `end` is to follow; body: the Error if there was one
    // Only of a Link with a connection.
    timer,         // `next_tick` is earlier than it was
    disconnected,  // the socket was closed; id: its number; body: why
    broken,        // the peer broke the protocol, and `close` is to follow; id: the number of the socket, if there is one; body: how
  } kind;
  uint64_t id = 0;
  uint32_t method = 0;
  Seconds deadline = NEVER;
  // request: whether it has been cancelled meanwhile (set by Link); check: whether the message is a response; goodbye:
  // whether the peer leaves for good; disconnected: whether this process had no descriptor left for shared memory
  bool flag = false;
  std::string body;
  std::vector<Block> attachments;
  Cookie cookie;  // of the call, or, with check, of the response
};

// Bytes to write, in pieces, and what keeps them alive until they are written.
struct Output {
  struct Piece {
    const uint8_t* data;
    size_t size;
    Segment* announced = nullptr;  // its descriptor goes with the first byte of the piece
  };
  // Into shared memory, before anything is written.
  struct Copy {
    uint8_t* to;
    const uint8_t* from;
    size_t size;
  };
  std::vector<Piece> pieces;
  std::vector<Copy> copies;
  std::vector<std::shared_ptr<const void>> owners;
  size_t size = 0;
};

class Session {
 public:
  explicit Session(Settings settings, std::shared_ptr<Budget> budget = std::make_shared<Budget>());
  ~Session();
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  // -- calls of this peer

  struct CallOptions {
    Seconds timeout = NEVER;
    bool waits_for_connection = true;  // if there is none when the request is to be sent
    bool nested = false;   // made while a request is served: the window never holds it back
    bool checked = false;  // its attachments are checked before their last bytes are sent: see `confirm`
    Cookie cookie;
  };
  CallHandle call(Seconds now, uint32_t method, std::string_view body, std::vector<Attachment> attachments,
                  CallOptions options);
  // The response is no longer wanted. Returns whether it was awaited.
  bool withdraw(Seconds now, CallHandle handle);
  // How many bytes of large requests the other peer accepts before it responds; 0: any number.
  void limit_window(Seconds now, uint64_t bytes);

  // -- requests of the other peer

  // Whether the requester no longer wants the response to a request that has none.
  bool is_cancelled(uint64_t request) const;
  // The request is served now: it no longer counts as waiting.
  void begin(uint64_t request);
  // Returns whether the requester gets it: not if the call was cancelled, or has a response.
  bool respond(uint64_t request, std::string_view body, std::vector<Attachment> attachments, bool checked = false,
               Cookie cookie = nullptr);
  bool fail(uint64_t request, std::string_view error);

  // The answers to `check`. Either the attachments have not been modified since the message was made, so its last
  // bytes, of which the session has a copy, may go. Or they have, and the message is never completed: the requester of
  // a response gets the error instead, and a request is withdrawn.
  void confirm(uint64_t check);
  void reject(Seconds now, uint64_t check, std::string_view error);

  // -- the connection

  // A new connection: all that the other peer may not have got is sent again. Large attachments go through shared
  // memory, if that is given.
  void attach(Seconds now, std::shared_ptr<SharedMemory> shared = nullptr);
  // The connection was cut.
  void detach();
  bool is_attached() const { return attached_; }

  bool has_output() const;
  // The bytes to write next: small frames up to about `small_bytes`, and one chunk; more chunks up to about `bulk_bytes`
  // if no small frame has come between chunks for a while. This is where `check` happens.
  Output take_output(size_t small_bytes = 256 * 1024, size_t bulk_bytes = 0);

  // Takes bytes that were read; without a connection, they are of an earlier one and ignored. Throws ProtocolError,
  // after which the session is to be closed.
  void receive(Seconds now, Bytes bytes);
  // Where the bytes to be read next belong, if they are those of a large attachment; they may be read into this
  // place instead of being passed to `receive`, and `received_in_place` must follow. The place is void after any other
  // call, which may free it.
  std::span<uint8_t> place() const;
  void received_in_place(Seconds now, size_t size);

  // -- time

  // When `tick` has something to do; NEVER if nothing.
  Seconds next_tick() const;
  void tick(Seconds now);

  // -- the end

  // Ends the session, and tells the other peer.
  void close(const Goodbye& goodbye);
  // Ends the session. All calls are forgotten: see `open_calls`.
  void end();
  // Whether there is no outcome yet, and the call was not withdrawn.
  bool is_open(CallHandle handle) const;
  // The cookies of the calls whose response is awaited.
  std::vector<Cookie> open_calls() const;
  bool has_ended() const { return ended_; }
  bool heard_goodbye() const { return heard_goodbye_; }

  bool has_events() const { return !events_.empty(); }
  std::vector<Event> take_events();

  struct Statistics {
    uint64_t sent_bytes = 0, received_bytes = 0;
    uint64_t calls = 0, inbound_calls = 0, kept_back = 0;
    uint64_t repeated_requests = 0, repeated_responses = 0, retries = 0;
    uint64_t bytes_in_window = 0, quota_bytes = 0;
    uint64_t arrived_bytes = 0;  // of messages that are not complete
  };
  Statistics statistics() const;
  // Whether every response with attachments has been acknowledged.
  bool all_delivered() const;

 private:
  struct Content;
  struct Packet;
  struct Transfer;
  struct Arriving;
  struct OutboundCall;
  struct InboundCall;
  struct Timer {
    Seconds when;
    CallHandle handle;
    bool operator>(const Timer& other) const { return when > other.when; }
  };
  // Identifies a message: (whether it is a response, the id of the request).
  using Key = std::pair<bool, uint64_t>;

  // calls of this peer
  void start(Seconds now, OutboundCall& call);
  bool enters_window(OutboundCall& call);
  void leave_window(Seconds now, OutboundCall& call);
  void admit_waiting(Seconds now);
  void put_request(Seconds now, OutboundCall& call);
  bool retry_later(Seconds now, OutboundCall& call, std::string_view error);
  void add_timer(Seconds when, CallHandle handle);
  void withdraw(Seconds now, OutboundCall& call);
  void finish(Seconds now, OutboundCall& call);
  void report(Seconds now, OutboundCall& call, Event::Kind kind, std::string_view body);
  OutboundCall* call_by_id(uint64_t id) const;

  // requests of the other peer
  InboundCall* inbound(uint64_t id) const;
  InboundCall& new_inbound(uint64_t id);
  void set_response(InboundCall& call, std::shared_ptr<Content> content);
  void set_error(InboundCall& call, std::string_view error);
  void put_response(InboundCall& call);
  bool take_quota(InboundCall& call, uint64_t size);
  void give_back_quota(InboundCall& call);

  // output
  void put(std::string bytes);
  std::shared_ptr<Packet> put_message(Key key, const std::shared_ptr<Content>& content, std::string frame);
  void stop_sending(Key key, const Content* content, const std::shared_ptr<Packet>& packet);
  void add_packet(Output& output, std::shared_ptr<Packet> packet);
  void add_frames(Output& output, std::string bytes);
  void add_attachments(Output& output);
  void add_chunk(Output& output, Transfer transfer);
  void add_copy(Output& output, Transfer transfer);
  bool goes_through_segment(const Attachment& attachment) const;
  void check(Transfer transfer, std::string last_frame);
  void add_news_of_segments(Output& output);

  // input
  size_t read(Seconds now, Bytes bytes);
  size_t missing_bytes() const;
  void on(Seconds now, const Request& request);
  void on(Seconds now, const Response& response);
  void on(Seconds now, const Chunk& chunk);
  void on(Seconds now, const Cancel& cancel);
  void on(Seconds now, const Acknowledge& acknowledge);
  void on(Seconds now, const Goodbye& goodbye);
  void on(Seconds now, const NewSegment& segment);
  void on(Seconds now, const Placed& placed);
  void on(Seconds now, const Returned& returned);
  void on(Seconds now, const Freed& freed);
  SharedMemory& shared() const;
  uint64_t check_size(std::string_view body, const std::vector<uint64_t>& attachments) const;
  Arriving* arriving(Key key) const;
  void begin_chunk(Seconds now, Key key, uint64_t size);
  void take_chunk_bytes(Seconds now, Bytes bytes);
  void advance_chunk(Seconds now, size_t size);
  bool took_bytes(Seconds now, Key key, Arriving& message, uint64_t size);
  void prepare_block(Seconds now);
  void give_up(Seconds now, Key key);
  void request_arrived(InboundCall& call);
  void response_arrived(Seconds now, OutboundCall& call);
  void acknowledge(uint64_t id, bool is_large);

  Event& emit(Event::Kind kind, uint64_t id);
  Event& emit(Event::Kind kind, const OutboundCall& call);
  double random();

  Settings settings_;
  std::shared_ptr<Budget> budget_;
  bool attached_ = false, ended_ = false;
  std::shared_ptr<SharedMemory> shared_;
  bool heard_goodbye_ = false;
  std::vector<Event> events_;
  uint64_t random_state_;

  // Calls of this peer. Those without an id wait: in the window, or before they are sent again.
  std::unordered_map<CallHandle, std::unique_ptr<OutboundCall>> calls_;
  std::unordered_map<uint64_t, OutboundCall*> calls_by_id_;
  CallHandle last_handle_ = 0;
  uint64_t last_id_ = 0;
  std::deque<CallHandle> kept_back_;
  size_t calls_in_window_ = 0;
  uint64_t bytes_in_window_ = 0;
  // Of deadlines and pauses. Those of calls that are over are skipped.
  std::priority_queue<Timer, std::vector<Timer>, std::greater<Timer>> timers_;

  // Requests of the other peer without an acknowledged response.
  // Ordered, since the other peer chooses the ids: it could choose ids that collide in a hash table.
  std::map<uint64_t, std::unique_ptr<InboundCall>> inbound_;
  uint64_t highest_request_ = 0;
  uint64_t quota_used_ = 0;
  std::vector<uint64_t> to_acknowledge_;
  bool acknowledge_now_ = false;

  // Output: frames, and messages of which attachments are being sent.
  std::deque<std::shared_ptr<Packet>> waiting_;
  int busy_outputs_ = 0;  // for so many, small frames are expected between chunks
  std::list<Transfer> transfers_;  // a list, unlike a deque, may be of a type that is not complete here
  struct Unconfirmed {
    Key key;
    std::string last_frame;
    SharedMemory::Lease lease;  // of the segment that the frame announces
  };
  std::map<uint64_t, Unconfirmed> unconfirmed_;  // messages that are being checked
  uint64_t last_check_ = 0;

  // Input: a frame of which a part has arrived, or the rest of a chunk.
  std::string partial_;
  uint64_t chunk_left_ = 0;
  Key chunk_of_{};

  Statistics statistics_;
};

}  // namespace gradwire
