// Blocks as in ../memory.cpp, but each of just its size and by malloc: a sanitizer sees every byte beyond them, which
// it does not in memory that is mapped and used again. And memory that ends when the fuzz target says so.

#include "../memory.hpp"

#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

#include "fuzz/blocks.hpp"

namespace gradwire {

size_t fuzz_largest_block = SIZE_MAX;

Block::Block(size_t size) : size_(size) {
  if (!size) return;
  if (size > fuzz_largest_block) throw std::bad_alloc();
  data_ = static_cast<uint8_t*>(std::malloc(size));
  if (!data_) throw std::bad_alloc();
  std::memset(data_, 0xA5, size);  // what is not written to differs from what was sent
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

void Block::use_huge_pages() {}

Block::~Block() {
  if (!owner_) std::free(data_);
}

}  // namespace gradwire
