// One dispatch: kernel, settings and findings.
#pragma once

#include <atomic>
#include <mutex>
#include <string>
#include <vector>

#include "abi.h"

namespace softmetal {

class Checker;
struct Module;

// The checks that report findings, as opposed to counting bytes.
inline constexpr uint32_t kFindingChecks =
    SOFTMETAL_CHECK_RACE | SOFTMETAL_CHECK_BOUNDS | SOFTMETAL_CHECK_UNINIT;

struct Dispatch {
  Dispatch(const softmetal_launch& launch, const softmetal_settings& settings)
      : launch(launch), settings(settings) {}

  const softmetal_launch& launch;
  softmetal_settings settings;
  const Module* module = nullptr;
  Checker* checker = nullptr;
  uint32_t threadgroups = 0;
  std::atomic<uint32_t> next{0};
  std::atomic<bool> stop{false};
  std::mutex mutex;  // guards the rest
  std::vector<std::string> errors;
  softmetal_counters counters{};
};

}  // namespace softmetal
