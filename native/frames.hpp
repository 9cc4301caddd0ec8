// The frames of protos/gradwire/proto/v1/link.proto, written and read by hand.
//
// A stream between two peers is a sequence of frames, each as an Envelope with one Frame. Concatenated
// Envelopes are an Envelope, so several frames may leave in one write, and every write is a valid message for
// the generated code of any language. What is written here equals what that code writes, byte for byte; what is
// read here may be anything that the protobuf encoding allows.

#pragma once

#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace gradwire {

using Bytes = std::span<const uint8_t>;

// A peer broke the protocol.
struct ProtocolError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Request {
  uint64_t id = 0;
  uint32_t method = 0;
  std::string_view body;
  double timeout = 0;  // seconds; 0: no limit
  std::vector<uint64_t> attachments;  // their sizes
};

struct Response {
  uint64_t id = 0;
  bool failed = false;
  std::string_view body;  // the response message, or, if it failed, the Error
  std::vector<uint64_t> attachments;
};

// The next bytes of a message's attachments, which are sent one after another without gaps.
struct Chunk {
  uint64_t message = 0;  // the id of the request
  bool of_response = false;
  std::string_view data;
};

// A new segment of shared memory, whose descriptor comes with this frame.
struct NewSegment {
  uint64_t id = 0;
  uint64_t size = 0;
};

// The next attachment of a message lies at the begin of a segment.
struct Placed {
  uint64_t message = 0;
  bool of_response = false;
  uint64_t segment = 0;
  uint64_t size = 0;
};

// The receiver no longer uses these segments.
struct Returned {
  std::vector<uint64_t> segments;
};

// The sender has freed these segments.
struct Freed {
  std::vector<uint64_t> segments;
};

struct Cancel {
  uint64_t id = 0;
};

struct Acknowledge {
  std::vector<uint64_t> ids;
};

struct Goodbye {
  std::string_view error;  // an Error
  bool has_error = false;
  bool leaving = false;
};

using Frame =
    std::variant<Request, Response, Chunk, Cancel, Acknowledge, Goodbye, NewSegment, Placed, Returned, Freed>;

// What a session has to know of an Error.
struct Refusal {
  bool not_started = false;
  double retry_after = 0;  // seconds
};

// -- writing: each appends one Envelope

void write_request(std::string& out, const Request& request);
void write_response(std::string& out, const Response& response);
// Everything of a chunk but its data, which has to follow.
void write_chunk_head(std::string& out, uint64_t message, bool of_response, size_t data_size);
void write_cancel(std::string& out, uint64_t id);
void write_acknowledge(std::string& out, std::span<const uint64_t> ids);
void write_goodbye(std::string& out, const Goodbye& goodbye);
void write_new_segment(std::string& out, const NewSegment& segment);
void write_placed(std::string& out, const Placed& placed);
void write_returned(std::string& out, std::span<const uint64_t> segments);
void write_freed(std::string& out, std::span<const uint64_t> segments);

// -- reading

// Where the first frame of a stream lies in what has arrived of it.
struct FrameBounds {
  bool known = false;  // false: too little has arrived
  size_t begin = 0;
  size_t size = 0;
};
FrameBounds find_frame(Bytes arrived);

// The head of a chunk that is written as `write_chunk_head` does, so that its data can be read into place before
// all of it has arrived.
struct ChunkHead {
  enum class State { no, incomplete, yes } state = State::no;
  uint64_t message = 0;
  bool of_response = false;
  size_t data_begin = 0;  // from the begin of the frame
  size_t data_size = 0;
};
ChunkHead find_chunk_head(Bytes frame_so_far, size_t frame_size);

// Views in the result refer to `frame`.
Frame read_frame(Bytes frame);
Refusal read_refusal(std::string_view error);

}  // namespace gradwire
