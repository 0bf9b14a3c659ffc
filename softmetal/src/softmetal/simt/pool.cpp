// The persistent pool of OS threads.
#include "pool.h"

#include <pthread.h>

#include <condition_variable>
#include <mutex>
#include <thread>

namespace softmetal {
namespace {

class Pool {
 public:
  void run(uint32_t helpers, void (*body)(void*, uint32_t), void* context) {
    if (helpers) {
      std::lock_guard lock(mutex_);
      while (started_ < helpers) std::thread(&Pool::serve, this, ++started_).detach();
      body_ = body;
      context_ = context;
      wanted_ = helpers;
      generation_++;
      wake_.notify_all();
    }
    body(context, 0);
    if (helpers) {
      std::unique_lock lock(mutex_);
      wanted_ = 0;  // helpers that wake up only now go back to sleep
      idle_.wait(lock, [&] { return !active_; });
    }
  }

 private:
  void serve(uint32_t slot) {
    std::unique_lock lock(mutex_);
    for (uint64_t seen = 0;;) {
      wake_.wait(lock, [&] { return generation_ != seen && slot <= wanted_; });
      seen = generation_;
      active_++;
      lock.unlock();
      body_(context_, slot);
      lock.lock();
      if (!--active_) idle_.notify_one();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_, idle_;
  void (*body_)(void*, uint32_t) = nullptr;
  void* context_ = nullptr;
  uint32_t started_ = 0, wanted_ = 0, active_ = 0;
  uint64_t generation_ = 0;
};

// Never destroyed: detached threads wait in it. A forked child has none of the threads and gets a new one.
Pool* pool = nullptr;

Pool& the_pool() {
  static std::once_flag once;
  std::call_once(once, [] { pthread_atfork(nullptr, nullptr, [] { pool = nullptr; }); });
  if (!pool) pool = new Pool;
  return *pool;
}

}  // namespace

void run_on_threads(uint32_t helpers, void (*body)(void*, uint32_t), void* context) {
  the_pool().run(helpers, body, context);
}

}  // namespace softmetal
