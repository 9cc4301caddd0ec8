#include "memory.hpp"

#include <sys/mman.h>

#include <bit>
#include <chrono>
#include <cstdlib>
#include <deque>
#include <mutex>
#include <new>
#include <utility>

namespace gradwire {
namespace {

using Clock = std::chrono::steady_clock;

// Below this size, malloc is as fast as a pool.
constexpr size_t SMALLEST_POOLED = 64 * 1024;
// The size of a huge page.
constexpr size_t HUGE = 2 << 20;
constexpr size_t ALIGNMENT = 64;

// Pooled memory comes in sizes of 8 steps for each power of two, so that at most an eighth of it is wasted.
size_t rounded(size_t size) {
  size_t step = std::bit_floor(size) / 8;
  return (size + step - 1) / step * step;
}

class Pool {
 public:
  uint8_t* take(size_t size) {
    {
      std::lock_guard lock(mutex_);
      // The latest first: it is the likeliest to be in a cache.
      for (auto it = kept_.rbegin(); it != kept_.rend(); ++it) {
        if (it->size != size) continue;
        uint8_t* data = it->data;
        kept_bytes_ -= size;
        kept_.erase(std::next(it).base());
        return data;
      }
    }
    try {
      return map(size);
    } catch (const std::bad_alloc&) {
      trim(0);
      return map(size);
    }
  }

  void give_back(uint8_t* data, size_t size) {
    std::unique_lock lock(mutex_);
    if (size > limit_) {
      lock.unlock();
      munmap(data, size);
      return;
    }
    try {
      kept_.push_back({data, size, Clock::now()});
    } catch (const std::bad_alloc&) {
      lock.unlock();
      munmap(data, size);
      return;
    }
    kept_bytes_ += size;
    drop_oldest(lock, [&](const Kept&) { return kept_bytes_ > limit_; });
  }

  void trim(double seconds) {
    auto before = Clock::now() - std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
    std::unique_lock lock(mutex_);
    drop_oldest(lock, [&](const Kept& oldest) { return oldest.since <= before; });
  }

  PoolUse use() {
    std::lock_guard lock(mutex_);
    return {kept_bytes_, limit_};
  }

  void set_limit(size_t bytes) {
    std::unique_lock lock(mutex_);
    limit_ = bytes;
    drop_oldest(lock, [&](const Kept&) { return kept_bytes_ > limit_; });
  }

 private:
  struct Kept {
    uint8_t* data;
    size_t size;
    Clock::time_point since;
  };

  static uint8_t* map(size_t size) {
    void* data = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) throw std::bad_alloc();
#ifdef MADV_NOHUGEPAGE
    if (size >= HUGE) madvise(data, size, MADV_NOHUGEPAGE);
#endif
    return static_cast<uint8_t*>(data);
  }

  template <typename Condition>
  void drop_oldest(std::unique_lock<std::mutex>& lock, Condition is_unwanted) {
    std::deque<Kept> dropped;
    while (!kept_.empty() && is_unwanted(kept_.front())) {
      kept_bytes_ -= kept_.front().size;
      dropped.push_back(kept_.front());
      kept_.pop_front();
    }
    lock.unlock();  // unmapping takes long
    for (const Kept& kept : dropped) munmap(kept.data, kept.size);
  }

  std::mutex mutex_;
  std::deque<Kept> kept_;  // the oldest first
  size_t kept_bytes_ = 0;
  size_t limit_ = size_t{1} << 30;
};

// Never destroyed: blocks may outlive static objects when the process ends.
Pool* the_pool = new Pool();

Pool& pool() { return *the_pool; }

}  // namespace

Block::Block(size_t size) : size_(size) {
  if (size >= SMALLEST_POOLED) {
    data_ = pool().take(rounded(size));
  } else if (size > 0) {
    size_t aligned = (size + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    data_ = static_cast<uint8_t*>(std::aligned_alloc(ALIGNMENT, aligned));
    if (!data_) throw std::bad_alloc();
  }
}

Block::Block(Block&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)),
      owner_(std::move(other.owner_)) {}

Block& Block::operator=(Block&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  std::swap(owner_, other.owner_);
  return *this;
}

void Block::use_huge_pages() {
#ifdef MADV_HUGEPAGE
  if (!owner_ && size_ >= HUGE) madvise(data_, rounded(size_), MADV_HUGEPAGE);
#endif
}

Block::~Block() {
  if (!data_ || owner_) return;
  if (size_ >= SMALLEST_POOLED) pool().give_back(data_, rounded(size_));
  else std::free(data_);
}

PoolUse pool_use() { return pool().use(); }
void set_pool_limit(size_t bytes) { pool().set_limit(bytes); }
void forget_pool() { the_pool = new Pool(); }
bool trim_pool(double seconds) {
  pool().trim(seconds);
  return pool().use().kept_bytes > 0;
}

}  // namespace gradwire
