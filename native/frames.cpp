#include "frames.hpp"

#include <bit>
#include <cstring>

namespace gradwire {
namespace {

// Wire types of protobuf; a tag is field number << 3 | wire type.
enum WireType : uint32_t { VARINT = 0, FIXED64 = 1, BYTES = 2, FIXED32 = 5 };

constexpr uint32_t tag(uint32_t field, WireType type) { return field << 3 | type; }

// Numbers of the fields in link.proto.
constexpr uint32_t ENVELOPE_FRAMES = 1;
enum FrameField : uint32_t {
  FRAME_REQUEST = 3,
  FRAME_RESPONSE = 4,
  FRAME_CANCEL = 6,
  FRAME_ACKNOWLEDGE = 7,
  FRAME_GOODBYE = 8,
  FRAME_SEGMENT = 9,
  FRAME_PLACED = 10,
  FRAME_RETURNED = 11,
  FRAME_FREED = 12,
  FRAME_CHUNK = 13,
};
enum RequestField : uint32_t { REQUEST_ID = 1, REQUEST_METHOD = 2, REQUEST_BODY = 3, REQUEST_TIMEOUT = 5, REQUEST_ATTACHMENTS = 6 };
enum ResponseField : uint32_t { RESPONSE_ID = 1, RESPONSE_BODY = 2, RESPONSE_ERROR = 3, RESPONSE_ATTACHMENTS = 5 };
enum ChunkField : uint32_t { CHUNK_MESSAGE = 1, CHUNK_OF_RESPONSE = 2, CHUNK_DATA = 3 };
constexpr uint32_t CANCEL_ID = 1;
constexpr uint32_t ACKNOWLEDGE_IDS = 1;
enum SegmentField : uint32_t { SEGMENT_ID = 1, SEGMENT_SIZE = 2 };
enum PlacedField : uint32_t { PLACED_SEGMENT = 2, PLACED_SIZE = 3, PLACED_MESSAGE = 4, PLACED_OF_RESPONSE = 5 };
constexpr uint32_t SEGMENT_IDS = 1;  // of Returned and Freed
enum GoodbyeField : uint32_t { GOODBYE_ERROR = 1, GOODBYE_LEAVING = 2 };
enum ErrorField : uint32_t { ERROR_RETRY_AFTER = 7, ERROR_NOT_STARTED = 8 };

static_assert(std::endian::native == std::endian::little, "numbers are copied as protobuf stores them");

// -- writing

size_t varint_size(uint64_t number) { return (std::bit_width(number | 1) + 6) / 7; }

// How many bytes a field takes: its tag, and what follows. All fields here have one-byte tags.
size_t number_size(uint64_t number) { return number ? 1 + varint_size(number) : 0; }
size_t bytes_size(size_t size) { return 1 + varint_size(size) + size; }

size_t packed_size(std::span<const uint64_t> numbers) {
  size_t size = 0;
  for (uint64_t number : numbers) size += varint_size(number);
  return size;
}

void put_varint(std::string& out, uint64_t number) {
  while (number > 0x7F) {
    out.push_back(static_cast<char>(number | 0x80));
    number >>= 7;
  }
  out.push_back(static_cast<char>(number));
}

void put_length(std::string& out, uint32_t field, size_t size) {
  put_varint(out, tag(field, BYTES));
  put_varint(out, size);
}

void put_bytes(std::string& out, uint32_t field, std::string_view bytes) {
  put_length(out, field, bytes.size());
  out.append(bytes);
}

// Fields that are zero are not written.
void put_number(std::string& out, uint32_t field, uint64_t number) {
  if (!number) return;
  put_varint(out, tag(field, VARINT));
  put_varint(out, number);
}

void put_real(std::string& out, uint32_t field, double number) {
  if (number == 0) return;
  put_varint(out, tag(field, FIXED64));
  out.append(reinterpret_cast<const char*>(&number), sizeof number);
}

void put_packed(std::string& out, uint32_t field, std::span<const uint64_t> numbers, size_t size) {
  if (numbers.empty()) return;
  put_length(out, field, size);
  for (uint64_t number : numbers) put_varint(out, number);
}

// The Envelope and the Frame around a message of `size` bytes.
void put_frame(std::string& out, FrameField kind, size_t size) {
  put_length(out, ENVELOPE_FRAMES, bytes_size(size));
  put_length(out, kind, size);
}

// -- reading

[[noreturn]] void malformed(const char* what) { throw ProtocolError(std::string("a malformed frame: ") + what); }

std::string_view text(Bytes bytes) { return {reinterpret_cast<const char*>(bytes.data()), bytes.size()}; }
Bytes bytes_of(std::string_view text) { return {reinterpret_cast<const uint8_t*>(text.data()), text.size()}; }

// The longest varint: 64 bits, 7 a byte.
constexpr size_t LONGEST_VARINT = 10;

// In one field. A number takes one byte of the frame at least, but eight in memory.
constexpr size_t MOST_NUMBERS = 16 << 20;

// Reads a varint; returns how many bytes it took, 0 if `bytes` ends within it.
size_t take_varint(Bytes bytes, uint64_t& number) {
  number = 0;
  for (size_t i = 0; i < bytes.size(); i++) {
    if (i == LONGEST_VARINT) malformed("a number of more than 10 bytes");
    number |= static_cast<uint64_t>(bytes[i] & 0x7F) << (7 * i);
    if (bytes[i] < 0x80) return i + 1;
  }
  if (bytes.size() >= LONGEST_VARINT) malformed("a number of more than 10 bytes");
  return 0;
}

// Iterates over the fields of a complete message.
class Fields {
 public:
  explicit Fields(Bytes message) : rest_(message) {}

  bool next() {
    if (rest_.empty()) return false;
    uint64_t key = varint();
    field = key >> 3;
    type = static_cast<WireType>(key & 7);
    if (field == 0 || key > UINT32_MAX) malformed("a field without a number");
    switch (type) {
      case VARINT: number = varint(); break;
      case FIXED64: bytes = take(8); break;
      case FIXED32: bytes = take(4); break;
      case BYTES: bytes = take(varint()); break;
      default: malformed("a field of an unknown type");
    }
    return true;
  }

  // Fields of other numbers are of later versions, and skipped. One of a known number must have its type.
  bool is(uint32_t wanted, WireType wanted_type) const {
    if (field != wanted) return false;
    if (type != wanted_type) malformed("a field of another type than it has");
    return true;
  }

  double real() const {
    double value;
    std::memcpy(&value, bytes.data(), sizeof value);
    return value;
  }

  // A repeated number: packed, or one by one.
  bool is_numbers(uint32_t wanted, std::vector<uint64_t>& numbers) const {
    if (field != wanted) return false;
    if (numbers.size() + (type == BYTES ? bytes.size() : 0) >= MOST_NUMBERS) malformed("too many numbers");
    if (type == VARINT) {
      numbers.push_back(number);
    } else if (type == BYTES) {
      for (Bytes rest = bytes; !rest.empty();) {
        uint64_t value;
        size_t used = take_varint(rest, value);
        if (!used) malformed("it ends within a number");
        numbers.push_back(value);
        rest = rest.subspan(used);
      }
    } else {
      malformed("a field of another type than it has");
    }
    return true;
  }

  uint32_t field = 0;
  WireType type = VARINT;
  uint64_t number = 0;
  Bytes bytes;

 private:
  uint64_t varint() {
    uint64_t value;
    size_t used = take_varint(rest_, value);
    if (!used) malformed("it ends within a number");
    rest_ = rest_.subspan(used);
    return value;
  }

  Bytes take(uint64_t size) {
    if (size > rest_.size()) malformed("a field is longer than its message");
    Bytes taken = rest_.first(size);
    rest_ = rest_.subspan(size);
    return taken;
  }

  Bytes rest_;
};

Request read_request(Bytes message) {
  Request request;
  for (Fields f(message); f.next();) {
    if (f.is(REQUEST_ID, VARINT)) request.id = f.number;
    else if (f.is(REQUEST_METHOD, VARINT)) request.method = static_cast<uint32_t>(f.number);
    else if (f.is(REQUEST_BODY, BYTES)) request.body = text(f.bytes);
    else if (f.is(REQUEST_TIMEOUT, FIXED64)) request.timeout = f.real();
    else f.is_numbers(REQUEST_ATTACHMENTS, request.attachments);
  }
  return request;
}

Response read_response(Bytes message) {
  Response response;
  bool has_outcome = false;
  for (Fields f(message); f.next();) {
    if (f.is(RESPONSE_ID, VARINT)) {
      response.id = f.number;
    } else if (f.is(RESPONSE_BODY, BYTES) || f.is(RESPONSE_ERROR, BYTES)) {
      response.body = text(f.bytes);
      response.failed = f.field == RESPONSE_ERROR;
      has_outcome = true;
    } else {
      f.is_numbers(RESPONSE_ATTACHMENTS, response.attachments);
    }
  }
  if (!has_outcome) malformed("a response without an outcome");
  return response;
}

Chunk read_chunk(Bytes message) {
  Chunk chunk;
  for (Fields f(message); f.next();) {
    if (f.is(CHUNK_MESSAGE, VARINT)) chunk.message = f.number;
    else if (f.is(CHUNK_OF_RESPONSE, VARINT)) chunk.of_response = f.number != 0;
    else if (f.is(CHUNK_DATA, BYTES)) chunk.data = text(f.bytes);
  }
  return chunk;
}

Cancel read_cancel(Bytes message) {
  Cancel cancel;
  for (Fields f(message); f.next();)
    if (f.is(CANCEL_ID, VARINT)) cancel.id = f.number;
  return cancel;
}

Goodbye read_goodbye(Bytes message) {
  Goodbye goodbye;
  for (Fields f(message); f.next();) {
    if (f.is(GOODBYE_ERROR, BYTES)) goodbye.error = text(f.bytes), goodbye.has_error = true;
    else if (f.is(GOODBYE_LEAVING, VARINT)) goodbye.leaving = f.number != 0;
  }
  return goodbye;
}

NewSegment read_new_segment(Bytes message) {
  NewSegment segment;
  for (Fields f(message); f.next();) {
    if (f.is(SEGMENT_ID, VARINT)) segment.id = f.number;
    else if (f.is(SEGMENT_SIZE, VARINT)) segment.size = f.number;
  }
  return segment;
}

Placed read_placed(Bytes message) {
  Placed placed;
  for (Fields f(message); f.next();) {
    if (f.is(PLACED_SEGMENT, VARINT)) placed.segment = f.number;
    else if (f.is(PLACED_SIZE, VARINT)) placed.size = f.number;
    else if (f.is(PLACED_MESSAGE, VARINT)) placed.message = f.number;
    else if (f.is(PLACED_OF_RESPONSE, VARINT)) placed.of_response = f.number != 0;
  }
  return placed;
}

std::vector<uint64_t> read_ids(Bytes message, uint32_t field) {
  std::vector<uint64_t> ids;
  for (Fields f(message); f.next();) f.is_numbers(field, ids);
  return ids;
}

// Reads, at the begin of `bytes`, a tag and a length. Returns how many bytes they took, 0 if too few are there.
size_t take_length(Bytes bytes, uint32_t field, uint64_t& length) {
  if (bytes.empty()) return 0;
  if (bytes[0] != tag(field, BYTES)) malformed("an Envelope holds something that is no Frame");
  size_t used = take_varint(bytes.subspan(1), length);
  return used ? 1 + used : 0;
}

}  // namespace

void write_request(std::string& out, const Request& request) {
  size_t sizes = packed_size(request.attachments);
  size_t size = number_size(request.id) + number_size(request.method);
  if (!request.body.empty()) size += bytes_size(request.body.size());
  if (request.timeout != 0) size += 1 + sizeof(double);
  if (sizes) size += bytes_size(sizes);
  put_frame(out, FRAME_REQUEST, size);
  put_number(out, REQUEST_ID, request.id);
  put_number(out, REQUEST_METHOD, request.method);
  if (!request.body.empty()) put_bytes(out, REQUEST_BODY, request.body);
  put_real(out, REQUEST_TIMEOUT, request.timeout);
  put_packed(out, REQUEST_ATTACHMENTS, request.attachments, sizes);
}

void write_response(std::string& out, const Response& response) {
  size_t sizes = packed_size(response.attachments);
  size_t size = number_size(response.id) + bytes_size(response.body.size());
  if (sizes) size += bytes_size(sizes);
  put_frame(out, FRAME_RESPONSE, size);
  put_number(out, RESPONSE_ID, response.id);
  put_bytes(out, response.failed ? RESPONSE_ERROR : RESPONSE_BODY, response.body);
  put_packed(out, RESPONSE_ATTACHMENTS, response.attachments, sizes);
}

void write_chunk_head(std::string& out, uint64_t message, bool of_response, size_t data_size) {
  size_t size = number_size(message) + number_size(of_response);
  if (data_size) size += bytes_size(data_size);
  put_frame(out, FRAME_CHUNK, size);
  put_number(out, CHUNK_MESSAGE, message);
  put_number(out, CHUNK_OF_RESPONSE, of_response);
  if (data_size) put_length(out, CHUNK_DATA, data_size);
}

void write_cancel(std::string& out, uint64_t id) {
  put_frame(out, FRAME_CANCEL, number_size(id));
  put_number(out, CANCEL_ID, id);
}

namespace {

void write_ids(std::string& out, FrameField kind, uint32_t field, std::span<const uint64_t> ids) {
  size_t size = packed_size(ids);
  put_frame(out, kind, size ? bytes_size(size) : 0);
  put_packed(out, field, ids, size);
}

}  // namespace

void write_acknowledge(std::string& out, std::span<const uint64_t> ids) {
  write_ids(out, FRAME_ACKNOWLEDGE, ACKNOWLEDGE_IDS, ids);
}

void write_returned(std::string& out, std::span<const uint64_t> segments) {
  write_ids(out, FRAME_RETURNED, SEGMENT_IDS, segments);
}

void write_freed(std::string& out, std::span<const uint64_t> segments) {
  write_ids(out, FRAME_FREED, SEGMENT_IDS, segments);
}

void write_new_segment(std::string& out, const NewSegment& segment) {
  put_frame(out, FRAME_SEGMENT, number_size(segment.id) + number_size(segment.size));
  put_number(out, SEGMENT_ID, segment.id);
  put_number(out, SEGMENT_SIZE, segment.size);
}

void write_placed(std::string& out, const Placed& placed) {
  put_frame(out, FRAME_PLACED,
            number_size(placed.segment) + number_size(placed.size) + number_size(placed.message) +
                number_size(placed.of_response));
  put_number(out, PLACED_SEGMENT, placed.segment);
  put_number(out, PLACED_SIZE, placed.size);
  put_number(out, PLACED_MESSAGE, placed.message);
  put_number(out, PLACED_OF_RESPONSE, placed.of_response);
}

void write_goodbye(std::string& out, const Goodbye& goodbye) {
  put_frame(out, FRAME_GOODBYE,
            (goodbye.has_error ? bytes_size(goodbye.error.size()) : 0) + number_size(goodbye.leaving));
  if (goodbye.has_error) put_bytes(out, GOODBYE_ERROR, goodbye.error);
  put_number(out, GOODBYE_LEAVING, goodbye.leaving);
}

FrameBounds find_frame(Bytes arrived) {
  uint64_t size;
  size_t begin = take_length(arrived, ENVELOPE_FRAMES, size);
  if (!begin) return {};
  return {.known = true, .begin = begin, .size = size};
}

ChunkHead find_chunk_head(Bytes frame_so_far, size_t frame_size) {
  ChunkHead head;
  Bytes rest = frame_so_far;
  auto incomplete = [&] {
    // A head that is not complete although the frame is: some other message.
    head.state = frame_so_far.size() < frame_size ? ChunkHead::State::incomplete : ChunkHead::State::no;
    return head;
  };
  auto take_number = [&](uint64_t& number) {
    size_t used = take_varint(rest.subspan(1), number);
    if (used) rest = rest.subspan(1 + used);
    return used != 0;
  };
  auto position = [&] { return frame_so_far.size() - rest.size(); };

  uint64_t number;
  if (rest.empty()) return incomplete();
  if (rest[0] != tag(FRAME_CHUNK, BYTES)) return head;
  if (!take_number(number)) return incomplete();
  if (number != frame_size - position()) return head;
  if (rest.empty()) return incomplete();
  if (rest[0] == tag(CHUNK_MESSAGE, VARINT)) {
    if (!take_number(head.message) || rest.empty()) return incomplete();
  }
  if (rest[0] == tag(CHUNK_OF_RESPONSE, VARINT)) {
    if (!take_number(number) || rest.empty()) return incomplete();
    head.of_response = number != 0;
  }
  if (rest[0] != tag(CHUNK_DATA, BYTES)) return head;
  if (!take_number(number)) return incomplete();
  if (number != frame_size - position()) return head;
  head.state = ChunkHead::State::yes;
  head.data_begin = position();
  head.data_size = number;
  return head;
}

Frame read_frame(Bytes frame) {
  Frame found;
  bool has_kind = false;
  for (Fields f(frame); f.next();) {
    bool is_known = true;
    if (f.is(FRAME_REQUEST, BYTES)) found = read_request(f.bytes);
    else if (f.is(FRAME_RESPONSE, BYTES)) found = read_response(f.bytes);
    else if (f.is(FRAME_CHUNK, BYTES)) found = read_chunk(f.bytes);
    else if (f.is(FRAME_CANCEL, BYTES)) found = read_cancel(f.bytes);
    else if (f.is(FRAME_ACKNOWLEDGE, BYTES)) found = Acknowledge{read_ids(f.bytes, ACKNOWLEDGE_IDS)};
    else if (f.is(FRAME_GOODBYE, BYTES)) found = read_goodbye(f.bytes);
    else if (f.is(FRAME_SEGMENT, BYTES)) found = read_new_segment(f.bytes);
    else if (f.is(FRAME_PLACED, BYTES)) found = read_placed(f.bytes);
    else if (f.is(FRAME_RETURNED, BYTES)) found = Returned{read_ids(f.bytes, SEGMENT_IDS)};
    else if (f.is(FRAME_FREED, BYTES)) found = Freed{read_ids(f.bytes, SEGMENT_IDS)};
    else is_known = false;
    if (is_known && has_kind) malformed("two frames in one");
    has_kind |= is_known;
  }
  if (!has_kind) malformed("of an unknown kind");
  return found;
}

Refusal read_refusal(std::string_view error) {
  Refusal refusal;
  for (Fields f(bytes_of(error)); f.next();) {
    if (f.is(ERROR_RETRY_AFTER, FIXED64)) refusal.retry_after = f.real();
    else if (f.is(ERROR_NOT_STARTED, VARINT)) refusal.not_started = f.number != 0;
  }
  return refusal;
}

}  // namespace gradwire
