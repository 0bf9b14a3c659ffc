// libdispatch's serial queues: work runs on the calling thread while it owns the queue.
#import <Foundation/Foundation.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <string>
#include <thread>

#include "dispatch.h"
#include "validation.h"

struct dispatch_queue_s {
  std::mutex mutex;
  std::atomic<std::thread::id> owner{};
  std::string label;
};

namespace softmetal {
bool on_queue(dispatch_queue_t queue) { return queue->owner.load() == std::this_thread::get_id(); }
}  // namespace softmetal

namespace {

class Ownership {
 public:
  explicit Ownership(dispatch_queue_t queue) : queue_(queue) {
    if (softmetal::on_queue(queue))
      softmetal::violated("dispatch_sync on queue '", queue->label,
                          "' from a block of that queue would wait for itself");
    queue_->mutex.lock();
    queue_->owner.store(std::this_thread::get_id());
  }
  ~Ownership() {
    queue_->owner.store({});
    queue_->mutex.unlock();
  }

 private:
  dispatch_queue_t queue_;
};

// As in Apple's libdispatch, an exception that leaves a block ends the process.
template <class Work>
void run_without_exceptions(Work&& work) {
  @autoreleasepool {
    try {
      work();
    } catch (const std::exception& error) {
      fprintf(stderr, "softmetal: an exception left a dispatch block: %s\n", error.what());
      abort();
    }
  }
}

}  // namespace

extern "C" {

dispatch_queue_t dispatch_queue_create(const char* label, dispatch_queue_attr_t) {
  auto* queue = new dispatch_queue_s;
  queue->label = label ? label : "";
  return queue;
}
const char* dispatch_queue_get_label(dispatch_queue_t queue) { return queue->label.c_str(); }
void dispatch_release(dispatch_queue_t queue) { delete queue; }

void dispatch_sync(dispatch_queue_t queue, dispatch_block_t block) {
  Ownership ownership(queue);
  run_without_exceptions([&] { block(); });
}
void dispatch_async(dispatch_queue_t queue, dispatch_block_t block) { dispatch_sync(queue, block); }
void dispatch_sync_f(dispatch_queue_t queue, void* context, dispatch_function_t work) {
  Ownership ownership(queue);
  run_without_exceptions([&] { work(context); });
}
void dispatch_async_f(dispatch_queue_t queue, void* context, dispatch_function_t work) {
  dispatch_sync_f(queue, context, work);
}
void dispatch_once_f(dispatch_once_t* predicate, void* context, dispatch_function_t function) {
  static std::recursive_mutex mutex;
  std::lock_guard lock(mutex);
  if (*predicate) return;
  function(context);
  *predicate = 1;
}
void dispatch_once(dispatch_once_t* predicate, dispatch_block_t block) {
  dispatch_once_f(predicate, &block, [](void* context) { (*static_cast<dispatch_block_t*>(context))(); });
}
}
