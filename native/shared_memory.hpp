// Segments of shared memory for large attachments between two processes of one host.
//
// The sender copies an attachment into a segment of its own, and the receiver uses it there, without copying, until
// the last view of it is gone. Then it returns the segment, and the sender fills it again: most of the cost of large
// fresh memory is mapping its pages.
//
// Segments have no names. The kernel passes their descriptors over the unix socket, so no other process can open
// them, and nothing is left behind however either process ends.

#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "memory.hpp"

namespace gradwire {

// A segment that this process fills.
class Segment {
 public:
  // Throws std::system_error.
  Segment(uint64_t id, size_t size);
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  const uint64_t id;
  const size_t size;
  uint8_t* data() const { return data_; }
  // Whether the other peer has been told of it, or is about to be. For the session, under its lock.
  bool is_announced = false;
  // For the thread that writes; -1 once the other peer has it.
  int descriptor() const { return descriptor_; }
  void close_descriptor();

 private:
  int descriptor_;
  uint8_t* data_;
};

// The segments of one connection, in both directions. It ends with the connection; memory that is in use stays.
// A session calls it under its lock, but blocks may end on any thread.
class SharedMemory : public std::enable_shared_from_this<SharedMemory> {
 public:
  // `max_bytes`: that segments of this process may have, those of other connections included. `on_returned` is called
  // on any thread, under any lock, when a segment should be returned without waiting for other output.
  SharedMemory(uint64_t max_bytes, std::function<void()> on_returned);
  ~SharedMemory();

  // -- segments that this peer fills

  // Gives the segment back to be used again, unless the other peer gets it.
  class Lease {
   public:
    Lease() = default;
    Lease(std::shared_ptr<SharedMemory> owner, std::shared_ptr<Segment> segment)
        : owner_(std::move(owner)), segment_(std::move(segment)) {}
    Lease(Lease&&) = default;
    Lease& operator=(Lease&& other) noexcept;
    ~Lease() { end(); }
    explicit operator bool() const { return segment_ != nullptr; }
    const std::shared_ptr<Segment>& segment() const { return segment_; }
    // From now on the other peer has the segment.
    void hand_over();

   private:
    void end();
    std::shared_ptr<SharedMemory> owner_;
    std::shared_ptr<Segment> segment_;
  };
  // Nothing if the limit is reached, or the system has no memory.
  Lease take(size_t size);
  // The other peer has returned a segment. Throws ProtocolError.
  void give_back(uint64_t id);
  // Takes out segments that were not used for so long. The other peer is to be told of those that it has mapped. To
  // end them takes long.
  std::vector<std::shared_ptr<Segment>> trim(double seconds);
  bool has_free() const { return !free_.empty(); }

  // -- segments of the other peer

  // Takes a descriptor that has arrived, and belongs to the next segment that is announced. If it throws, which may be
  // a ProtocolError, it has not taken it.
  void add_descriptor(int descriptor);
  // Each throws ProtocolError. `use` throws std::bad_alloc if there is no room to map the segment, which is then
  // returned to the other peer.
  void map(uint64_t id, uint64_t size);
  Block use(uint64_t id, uint64_t size);
  void unmap(uint64_t id);

  // -- what the other peer is to be told

  // Whether it should not wait for other output.
  bool has_urgent_news() const { return is_urgent_; }
  // Segments that are no longer used here.
  std::vector<uint64_t> take_returned();
  // Segments that were freed here.
  std::vector<uint64_t> take_freed() { return std::exchange(freed_, {}); }

 private:
  struct Mapped;
  void put_free(std::shared_ptr<Segment> segment);
  void on_unused(uint64_t id, size_t size);

  const uint64_t max_bytes_;
  const std::function<void()> on_returned_;

  struct Free {
    std::shared_ptr<Segment> segment;
    double since;
  };
  std::deque<Free> free_;  // the oldest first
  std::map<uint64_t, std::shared_ptr<Segment>> out_;
  uint64_t last_id_ = 0;
  std::vector<uint64_t> freed_;

  std::deque<int> descriptors_;
  std::map<uint64_t, std::shared_ptr<Mapped>> mapped_;

  // A leaf: no other lock is taken under it.
  std::mutex returned_mutex_;
  std::vector<uint64_t> returned_;
  std::atomic<bool> is_urgent_{false};
};

// Whether this system has what segments need.
bool is_shared_memory_supported();

}  // namespace gradwire
