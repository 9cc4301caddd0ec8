// A mutex that can be shared with a thread that takes it again and again.
//
// A plain mutex is given to whoever asks first when it is free. The thread that moves a large message asks a
// microsecond after it has let go, and one that was woken for it asks later.

#pragma once

#include <sched.h>

#include <atomic>
#include <mutex>

namespace gradwire {

class FairMutex {
 public:
  void lock() {
    if (mutex_.try_lock()) return;
    waiting_++;
    mutex_.lock();
    waiting_--;
  }
  bool try_lock() { return mutex_.try_lock(); }
  void unlock() { mutex_.unlock(); }

  // To be called before `lock` by a thread that takes the mutex again and again.
  void let_others_first() {
    for (int yields = 0; waiting_ && yields < MOST_YIELDS; yields++) sched_yield();
  }

 private:
  static constexpr int MOST_YIELDS = 100;
  std::mutex mutex_;
  std::atomic<int> waiting_{0};
};

}  // namespace gradwire
