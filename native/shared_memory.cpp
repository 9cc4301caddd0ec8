#include "shared_memory.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <new>
#include <string>
#include <system_error>
#include <utility>

#include "frames.hpp"
#include "process.hpp"

namespace gradwire {

namespace {

constexpr size_t SMALLEST_SEGMENT = 128 * 1024;
// Of one connection and direction.
constexpr size_t MOST_SEGMENTS = 4096;
// That have arrived before the frames that they belong to.
constexpr size_t MOST_UNUSED_DESCRIPTORS = 16;
// A larger segment is returned at once: otherwise the other peer would make a new one, which costs more than a frame.
constexpr size_t LARGE_SEGMENT = 4 << 20;
// Without these seals the other peer could shrink a segment, and reading beyond its end is fatal.
constexpr int SEALS = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

// Of the segments that this process has made, over all connections.
std::atomic<uint64_t> total_bytes{0};

bool take_total(uint64_t size, uint64_t max_bytes) {
  uint64_t before = total_bytes;
  do {
    if (size > max_bytes || before > max_bytes - size) return false;
  } while (!total_bytes.compare_exchange_weak(before, before + size));
  return true;
}

// Throws std::bad_alloc.
uint8_t* map_descriptor(int descriptor, size_t size) {
  void* data = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  if (data == MAP_FAILED) throw std::bad_alloc();
  return static_cast<uint8_t*>(data);
}

}  // namespace

bool is_shared_memory_supported() {
  static const bool is_supported = [] {
    int descriptor = memfd_create("gradwire", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (descriptor >= 0) ::close(descriptor);
    // Where there is only no descriptor or memory left now, there may be later.
    return descriptor >= 0 || errno == EMFILE || errno == ENFILE || errno == ENOMEM;
  }();
  return is_supported;
}

// -- Segment

Segment::Segment(uint64_t id, size_t size)
    : id(id), size(size), descriptor_(memfd_create("gradwire", MFD_CLOEXEC | MFD_ALLOW_SEALING)) {
  try {
    if (descriptor_ < 0 || ftruncate(descriptor_, static_cast<off_t>(size)) < 0 ||
        fcntl(descriptor_, F_ADD_SEALS, SEALS) < 0)
      throw std::system_error(errno, std::generic_category(), "no segment of shared memory");
    data_ = map_descriptor(descriptor_, size);
  } catch (...) {
    close_descriptor();
    throw;
  }
}

Segment::~Segment() {
  close_descriptor();
  munmap(data_, size);
  total_bytes -= size;
}

void Segment::close_descriptor() {
  if (descriptor_ >= 0) ::close(std::exchange(descriptor_, -1));
}

// -- segments that this peer fills

SharedMemory::SharedMemory(uint64_t max_bytes, std::function<void()> on_returned)
    : max_bytes_(max_bytes), on_returned_(std::move(on_returned)) {}

SharedMemory::~SharedMemory() {
  for (int descriptor : descriptors_) ::close(descriptor);
}

SharedMemory::Lease& SharedMemory::Lease::operator=(Lease&& other) noexcept {
  end();
  owner_ = std::move(other.owner_);
  segment_ = std::move(other.segment_);
  return *this;
}

void SharedMemory::Lease::end() {
  if (segment_) owner_->put_free(std::exchange(segment_, nullptr));
}

void SharedMemory::Lease::hand_over() {
  owner_->out_.emplace(segment_->id, segment_);
  segment_ = nullptr;
}

SharedMemory::Lease SharedMemory::take(size_t size) {
  // A power of two, so that attachments of about the same size use the same segments. Pages that were never written
  // to take no memory.
  if (size > (size_t{1} << 62)) return {};
  size_t capacity = std::max(std::bit_ceil(size), SMALLEST_SEGMENT);
  auto best = free_.end();
  // The smallest that is not far too large; of those the latest, which is the likeliest to be in a cache.
  for (auto it = free_.begin(); it != free_.end(); ++it) {
    size_t found = it->segment->size;
    if (found >= capacity && found <= 4 * capacity && (best == free_.end() || found <= best->segment->size)) best = it;
  }
  if (best != free_.end()) {
    auto segment = std::move(best->segment);
    free_.erase(best);
    return {shared_from_this(), std::move(segment)};
  }
  if (free_.size() + out_.size() >= MOST_SEGMENTS || !take_total(capacity, max_bytes_)) return {};
  try {
    return {shared_from_this(), std::make_shared<Segment>(++last_id_, capacity)};
  } catch (const std::exception&) {
    total_bytes -= capacity;
    return {};
  }
}

void SharedMemory::put_free(std::shared_ptr<Segment> segment) { free_.push_back({std::move(segment), monotonic_now()}); }

void SharedMemory::give_back(uint64_t id) {
  auto it = out_.find(id);
  if (it == out_.end()) throw ProtocolError("segment " + std::to_string(id) + " was returned, but is not in use");
  put_free(std::move(it->second));
  out_.erase(it);
}

std::vector<std::shared_ptr<Segment>> SharedMemory::trim(double seconds) {
  double before = monotonic_now() - seconds;
  std::vector<std::shared_ptr<Segment>> trimmed;
  for (; !free_.empty() && free_.front().since <= before; free_.pop_front()) {
    trimmed.push_back(std::move(free_.front().segment));
    if (trimmed.back()->is_announced) freed_.push_back(trimmed.back()->id);
  }
  return trimmed;
}

// -- segments of the other peer

struct SharedMemory::Mapped {
  const uint64_t id;
  const size_t size;
  uint8_t* data = nullptr;
  bool in_use = false;

  Mapped(uint64_t id, size_t size) : id(id), size(size) {}
  ~Mapped() {
    close_descriptor();
    if (data) munmap(data, size);
  }

  void keep_descriptor(int descriptor) { descriptor_ = descriptor; }
  void close_descriptor() {
    if (descriptor_ >= 0) ::close(std::exchange(descriptor_, -1));
  }
  // If it is not yet. Throws std::bad_alloc, after which it may be tried again.
  void map() {
    if (!data) data = map_descriptor(descriptor_, size);
    close_descriptor();
  }

 private:
  int descriptor_ = -1;
};

void SharedMemory::add_descriptor(int descriptor) {
  // They come with the first bytes of their frames, of which one at most is not complete.
  if (descriptors_.size() >= MOST_UNUSED_DESCRIPTORS) throw ProtocolError("descriptors that belong to no segments");
  descriptors_.push_back(descriptor);
}

void SharedMemory::map(uint64_t id, uint64_t size) {
  if (descriptors_.empty()) throw ProtocolError("a segment was announced without its descriptor");
  int descriptor = descriptors_.front();
  descriptors_.pop_front();
  struct Close {
    int descriptor;
    ~Close() {
      if (descriptor >= 0) ::close(descriptor);
    }
  } at_the_end{descriptor};
  struct stat status {};
  int seals = fcntl(descriptor, F_GET_SEALS);
  if (seals < 0 || (seals & SEALS) != SEALS || fstat(descriptor, &status) < 0 || size == 0 ||
      static_cast<uint64_t>(status.st_size) != size)
    throw ProtocolError("segment " + std::to_string(id) + " is not " + std::to_string(size) + " bytes of sealed memory");
  if (mapped_.size() >= MOST_SEGMENTS || mapped_.contains(id))
    throw ProtocolError("segment " + std::to_string(id) + " is one too many, or known already");
  auto mapped = std::make_shared<Mapped>(id, size);
  mapped->keep_descriptor(std::exchange(at_the_end.descriptor, -1));
  mapped_.emplace(id, mapped);
  {
    std::lock_guard lock(returned_mutex_);
    returned_.reserve(mapped_.size());  // `on_unused` must not fail
  }
  try {
    mapped->map();
  } catch (const std::bad_alloc&) {  // `use` tries it again
  }
}

Block SharedMemory::use(uint64_t id, uint64_t size) {
  auto it = mapped_.find(id);
  if (it == mapped_.end() || size == 0 || size > it->second->size)
    throw ProtocolError("an attachment of " + std::to_string(size) + " bytes does not fit in segment " +
                        std::to_string(id));
  const std::shared_ptr<Mapped>& mapped = it->second;
  if (std::exchange(mapped->in_use, true))
    throw ProtocolError("segment " + std::to_string(id) + " was filled while it was in use");
  try {
    mapped->map();
  } catch (const std::bad_alloc&) {
    on_unused(id, mapped->size);  // the other peer may fill it with something else
    throw;
  }
  // Its end may come on any thread, and long after that of the connection.
  std::weak_ptr<SharedMemory> weak = weak_from_this();
  auto hold = std::shared_ptr<const void>(mapped->data, [mapped, weak](const void*) {
    if (auto owner = weak.lock()) owner->on_unused(mapped->id, mapped->size);
  });
  return Block(mapped->data, size, std::move(hold));
}

void SharedMemory::on_unused(uint64_t id, size_t size) {
  bool is_urgent = size > LARGE_SEGMENT;
  {
    std::lock_guard lock(returned_mutex_);
    returned_.push_back(id);
    if (is_urgent) is_urgent_ = true;
  }
  if (is_urgent) on_returned_();
}

std::vector<uint64_t> SharedMemory::take_returned() {
  std::vector<uint64_t> ids;
  {
    std::lock_guard lock(returned_mutex_);
    ids = returned_;
    returned_.clear();  // keeps its memory
    is_urgent_ = false;
  }
  for (uint64_t id : ids)
    if (auto it = mapped_.find(id); it != mapped_.end()) it->second->in_use = false;
  return ids;
}

void SharedMemory::unmap(uint64_t id) {
  auto it = mapped_.find(id);
  if (it == mapped_.end() || it->second->in_use)
    throw ProtocolError("segment " + std::to_string(id) + " was freed, but is in use, or not known");
  mapped_.erase(it);
}

}  // namespace gradwire
