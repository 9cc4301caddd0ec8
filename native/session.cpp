#include "session.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

namespace gradwire {
namespace {

// Attachments of up to this many bytes in all are copied, and leave together with their message.
constexpr uint64_t COPIED_BYTES = 64 * 1024;
// A message that takes as much beside the bytes of its attachments counts with all of it, and such a response is
// acknowledged at once.
constexpr uint64_t LARGE_BODY_BYTES = 64 * 1024;
// What an attachment takes beside its bytes, about.
constexpr uint64_t ATTACHMENT_BYTES = 128;
// What a frame may hold beyond a body.
constexpr uint64_t FRAME_OVERHEAD_BYTES = 2 << 20;
// Acknowledgements leave with the next frame, unless this many wait.
constexpr size_t MOST_ACKNOWLEDGEMENTS = 32;
// Huge pages are taken when this much of an attachment has arrived: half of one.
constexpr size_t HUGE_PAGES_FROM = 1 << 20;
// Smaller pieces of a chunk are not worth a read of their own.
constexpr size_t SMALLEST_PLACE = 4096;
// After a small frame has come between chunks, others are expected to for so many outputs.
constexpr int BUSY_OUTPUTS = 64;
constexpr Seconds SHORTEST_PAUSE = 0.01, LONGEST_PAUSE = 5;
// A deadline that passes while the request is written: to the other peer, 0 would mean none.
constexpr Seconds SHORTEST_TIMEOUT = 1e-3;

const uint8_t* data_of(const std::string& text) { return reinterpret_cast<const uint8_t*>(text.data()); }

// What windows and quotas count of a message beside the bytes of its attachments: nothing, if it is small.
uint64_t counted(std::string_view body, size_t attachments) {
  uint64_t size = body.size() + ATTACHMENT_BYTES * attachments;
  return size >= LARGE_BODY_BYTES ? size : 0;
}

}  // namespace

bool Budget::take(uint64_t size) {
  std::lock_guard lock(mutex_);
  if (used_ && (size > max_bytes_ || used_ > max_bytes_ - size)) return false;
  used_ += size;
  return true;
}

void Budget::give_back(uint64_t size) {
  std::lock_guard lock(mutex_);
  used_ -= size;
}

uint64_t Budget::used() const {
  std::lock_guard lock(mutex_);
  return used_;
}

// What a message says. It is kept until it has certainly arrived.
struct Session::Content {
  uint32_t method = 0;
  bool failed = false;
  std::string body;
  std::vector<uint64_t> sizes;  // of the attachments
  std::vector<Attachment> attachments;
  uint64_t total = 0;
  bool checked = false;
  Cookie cookie;

  Content(std::string_view body, std::vector<Attachment> given, bool checked) : body(body), checked(checked) {
    sizes.reserve(given.size());
    for (const Attachment& attachment : given) sizes.push_back(attachment.size), total += attachment.size;
    if (total > COPIED_BYTES) {
      attachments = std::move(given);
    } else if (total) {
      auto copy = std::make_shared<std::string>();
      copy->reserve(total);
      for (const Attachment& attachment : given)
        copy->append(reinterpret_cast<const char*>(attachment.data), attachment.size);
      attachments.push_back({data_of(*copy), copy->size(), copy});
    }
  }

  bool is_copied() const { return total <= COPIED_BYTES; }
};

// A message whose attachments are being sent.
struct Session::Transfer {
  Key key;
  std::shared_ptr<Content> content;
  uint64_t left = content->total;
  size_t attachment = 0, offset = 0;  // what comes next
  SharedMemory::Lease lease;          // of the segment that the attachment is copied into

  Transfer(Key key, std::shared_ptr<Content> content) : key(key), content(std::move(content)) {}
};

// Frames that wait to be written.
struct Session::Packet {
  std::string bytes;
  bool dropped = false;
  bool taken = false;
  std::unique_ptr<Transfer> transfer;  // begins when the frames have been written
};

// A message that is arriving.
struct Session::Arriving {
  std::string body;
  uint32_t method = 0;
  Seconds deadline = NEVER;
  std::vector<uint64_t> sizes;
  std::vector<Block> blocks;  // complete ones, and the one that arrives
  size_t filled = 0;          // bytes of the latter
  uint64_t left = 0;

  uint64_t arrived_bytes() const {
    uint64_t total = 0;
    for (uint64_t size : sizes) total += size;
    return total - left;
  }
};

struct Session::OutboundCall {
  CallHandle handle = 0;
  Cookie cookie;
  uint64_t id = 0;  // 0 while it waits
  std::shared_ptr<Content> content;
  Seconds deadline = NEVER;
  bool nested = false, waits_for_connection = true;
  bool withdrawn = false;  // the response is not awaited, but the other peer may be serving the request
  bool sent = false;       // the other peer may know of it, from an earlier connection
  bool put = false;        // into the output of this connection
  bool in_window = false;
  Seconds retry_at = NEVER;
  Seconds refused_since = NEVER;
  std::weak_ptr<Packet> packet;  // of this connection, while it is not written
  std::unique_ptr<Arriving> response;

  uint64_t size() const { return content->total + counted(content->body, content->sizes.size()); }
};

struct Session::InboundCall {
  uint64_t id = 0;
  enum class State { arriving, served, responded } state = State::arriving;
  bool cancelled = false;
  uint64_t quota = 0;
  std::unique_ptr<Arriving> request;
  std::shared_ptr<Content> response;
  bool replaced = false;  // the response was rejected, after a part of it may have been sent
  std::weak_ptr<Packet> packet;
};

Session::Session(Settings settings, std::shared_ptr<Budget> budget)
    : settings_(std::move(settings)), budget_(std::move(budget)), random_state_(settings_.seed) {}

Session::~Session() { end(); }

// -- calls of this peer

CallHandle Session::call(Seconds now, uint32_t method, std::string_view body, std::vector<Attachment> attachments,
                         CallOptions options) {
  if (ended_) return 0;
  auto call = std::make_unique<OutboundCall>();
  call->handle = ++last_handle_;
  call->content = std::make_shared<Content>(body, std::move(attachments), options.checked);
  call->content->method = method;
  call->cookie = std::move(options.cookie);
  call->nested = options.nested;
  call->waits_for_connection = options.waits_for_connection;
  if (options.timeout < NEVER) {
    call->deadline = now + options.timeout;
    add_timer(call->deadline, call->handle);
  }
  OutboundCall& started = *call;
  calls_.emplace(started.handle, std::move(call));
  CallHandle handle = started.handle;
  try {
    if (enters_window(started)) start(now, started);
    else kept_back_.push_back(handle);
  } catch (...) {  // without memory: the caller will not know of the call
    finish(now, started);
    throw;
  }
  return handle;
}

void Session::start(Seconds now, OutboundCall& call) {
  if (!attached_ && !call.waits_for_connection) {
    report(now, call, Event::Kind::unreachable, {});
    return;
  }
  call.id = ++last_id_;
  call.retry_at = NEVER;
  calls_by_id_.emplace(call.id, &call);
  if (attached_) put_request(now, call);
}

bool Session::enters_window(OutboundCall& call) {
  uint64_t size = call.size();
  if (call.nested || !size) return true;
  bool fits = size <= settings_.max_window_bytes && bytes_in_window_ <= settings_.max_window_bytes - size;
  if (!kept_back_.empty() || (calls_in_window_ && !fits)) return false;
  call.in_window = true;
  calls_in_window_++;
  bytes_in_window_ += size;
  return true;
}

void Session::leave_window(Seconds now, OutboundCall& call) {
  if (call.in_window) {
    call.in_window = false;
    calls_in_window_--;
    bytes_in_window_ -= call.size();
  }
  admit_waiting(now);
}

void Session::admit_waiting(Seconds now) {
  if (kept_back_.empty()) return;
  auto waiting = std::exchange(kept_back_, {});
  for (; !waiting.empty(); waiting.pop_front()) {
    auto it = calls_.find(waiting.front());
    if (it == calls_.end()) continue;  // it was withdrawn, or has expired
    if (!enters_window(*it->second)) break;
    start(now, *it->second);
  }
  kept_back_ = std::move(waiting);
}

void Session::limit_window(Seconds now, uint64_t bytes) {
  settings_.max_window_bytes = bytes ? bytes : uint64_t{1} << 62;
  admit_waiting(now);
}

void Session::put_request(Seconds now, OutboundCall& call) {
  Request request;
  request.id = call.id;
  request.method = call.content->method;
  request.body = call.content->body;
  if (call.deadline < NEVER) request.timeout = std::max(call.deadline - now, SHORTEST_TIMEOUT);
  request.attachments = call.content->sizes;
  std::string frame;
  write_request(frame, request);
  call.packet = put_message({false, call.id}, call.content, std::move(frame));
  call.put = true;
}

bool Session::retry_later(Seconds now, OutboundCall& call, std::string_view error) {
  Refusal refusal = read_refusal(error);
  if (!refusal.not_started || !(refusal.retry_after > 0)) return false;
  // About as long as the other peer says, since it keeps room for that time; with jitter, so that requests that
  // were refused together are not sent again together.
  Seconds at = now + std::clamp(refusal.retry_after, SHORTEST_PAUSE, LONGEST_PAUSE) * (0.5 + random());
  if (call.refused_since == NEVER) call.refused_since = now;
  if (at >= (call.deadline < NEVER ? call.deadline : call.refused_since + settings_.patience)) return false;
  stop_sending({false, call.id}, call.content.get(), call.packet.lock());
  calls_by_id_.erase(call.id);
  call.id = 0;
  call.sent = call.put = false;
  call.packet.reset();
  call.response.reset();
  call.retry_at = at;
  add_timer(at, call.handle);
  leave_window(now, call);
  statistics_.retries++;
  return true;
}

void Session::add_timer(Seconds when, CallHandle handle) {
  // Most calls are over long before their deadline.
  if (timers_.size() > 2 * calls_.size() + 1000) {
    std::vector<Timer> left;
    for (; !timers_.empty(); timers_.pop())
      if (calls_.contains(timers_.top().handle)) left.push_back(timers_.top());
    timers_ = decltype(timers_)(std::greater<Timer>(), std::move(left));
  }
  timers_.push({when, handle});
}

bool Session::withdraw(Seconds now, CallHandle handle) {
  auto it = calls_.find(handle);
  if (it == calls_.end() || it->second->withdrawn) return false;
  withdraw(now, *it->second);
  return true;
}

void Session::withdraw(Seconds now, OutboundCall& call) {
  std::shared_ptr<Packet> waiting = call.packet.lock();
  if (waiting && waiting->taken) waiting = nullptr;
  if (!call.sent && (waiting || !call.put)) {
    finish(now, call);
    return;
  }
  if (call.response) {
    // The response has begun to arrive. Acknowledged, the rest of it stays where it is.
    acknowledge(call.id, true);
    report(now, call, Event::Kind::discarded, call.response->body);
    return;
  }
  // What is left of it is an entry that waits for the response, which every request gets.
  call.withdrawn = true;
  call.sent = true;
  call.packet.reset();
  leave_window(now, call);
  auto content = std::move(call.content);
  if (!attached_) return;
  stop_sending({false, call.id}, content.get(), nullptr);
  std::string frame;
  write_cancel(frame, call.id);
  if (waiting) {
    // Sent again after a cut: the cancellation takes its place in the order of the numbers.
    waiting->bytes = std::move(frame);
    waiting->transfer.reset();
  } else {
    put(std::move(frame));
  }
}

void Session::finish(Seconds now, OutboundCall& call) {
  // Taken out first: leaving the window starts other calls.
  auto owned = std::move(calls_.extract(call.handle).mapped());
  if (owned->id) {
    calls_by_id_.erase(owned->id);
    stop_sending({false, owned->id}, owned->content.get(), owned->packet.lock());
  }
  leave_window(now, *owned);
}

void Session::report(Seconds now, OutboundCall& call, Event::Kind kind, std::string_view body) {
  emit(kind, call).body = body;
  finish(now, call);
}

Session::OutboundCall* Session::call_by_id(uint64_t id) const {
  auto it = calls_by_id_.find(id);
  return it == calls_by_id_.end() ? nullptr : it->second;
}

// -- requests of the other peer

bool Session::is_cancelled(uint64_t request) const {
  const InboundCall* call = inbound(request);
  return call && call->cancelled;
}

Session::InboundCall* Session::inbound(uint64_t id) const {
  auto it = inbound_.find(id);
  return it == inbound_.end() ? nullptr : it->second.get();
}

Session::InboundCall& Session::new_inbound(uint64_t id) {
  if (inbound_.size() >= settings_.max_inbound_calls)
    throw ProtocolError("more than " + std::to_string(settings_.max_inbound_calls) +
                        " requests whose responses were not acknowledged");
  highest_request_ = id;
  auto call = std::make_unique<InboundCall>();
  call->id = id;
  return *inbound_.emplace(id, std::move(call)).first->second;
}

void Session::begin(uint64_t request) {
  if (InboundCall* call = inbound(request)) give_back_quota(*call);
}

bool Session::respond(uint64_t request, std::string_view body, std::vector<Attachment> attachments, bool checked,
                      Cookie cookie) {
  InboundCall* call = inbound(request);
  if (!call || call->state != InboundCall::State::served) return false;
  if (call->cancelled) {
    set_error(*call, settings_.cancelled);
    return false;
  }
  auto content = std::make_shared<Content>(body, std::move(attachments), checked);
  content->cookie = std::move(cookie);
  set_response(*call, std::move(content));
  return true;
}

bool Session::fail(uint64_t request, std::string_view error) {
  InboundCall* call = inbound(request);
  if (!call || call->state != InboundCall::State::served) return false;
  set_error(*call, error);
  return true;
}

void Session::set_error(InboundCall& call, std::string_view error) {
  auto content = std::make_shared<Content>(error, std::vector<Attachment>{}, false);
  content->failed = true;
  set_response(call, std::move(content));
}

void Session::set_response(InboundCall& call, std::shared_ptr<Content> content) {
  if (call.response) {
    stop_sending({true, call.id}, call.response.get(), call.packet.lock());
    call.replaced = true;
  }
  give_back_quota(call);
  call.request.reset();
  call.state = InboundCall::State::responded;
  call.response = std::move(content);
  if (attached_) put_response(call);
}

void Session::put_response(InboundCall& call) {
  Response response;
  response.id = call.id;
  response.failed = call.response->failed;
  response.body = call.response->body;
  response.attachments = call.response->sizes;
  std::string frame;
  write_response(frame, response);
  call.packet = put_message({true, call.id}, call.response, std::move(frame));
}

bool Session::take_quota(InboundCall& call, uint64_t size) {
  bool fits = size <= settings_.max_quota_bytes && quota_used_ <= settings_.max_quota_bytes - size;
  // A request that is larger than the whole quota is taken if no other one is there.
  if ((quota_used_ && !fits) || !budget_->take(size)) return false;
  call.quota = size;
  quota_used_ += size;
  return true;
}

void Session::give_back_quota(InboundCall& call) {
  if (!call.quota) return;
  budget_->give_back(call.quota);
  quota_used_ -= call.quota;
  call.quota = 0;
}

// -- the connection

void Session::attach(Seconds now, std::shared_ptr<SharedMemory> shared) {
  if (ended_) return;
  if (attached_) detach();
  attached_ = true;
  shared_ = std::move(shared);
  std::vector<OutboundCall*> calls;
  calls.reserve(calls_by_id_.size());
  for (auto& [_, call] : calls_by_id_) calls.push_back(call);
  // In the order of their numbers, or the other peer would take a request for a repetition.
  std::ranges::sort(calls, {}, &OutboundCall::id);
  for (OutboundCall* call : calls) {
    if (call->withdrawn) {
      std::string frame;
      write_cancel(frame, call->id);
      put(std::move(frame));
    } else {
      put_request(now, *call);
    }
  }
  std::vector<InboundCall*> responses;
  for (auto& [_, call] : inbound_)
    if (call->state == InboundCall::State::responded) responses.push_back(call.get());
  std::ranges::sort(responses, {}, &InboundCall::id);
  for (InboundCall* call : responses) put_response(*call);
}

void Session::detach() {
  if (!attached_) return;
  attached_ = false;
  for (auto& [_, call] : calls_by_id_) {
    auto packet = call->packet.lock();
    call->sent |= call->put && !(packet && !packet->taken);
    call->put = false;
    call->packet.reset();
    call->response.reset();
  }
  waiting_.clear();
  transfers_.clear();
  unconfirmed_.clear();
  // What was not acknowledged is sent again, and acknowledged then.
  to_acknowledge_.clear();
  acknowledge_now_ = false;
  partial_.clear();
  chunk_left_ = 0;
  shared_.reset();
  for (auto& [_, call] : inbound_) {
    call->packet.reset();
    if (call->state == InboundCall::State::arriving) {
      call->request.reset();
      give_back_quota(*call);
    }
  }
}

// -- output

void Session::put(std::string bytes) {
  auto packet = std::make_shared<Packet>();
  packet->bytes = std::move(bytes);
  waiting_.push_back(std::move(packet));
}

std::shared_ptr<Session::Packet> Session::put_message(Key key, const std::shared_ptr<Content>& content,
                                                      std::string frame) {
  if (content->total && content->is_copied()) {
    const Attachment& copy = content->attachments.front();
    write_chunk_head(frame, key.second, key.first, copy.size);
    frame.append(reinterpret_cast<const char*>(copy.data), copy.size);
  }
  auto packet = std::make_shared<Packet>();
  packet->bytes = std::move(frame);
  if (!content->is_copied())
    packet->transfer = std::make_unique<Transfer>(key, content);
  waiting_.push_back(packet);
  return packet;
}

// Sends nothing more of a message. What has been written of it the other peer drops when it gets what follows.
void Session::stop_sending(Key key, const Content* content, const std::shared_ptr<Packet>& packet) {
  if (packet && !packet->taken) {
    // It stays in the queue, where others may wait before it for long, but without what it held.
    packet->dropped = true;
    packet->bytes = {};
    packet->transfer.reset();
    return;
  }
  if (!content || content->is_copied()) return;
  std::erase_if(transfers_, [&](const Transfer& transfer) { return transfer.key == key; });
  std::erase_if(unconfirmed_, [&](const auto& entry) { return entry.second.key == key; });
}

void Session::add_packet(Output& output, std::shared_ptr<Packet> packet) {
  output.pieces.push_back({data_of(packet->bytes), packet->bytes.size()});
  output.size += packet->bytes.size();
  output.owners.push_back(std::move(packet));
}

void Session::add_frames(Output& output, std::string bytes) {
  auto packet = std::make_shared<Packet>();
  packet->bytes = std::move(bytes);
  add_packet(output, std::move(packet));
}

bool Session::has_output() const {
  return attached_ && (!waiting_.empty() || !transfers_.empty() || acknowledge_now_ ||
                       (shared_ && shared_->has_urgent_news()));
}

Output Session::take_output(size_t small_bytes, size_t bulk_bytes) {
  Output output;
  if (!has_output()) return output;
  if (!to_acknowledge_.empty()) {
    std::string frame;
    write_acknowledge(frame, to_acknowledge_);
    to_acknowledge_.clear();
    add_frames(output, std::move(frame));
  }
  acknowledge_now_ = false;
  while (!waiting_.empty() && (output.size < small_bytes || output.pieces.empty())) {
    std::shared_ptr<Packet> packet = std::move(waiting_.front());
    waiting_.pop_front();
    if (packet->dropped) continue;
    packet->taken = true;
    if (!packet->transfer && !transfers_.empty()) busy_outputs_ = BUSY_OUTPUTS;
    if (packet->transfer) transfers_.push_back(std::move(*packet->transfer)), packet->transfer.reset();
    add_packet(output, std::move(packet));
  }
  if (shared_) add_news_of_segments(output);
  if (!transfers_.empty()) add_attachments(output);
  if (busy_outputs_ > 0) busy_outputs_--, bulk_bytes = 0;
  while (!transfers_.empty() && output.size < bulk_bytes) add_attachments(output);
  statistics_.sent_bytes += output.size;
  return output;
}

void Session::add_news_of_segments(Output& output) {
  auto returned = shared_->take_returned();
  auto freed = shared_->take_freed();
  if (returned.empty() && freed.empty()) return;
  std::string frames;
  if (!returned.empty()) write_returned(frames, returned);
  if (!freed.empty()) write_freed(frames, freed);
  add_frames(output, std::move(frames));
}

// Adds a part of the attachments of the message whose turn it is.
void Session::add_attachments(Output& output) {
  Transfer transfer = std::move(transfers_.front());
  transfers_.pop_front();
  if (!transfer.lease && transfer.offset == 0) {
    const Attachment& attachment = transfer.content->attachments[transfer.attachment];
    if (goes_through_segment(attachment)) transfer.lease = shared_->take(attachment.size);
  }
  if (transfer.lease) add_copy(output, std::move(transfer));
  else add_chunk(output, std::move(transfer));
}

bool Session::goes_through_segment(const Attachment& attachment) const {
  return shared_ && attachment.size >= settings_.smallest_shared_bytes;
}

void Session::add_chunk(Output& output, Transfer transfer) {
  const Content& content = *transfer.content;
  size_t size = std::min<uint64_t>(settings_.chunk_bytes, transfer.left);
  std::vector<Output::Piece> pieces;
  size_t added = 0;
  while (added < size) {
    const Attachment& attachment = content.attachments[transfer.attachment];
    if (added && transfer.offset == 0 && goes_through_segment(attachment)) break;
    size_t piece = std::min(size - added, attachment.size - transfer.offset);
    if (piece) pieces.push_back({attachment.data + transfer.offset, piece});
    added += piece;
    transfer.offset += piece;
    if (transfer.offset == attachment.size) transfer.attachment++, transfer.offset = 0;
  }
  transfer.left -= added;
  bool is_last = transfer.left == 0;
  std::string head;
  write_chunk_head(head, transfer.key.second, transfer.key.first, added);

  if (is_last && content.checked) {
    // Copied first and checked then: nothing that is modified later can be in it.
    for (const Output::Piece& piece : pieces) head.append(reinterpret_cast<const char*>(piece.data), piece.size);
    check(std::move(transfer), std::move(head));
    return;
  }
  add_frames(output, std::move(head));
  output.pieces.insert(output.pieces.end(), pieces.begin(), pieces.end());
  output.size += added;
  output.owners.push_back(transfer.content);
  if (!is_last) transfers_.push_back(std::move(transfer));
}

// Copies the next bytes of an attachment into its segment, or, if it has been copied, announces that.
void Session::add_copy(Output& output, Transfer transfer) {
  const std::shared_ptr<Segment>& segment = transfer.lease.segment();
  const Attachment& attachment = transfer.content->attachments[transfer.attachment];
  if (transfer.offset < attachment.size) {
    if (!std::exchange(segment->is_announced, true)) {
      std::string frame;
      write_new_segment(frame, {segment->id, segment->size});
      add_frames(output, std::move(frame));
      output.pieces.back().announced = segment.get();
    }
    size_t size = std::min(settings_.chunk_bytes, attachment.size - transfer.offset);
    output.size += size;  // counted as if it were written
    output.copies.push_back({segment->data() + transfer.offset, attachment.data + transfer.offset, size});
    output.owners.push_back(transfer.content);
    output.owners.push_back(segment);
    transfer.offset += size;
    transfers_.push_back(std::move(transfer));
    return;
  }
  std::string frame;
  write_placed(frame, {transfer.key.second, transfer.key.first, segment->id, attachment.size});
  transfer.left -= attachment.size;
  if (transfer.left == 0 && transfer.content->checked) {
    check(std::move(transfer), std::move(frame));
    return;
  }
  transfer.lease.hand_over();
  add_frames(output, std::move(frame));
  transfer.attachment++, transfer.offset = 0;
  if (transfer.left) transfers_.push_back(std::move(transfer));
}

// The last frame of a message waits until its attachments have been checked.
void Session::check(Transfer transfer, std::string last_frame) {
  auto [is_response, id] = transfer.key;
  Event& event = emit(Event::Kind::check, ++last_check_);
  event.flag = is_response;
  event.cookie = is_response ? transfer.content->cookie : call_by_id(id)->cookie;
  unconfirmed_.emplace(last_check_, Unconfirmed{transfer.key, std::move(last_frame), std::move(transfer.lease)});
}

void Session::confirm(uint64_t check) {
  auto it = unconfirmed_.find(check);
  if (it == unconfirmed_.end()) return;
  if (it->second.lease) it->second.lease.hand_over();
  put(std::move(it->second.last_frame));
  unconfirmed_.erase(it);
}

void Session::reject(Seconds now, uint64_t check, std::string_view error) {
  auto it = unconfirmed_.find(check);
  if (it == unconfirmed_.end()) return;
  auto [is_response, id] = it->second.key;
  if (is_response) set_error(*inbound(id), error);
  else withdraw(now, *call_by_id(id));
}

// -- input

void Session::receive(Seconds now, Bytes bytes) {
  if (!attached_ || ended_ || heard_goodbye_) return;
  statistics_.received_bytes += bytes.size();
  while (!bytes.empty() && !heard_goodbye_) {
    if (chunk_left_) {
      Bytes data = bytes.first(std::min<uint64_t>(chunk_left_, bytes.size()));
      take_chunk_bytes(now, data);
      bytes = bytes.subspan(data.size());
      continue;
    }
    if (partial_.empty()) {
      size_t used = read(now, bytes);
      if (used) {
        bytes = bytes.subspan(used);
        continue;
      }
    }
    size_t more = std::min(missing_bytes(), bytes.size());
    partial_.append(reinterpret_cast<const char*>(bytes.data()), more);
    bytes = bytes.subspan(more);
    if (read(now, {data_of(partial_), partial_.size()})) partial_.clear();
  }
}

// Handles the first frame of `bytes`, or the head of the chunk there. Returns how many bytes that took; 0 if too few
// have arrived.
size_t Session::read(Seconds now, Bytes bytes) {
  FrameBounds bounds = find_frame(bytes);
  if (!bounds.known) return 0;
  Bytes arrived = bytes.subspan(bounds.begin);
  arrived = arrived.first(std::min<uint64_t>(arrived.size(), bounds.size));
  ChunkHead head = find_chunk_head(arrived, bounds.size);
  if (head.state == ChunkHead::State::incomplete) return 0;
  if (head.state == ChunkHead::State::yes) {
    begin_chunk(now, {head.of_response, head.message}, head.data_size);
    return bounds.begin + head.data_begin;
  }
  if (bounds.size > settings_.max_body_bytes + FRAME_OVERHEAD_BYTES)
    throw ProtocolError("a frame of " + std::to_string(bounds.size) + " bytes exceeds the limit of " +
                        std::to_string(settings_.max_body_bytes) + " bytes");
  if (arrived.size() < bounds.size) return 0;
  std::visit([&](const auto& frame) { on(now, frame); }, read_frame(arrived));
  return bounds.begin + bounds.size;
}

// How many further bytes `partial_` needs at least before it is worth another look.
size_t Session::missing_bytes() const {
  Bytes bytes{data_of(partial_), partial_.size()};
  FrameBounds bounds = find_frame(bytes);
  if (!bounds.known) return 1;
  Bytes arrived = bytes.subspan(bounds.begin);
  if (find_chunk_head(arrived, bounds.size).state == ChunkHead::State::incomplete) return 1;
  return bounds.size - arrived.size();
}

uint64_t Session::check_size(std::string_view body, const std::vector<uint64_t>& attachments) const {
  if (attachments.size() > MOST_ATTACHMENTS)
    throw ProtocolError("a message with more than " + std::to_string(MOST_ATTACHMENTS) + " attachments");
  uint64_t total = 0;
  for (uint64_t size : attachments) {
    if (size > settings_.max_message_bytes - total) {
      total = UINT64_MAX;
      break;
    }
    total += size;
  }
  if (total > settings_.max_message_bytes || body.size() > settings_.max_message_bytes - total)
    throw ProtocolError("a message exceeds the limit of " + std::to_string(settings_.max_message_bytes) + " bytes");
  if (body.size() > settings_.max_body_bytes)
    throw ProtocolError("a message body of " + std::to_string(body.size()) + " bytes exceeds the limit of " +
                        std::to_string(settings_.max_body_bytes) + " bytes");
  return total;
}

void Session::on(Seconds now, const Request& request) {
  if (!request.id) throw ProtocolError("a request without an id");
  uint64_t total = check_size(request.body, request.attachments);
  InboundCall* call = inbound(request.id);
  if (call) {
    if (call->request) throw ProtocolError("a request that arrives twice at once");
  } else if (request.id > highest_request_) {
    call = &new_inbound(request.id);
  }
  if (!call || call->state != InboundCall::State::arriving) {
    statistics_.repeated_requests++;
    return;
  }
  uint64_t size = total + counted(request.body, request.attachments.size());
  if (size && !take_quota(*call, size)) {
    set_error(*call, settings_.refusal);
    return;
  }
  call->request = std::make_unique<Arriving>();
  call->request->body = request.body;
  call->request->method = request.method;
  if (request.timeout > 0) call->request->deadline = now + request.timeout;
  call->request->sizes = request.attachments;
  call->request->left = total;
  if (!total) request_arrived(*call);
}

void Session::request_arrived(InboundCall& call) {
  Arriving& request = *call.request;
  Event& event = emit(Event::Kind::request, call.id);
  event.method = request.method;
  event.deadline = request.deadline;
  event.body = std::move(request.body);
  request.blocks.resize(request.sizes.size());  // empty ones at the end have not begun
  event.attachments = std::move(request.blocks);
  call.request.reset();
  call.state = InboundCall::State::served;
}

void Session::on(Seconds now, const Response& response) {
  if (!response.id || response.id > last_id_) throw ProtocolError("a response to a request that was not sent");
  uint64_t total = check_size(response.body, response.attachments);
  bool is_large = total || counted(response.body, response.attachments.size());
  OutboundCall* call = call_by_id(response.id);
  if (!call) {
    // One for each request, and each connection, is the most that can come.
    if (to_acknowledge_.size() >= settings_.max_inbound_calls)
      throw ProtocolError("responses that are repeated, while the acknowledgements are not read");
    statistics_.repeated_responses++;
    acknowledge(response.id, is_large);
    return;
  }
  if (call->withdrawn) {
    acknowledge(response.id, is_large);
    if (!response.failed) emit(Event::Kind::discarded, *call).body = response.body;
    finish(now, *call);
    return;
  }
  if (response.failed) {
    acknowledge(response.id, is_large);
    if (call->deadline <= now) report(now, *call, Event::Kind::expired, {});
    else if (!retry_later(now, *call, response.body)) report(now, *call, Event::Kind::error, response.body);
    return;
  }
  call->response = std::make_unique<Arriving>();
  call->response->body = response.body;
  call->response->sizes = response.attachments;
  call->response->left = total;
  if (!total) response_arrived(now, *call);
}

void Session::response_arrived(Seconds now, OutboundCall& call) {
  Arriving& response = *call.response;
  response.blocks.resize(response.sizes.size());  // empty ones at the end have not begun
  bool is_large = counted(response.body, response.sizes.size()) ||
                  std::ranges::any_of(response.sizes, [](uint64_t size) { return size > 0; });
  acknowledge(call.id, is_large);
  bool is_late = call.deadline <= now;  // `tick` was about to say so
  if (is_late) emit(Event::Kind::expired, call);
  Event& event = emit(is_late ? Event::Kind::discarded : Event::Kind::response, call);
  event.body = std::move(response.body);
  if (!is_late) event.attachments = std::move(response.blocks);
  finish(now, call);
}

void Session::on(Seconds now, const Chunk& chunk) {
  begin_chunk(now, {chunk.of_response, chunk.message}, chunk.data.size());
  take_chunk_bytes(now, {reinterpret_cast<const uint8_t*>(chunk.data.data()), chunk.data.size()});
}

Session::Arriving* Session::arriving(Key key) const {
  if (key.first) {
    OutboundCall* call = call_by_id(key.second);
    return call ? call->response.get() : nullptr;
  }
  InboundCall* call = inbound(key.second);
  return call ? call->request.get() : nullptr;
}

// The bytes of messages that do not arrive (repeated, refused or cancelled ones) are skipped.
void Session::begin_chunk(Seconds now, Key key, uint64_t size) {
  Arriving* message = arriving(key);
  if (message && size > message->left) throw ProtocolError("more bytes than the message announced");
  chunk_of_ = key;
  chunk_left_ = size;
  prepare_block(now);
}

// Makes memory for the attachment whose bytes come next.
void Session::prepare_block(Seconds now) {
  if (!chunk_left_) return;
  Arriving* message = arriving(chunk_of_);
  if (!message) return;
  try {
    while (message->blocks.empty() || message->filled == message->blocks.back().size()) {
      message->blocks.emplace_back(message->sizes[message->blocks.size()]);
      message->filled = 0;
    }
  } catch (const std::bad_alloc&) {
    give_up(now, chunk_of_);
  }
}

// There is no memory for the attachments of a message that arrives.
void Session::give_up(Seconds now, Key key) {
  auto [is_response, id] = key;
  if (!is_response) {
    set_error(*inbound(id), settings_.no_memory);
    return;
  }
  acknowledge(id, true);
  OutboundCall& call = *call_by_id(id);
  emit(Event::Kind::no_memory, call);
  report(now, call, Event::Kind::discarded, call.response->body);
}

void Session::take_chunk_bytes(Seconds now, Bytes bytes) {
  while (!bytes.empty()) {
    size_t size = bytes.size();
    if (Arriving* message = arriving(chunk_of_)) {
      Block& block = message->blocks.back();
      size = std::min(size, block.size() - message->filled);
      std::memcpy(block.data() + message->filled, bytes.data(), size);
    }
    bytes = bytes.subspan(size);
    advance_chunk(now, size);
  }
}

std::span<uint8_t> Session::place() const {
  Arriving* message = chunk_left_ ? arriving(chunk_of_) : nullptr;
  if (!message) return {};
  Block& block = message->blocks.back();
  size_t size = std::min<uint64_t>(block.size() - message->filled, chunk_left_);
  if (size < SMALLEST_PLACE) return {};
  return {block.data() + message->filled, size};
}

void Session::received_in_place(Seconds now, size_t size) {
  size = std::min<uint64_t>(size, chunk_left_);
  statistics_.received_bytes += size;
  advance_chunk(now, size);
}

void Session::advance_chunk(Seconds now, size_t size) {
  chunk_left_ -= size;
  Arriving* message = arriving(chunk_of_);
  if (!message) return;
  message->filled += size;
  if (message->filled >= HUGE_PAGES_FROM && message->filled - size < HUGE_PAGES_FROM)
    message->blocks.back().use_huge_pages();
  if (took_bytes(now, chunk_of_, *message, size)) prepare_block(now);
}

// Returns whether more are to come.
bool Session::took_bytes(Seconds now, Key key, Arriving& message, uint64_t size) {
  message.left -= size;
  if (message.left) return true;
  uint64_t id = key.second;
  if (!key.first) request_arrived(*inbound(id));
  else response_arrived(now, *call_by_id(id));
  return false;
}

SharedMemory& Session::shared() const {
  if (!shared_) throw ProtocolError("a frame about shared memory, where there is none");
  return *shared_;
}

void Session::on(Seconds, const NewSegment& segment) { shared().map(segment.id, segment.size); }

void Session::on(Seconds now, const Placed& placed) {
  Key key{placed.of_response, placed.message};
  Arriving* message = arriving(key);
  Block block;
  try {
    block = shared().use(placed.segment, placed.size);
  } catch (const std::bad_alloc&) {
    if (message) give_up(now, key);
    return;
  }
  if (!message) return;  // it is repeated, refused or cancelled
  if (!message->blocks.empty() && message->filled < message->blocks.back().size())
    throw ProtocolError("an attachment begins before the one before it is complete");
  auto& blocks = message->blocks;
  while (blocks.size() < message->sizes.size() && message->sizes[blocks.size()] == 0) blocks.emplace_back();
  if (blocks.size() == message->sizes.size() || message->sizes[blocks.size()] != placed.size)
    throw ProtocolError("an attachment of another size than the message announced");
  message->filled = block.size();
  blocks.push_back(std::move(block));
  statistics_.received_bytes += placed.size;
  took_bytes(now, key, *message, placed.size);
}

void Session::on(Seconds, const Returned& returned) {
  for (uint64_t id : returned.segments) shared().give_back(id);
}

void Session::on(Seconds, const Freed& freed) {
  for (uint64_t id : freed.segments) shared().unmap(id);
}

void Session::on(Seconds, const Cancel& cancel) {
  InboundCall* call = inbound(cancel.id);
  if (!call) {
    // All requests that have arrived and are not known any more have their response.
    if (cancel.id <= highest_request_) return;
    call = &new_inbound(cancel.id);
  }
  if (call->state == InboundCall::State::arriving) {
    set_error(*call, settings_.cancelled);
  } else if (call->state == InboundCall::State::served && !call->cancelled) {
    call->cancelled = true;
    emit(Event::Kind::cancelled, call->id);
  }
}

void Session::acknowledge(uint64_t id, bool is_large) {
  to_acknowledge_.push_back(id);
  // The other peer keeps large responses until then.
  if (is_large || to_acknowledge_.size() >= MOST_ACKNOWLEDGEMENTS) acknowledge_now_ = true;
}

void Session::on(Seconds, const Acknowledge& acknowledge) {
  for (uint64_t id : acknowledge.ids) {
    InboundCall* call = inbound(id);
    if (!call || call->state != InboundCall::State::responded) continue;
    auto packet = call->packet.lock();
    if (packet && !packet->taken && !call->replaced)
      throw ProtocolError("an acknowledgement of a response that was not sent");
    stop_sending({true, id}, call->response.get(), packet);
    inbound_.erase(id);
    emit(Event::Kind::acknowledged, id);
  }
}

void Session::on(Seconds, const Goodbye& goodbye) {
  Event& event = emit(Event::Kind::goodbye, 0);
  event.flag = goodbye.leaving;
  event.body = goodbye.error;
  heard_goodbye_ = true;
}

// -- time

Seconds Session::next_tick() const { return timers_.empty() ? NEVER : timers_.top().when; }

void Session::tick(Seconds now) {
  while (!timers_.empty() && timers_.top().when <= now) {
    CallHandle handle = timers_.top().handle;
    timers_.pop();
    auto it = calls_.find(handle);
    if (it == calls_.end() || it->second->withdrawn) continue;
    OutboundCall& call = *it->second;
    if (call.deadline <= now) {
      emit(Event::Kind::expired, call);
      withdraw(now, call);
    } else if (call.retry_at <= now) {
      call.retry_at = NEVER;
      if (enters_window(call)) start(now, call);
      else kept_back_.push_back(handle);
    }
  }
}

// -- the end

void Session::close(const Goodbye& goodbye) {
  if (ended_) return;
  // Frames that wait still go, but no attachments.
  auto waiting = std::exchange(waiting_, {});
  bool was_attached = attached_;
  end();
  if (!was_attached) return;
  attached_ = true;
  waiting_ = std::move(waiting);
  for (auto& packet : waiting_) packet->transfer.reset();
  std::string frame;
  write_goodbye(frame, goodbye);
  put(std::move(frame));
}

void Session::end() {
  ended_ = true;
  detach();
  for (auto& [_, call] : inbound_) give_back_quota(*call);
  calls_by_id_.clear();
  calls_.clear();
  kept_back_.clear();
  timers_ = {};
  inbound_.clear();
  calls_in_window_ = bytes_in_window_ = 0;
}

bool Session::is_open(CallHandle handle) const {
  auto it = calls_.find(handle);
  return it != calls_.end() && !it->second->withdrawn;
}

std::vector<Cookie> Session::open_calls() const {
  std::vector<Cookie> cookies;
  for (const auto& [_, call] : calls_)
    if (!call->withdrawn) cookies.push_back(call->cookie);
  return cookies;
}

std::vector<Event> Session::take_events() { return std::exchange(events_, {}); }

Event& Session::emit(Event::Kind kind, uint64_t id) {
  events_.push_back({});
  events_.back().kind = kind;
  events_.back().id = id;
  return events_.back();
}

Event& Session::emit(Event::Kind kind, const OutboundCall& call) {
  Event& event = emit(kind, call.handle);
  event.cookie = call.cookie;
  return event;
}

Session::Statistics Session::statistics() const {
  Statistics statistics = statistics_;
  statistics.calls = calls_.size();
  statistics.inbound_calls = inbound_.size();
  statistics.kept_back =
      std::ranges::count_if(kept_back_, [&](CallHandle handle) { return calls_.contains(handle); });
  statistics.bytes_in_window = bytes_in_window_;
  statistics.quota_bytes = quota_used_;
  for (const auto& [_, call] : calls_by_id_)
    if (call->response) statistics.arrived_bytes += call->response->arrived_bytes();
  for (const auto& [_, call] : inbound_)
    if (call->request) statistics.arrived_bytes += call->request->arrived_bytes();
  return statistics;
}

bool Session::all_delivered() const {
  return std::ranges::none_of(inbound_, [](const auto& entry) {
    return entry.second->state == InboundCall::State::responded && entry.second->response->total;
  });
}

// A number between 0 and 1 (splitmix64).
double Session::random() {
  uint64_t x = random_state_ += 0x9E3779B97F4A7C15;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
  return static_cast<double>((x ^ (x >> 31)) >> 11) * 0x1p-53;
}

}  // namespace gradwire
