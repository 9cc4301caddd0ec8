// Memory that messages are sent from, and arrive in.

#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>

namespace gradwire {

// Memory of somebody else that is sent as an attachment, and what keeps it alive. The last owner may be dropped
// on any thread.
struct Attachment {
  const uint8_t* data = nullptr;
  size_t size = 0;
  std::shared_ptr<const void> owner;
};

// Memory that an attachment arrives in. It is used again: the system takes much longer to map fresh memory
// than to copy into memory that is mapped.
class Block {
 public:
  Block() = default;
  // Not initialized. Throws std::bad_alloc.
  explicit Block(size_t size);
  // Memory of somebody else.
  Block(uint8_t* data, size_t size, std::shared_ptr<const void> owner)
      : data_(data), size_(size), owner_(std::move(owner)) {}
  Block(Block&& other) noexcept;
  Block& operator=(Block&& other) noexcept;
  ~Block();

  uint8_t* data() const { return data_; }
  size_t size() const { return size_; }
  // From now on the memory comes in huge pages, if it is large. Not from the first byte on: that would take as much as
  // a whole page, for whoever announces an attachment and sends a byte of it.
  void use_huge_pages();

 private:
  uint8_t* data_ = nullptr;
  size_t size_ = 0;
  std::shared_ptr<const void> owner_;
};

// What the process keeps of memory that blocks no longer use.
struct PoolUse {
  size_t kept_bytes = 0;
  size_t limit = 0;
};
PoolUse pool_use();
void set_pool_limit(size_t bytes);
// Gives memory back to the system that has not been used again for `seconds`. Returns whether any is left.
bool trim_pool(double seconds);
// To be called in a forked process, where threads that do not exist may hold the lock of the pool.
void forget_pool();

}  // namespace gradwire
