// What threads of this process share: the clock, and how to tell a forked process.

#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace gradwire {

inline double monotonic_now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Counted by `after_fork`. What was made in the parent process is void in a forked one: its locks may be held by
// threads that do not exist there, and its connections are still the parent's.
inline std::atomic<uint64_t> forks{0};

}  // namespace gradwire
