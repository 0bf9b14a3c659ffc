// Settings from the environment: SOFTMETAL_CHECK, SOFTMETAL_ORDER, SOFTMETAL_TENSOR_LAYOUT,
// SOFTMETAL_THREADS, SOFTMETAL_WATCHDOG.
#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <string>

#include "abi.h"

namespace {

uint32_t parse_checks(const char* text) {
  struct {
    const char* name;
    uint32_t bit;
  } const names[] = {{"race", SOFTMETAL_CHECK_RACE},
                     {"bounds", SOFTMETAL_CHECK_BOUNDS},
                     {"uninit", SOFTMETAL_CHECK_UNINIT},
                     {"bytes", SOFTMETAL_COUNT_BYTES},
                     {"distinct", SOFTMETAL_COUNT_DISTINCT}};
  uint32_t all = 0, checks = 0;
  for (const auto& n : names) all |= n.bit;
  std::string list = text;
  if (list.empty() || list == "0") return 0;
  if (list == "1" || list == "all") return all;
  for (size_t at = 0; at <= list.size();) {
    size_t end = list.find(',', at);
    std::string word = list.substr(at, end - at);
    uint32_t bit = 0;
    for (const auto& n : names)
      if (word == n.name) bit = n.bit;
    if (!bit)
      fprintf(stderr,
              "softmetal: SOFTMETAL_CHECK names an unknown check, '%s'; use race, bounds, uninit, bytes, "
              "distinct or 1\n",
              word.c_str());
    checks |= bit;
    if (end == std::string::npos) break;
    at = end + 1;
  }
  return checks;
}

void parse_order(const char* text, softmetal_settings& s) {
  if (!strcmp(text, "forward") || !*text) {
    s.order = SOFTMETAL_FORWARD;
  } else if (!strcmp(text, "reverse")) {
    s.order = SOFTMETAL_REVERSE;
  } else if (!strncmp(text, "random", 6) && (text[6] == ':' || !text[6])) {
    s.order = SOFTMETAL_RANDOM;
    s.seed = text[6] ? strtoull(text + 7, nullptr, 10) : 0;
  } else {
    fprintf(stderr, "softmetal: SOFTMETAL_ORDER is '%s'; use forward, reverse or random:SEED\n", text);
  }
}

constexpr uint32_t kFamilyOfM5 = 10;

// Reads "random:SEED".
bool is_random(const char* text, uint64_t& seed) {
  if (strncmp(text, "random:", 7) || !isdigit(text[7])) return false;
  char* end;
  const uint64_t number = strtoull(text + 7, &end, 10);
  if (*end) return false;
  seed = number;
  return true;
}

void parse_layout(const char* text, softmetal_settings& s) {
  if (!strcmp(text, "m5")) {
    s.tensor_layout = SOFTMETAL_LAYOUT_M5;
  } else if (!strcmp(text, "blocks8")) {
    s.tensor_layout = SOFTMETAL_LAYOUT_BLOCKS8;
  } else if (is_random(text, s.tensor_seed)) {
    s.tensor_layout = SOFTMETAL_LAYOUT_RANDOM;
  } else if (*text) {
    fprintf(stderr, "softmetal: SOFTMETAL_TENSOR_LAYOUT is '%s'; use m5, blocks8 or random:SEED\n", text);
  }
}

constexpr uint32_t kWatchdogSeconds = 60;

uint32_t parse_watchdog(const char* text) {
  char* end = nullptr;
  double seconds = strtod(text, &end);
  if (end != text && !*end && seconds >= 0 && seconds < 1e6) return static_cast<uint32_t>(seconds * 1000);
  fprintf(stderr, "softmetal: SOFTMETAL_WATCHDOG is '%s'; use a number of seconds, 0 for no limit\n", text);
  return kWatchdogSeconds * 1000;
}

softmetal_settings from_environment() {
  softmetal_settings s{};
  s.watchdog_ms = kWatchdogSeconds * 1000;
  if (const char* text = getenv("SOFTMETAL_WATCHDOG")) s.watchdog_ms = parse_watchdog(text);
  if (const char* text = getenv("SOFTMETAL_CHECK")) s.checks = parse_checks(text);
  if (const char* text = getenv("SOFTMETAL_ORDER")) parse_order(text, s);
  const char* family = getenv("SOFTMETAL_GPU_FAMILY");
  const bool is_m5 = family && strtoul(family, nullptr, 10) >= kFamilyOfM5;
  s.tensor_layout = is_m5 ? SOFTMETAL_LAYOUT_M5 : SOFTMETAL_LAYOUT_BLOCKS8;
  if (const char* text = getenv("SOFTMETAL_TENSOR_LAYOUT")) parse_layout(text, s);
  if (const char* text = getenv("SOFTMETAL_THREADS"))
    s.threads = static_cast<uint32_t>(strtoul(text, nullptr, 10));
  return s;
}

}  // namespace

extern "C" softmetal_settings* softmetal_current_settings(void) {
  static softmetal_settings settings = from_environment();
  return &settings;
}
