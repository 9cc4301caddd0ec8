// Looks for a moment before a thread goes to sleep.
//
// Sleeping and being woken costs more than serving a small call: the core has to wake up as well, or is shared with
// the thread that wakes it, and the caches have gone cold. So a thread that waits keeps looking for a moment, and
// yields the core to any other thread that wants it. One thread of a process spins at a time, and only where
// spinning was useful lately.

#pragma once

#include <sched.h>

#include <algorithm>
#include <atomic>

#include "process.hpp"

namespace gradwire {

// Of one place where a thread waits; for one thread at a time.
class Spinning {
 public:
  // Returns when `is_ready` does so, or when it is better to sleep. Returns whether it was.
  template <typename Condition>
  bool operator()(Condition is_ready) {
    if (is_ready()) return true;  // not counted as useful: on busy cores, it was so before this thread ran
    if (skipped_ < to_skip_) {
      skipped_++;
      return false;
    }
    if (is_any_.exchange(true)) return false;
    skipped_ = 0;
    bool was_useful = spin(is_ready);
    is_any_ = false;
    to_skip_ = was_useful ? 0 : std::min(2 * to_skip_ + 1, MOST_SKIPPED);
    return was_useful;
  }

 private:
  static constexpr double SECONDS = 0.001;
  // A thread that was descheduled for longer than this after yielding is delaying other threads.
  static constexpr double CROWDED_SECONDS = 0.0002;
  // The most waits that do without spinning, after spinning was useless several times.
  static constexpr int MOST_SKIPPED = 63;
  inline static std::atomic<bool> is_any_{false};

  template <typename Condition>
  bool spin(Condition is_ready) {
    double now = monotonic_now(), give_up_at = now + SECONDS;
    while (true) {
      sched_yield();
      double before = now;
      now = monotonic_now();
      if (now > give_up_at || now - before > CROWDED_SECONDS) return false;
      if (is_ready()) return true;
    }
  }

  int skipped_ = 0, to_skip_ = 0;
};

}  // namespace gradwire
