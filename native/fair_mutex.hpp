// A mutex that can be shared with a thread that takes it again and again.
//
// A plain mutex is given to whoever asks first when it is free. The thread that moves a large message asks a
// microsecond after it has let go, and one that was woken for it asks later.

#pragma once

#include <sched.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>

namespace gradwire {

class FairMutex {
 public:
  void lock() {
    if (mutex_.try_lock()) return;
    claims_++;
    mutex_.lock();
    claims_--;
    ended_claims_++;
    if (!letting_others_first_) return;
    std::lock_guard lock(turns_);
    has_ended_.notify_all();
  }
  bool try_lock() { return mutex_.try_lock(); }
  void unlock() { mutex_.unlock(); }

  // To be called before `lock` by a thread that takes the mutex again and again. If others wait for it, returns when one
  // of them has it: on busy cores, that may take long.
  void let_others_first() {
    for (int yields = 0; yields < MOST_YIELDS; yields++) {
      if (!claims_) return;
      sched_yield();
    }
    unsigned ended = ended_claims_;
    std::unique_lock lock(turns_);
    letting_others_first_++;
    has_ended_.wait_for(lock, LONGEST_WAIT, [&] { return !claims_ || ended_claims_ != ended; });
    letting_others_first_--;
  }

 private:
  static constexpr int MOST_YIELDS = 10;
  static constexpr std::chrono::milliseconds LONGEST_WAIT{5};
  std::mutex mutex_;
  std::atomic<int> claims_{0};            // threads that wait for it
  std::atomic<unsigned> ended_claims_{0};  // how often one of them got it
  std::atomic<int> letting_others_first_{0};
  std::mutex turns_;  // for `has_ended_` alone
  std::condition_variable has_ended_;
};

}  // namespace gradwire
