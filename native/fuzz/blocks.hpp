#pragma once

#include <cstddef>

namespace gradwire {

// For blocks above this size there is no memory.
extern size_t fuzz_largest_block;

}  // namespace gradwire
