// Kernels that do not end as errors of the dispatch.
#pragma once

#include <time.h>

namespace softmetal {

struct Worker;

// While it lives, a threadgroup of this OS thread that takes more processor time than the settings allow is
// stopped, with the line that it was at. Costs a running kernel nothing: a timer of the thread's processor
// time interrupts it a few times in that span.
class Watchdog {
 public:
  Watchdog(Worker&, unsigned milliseconds);  // 0: does nothing
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;

 private:
  bool armed_ = false;
  timer_t timer_{};
};

}  // namespace softmetal
