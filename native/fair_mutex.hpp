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
  // While it exists, a thread wants the mutex, and others let it go first. It ends when that thread has the mutex.
  class Claim {
   public:
    explicit Claim(FairMutex& mutex) : mutex_(mutex) { mutex_.claims_++; }
    ~Claim() {
      mutex_.claims_--;
      mutex_.ended_claims_++;
      if (!mutex_.letting_others_first_) return;
      std::lock_guard lock(mutex_.turns_);
      mutex_.has_ended_.notify_all();
    }
    Claim(const Claim&) = delete;
    Claim& operator=(const Claim&) = delete;

   private:
    FairMutex& mutex_;
  };

  void lock() {
    if (mutex_.try_lock()) return;
    Claim claim(*this);
    mutex_.lock();
  }
  bool try_lock() { return mutex_.try_lock(); }
  void unlock() { mutex_.unlock(); }

  // Returns when the mutex was free. For threads that have a claim, and take it with `try_lock`.
  void wait_until_free() { std::lock_guard lock(mutex_); }

  // To be called before `lock` by a thread that takes the mutex again and again. If others claim it, returns when one
  // of them has had it. That takes long where the cores are busy, and not for ever: the other may be waiting for
  // something that this thread has.
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
  std::atomic<int> claims_{0}, letting_others_first_{0};
  std::atomic<unsigned> ended_claims_{0};
  std::mutex turns_;  // for `has_ended_` alone
  std::condition_variable has_ended_;
};

}  // namespace gradwire
