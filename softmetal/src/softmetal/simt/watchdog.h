// Turns kernels that do not end into errors of the dispatch.
#pragma once

#include <time.h>

namespace softmetal {

struct Worker;

// During its lifetime, a threadgroup on this OS thread that exceeds the processor time in the settings is
// stopped, and its line is reported. A running kernel pays nothing: a timer of the thread's processor time
// interrupts it a few times in that span.
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
