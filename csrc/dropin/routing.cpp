#include "routing.h"

#include <array>
#include <atomic>
#include <mutex>
#include <utility>

#include <ATen/core/Dict.h>
#include <torch/library.h>

namespace fattn {
namespace {

constexpr size_t kReasons = static_cast<size_t>(Reason::kCount);
constexpr size_t kWays = static_cast<size_t>(Taken::kCount);

constexpr std::array<const char*, kWays> kWayNames = {"prefill", "decode", "training",
                                                      "packed",  "paged",  "traced"};
constexpr std::array<const char*, kReasons> kReasonNames = {
    "none",    "gradients",     "mask_gradient", "head_dim_gradient", "small_training",  "forward_mode",
    "dropout", "nested",        "layout",        "subclass",          "transform",       "rank",
    "device",  "dtype",         "mask_dtype",    "mask_with_causal",  "head_dim",        "shapes",
    "scale",   "unknown_sizes", "math_asked",    "no_kernel",         "torch_is_faster", "refused"};

std::array<std::atomic<int64_t>, kWays> taken_counts{};
std::atomic<int64_t> bytes_saved{0};
std::array<std::atomic<int64_t>, kReasons> reason_counts{};
std::array<std::atomic<int64_t>, kReasons> traced_reason_counts{};
std::mutex examples_mutex;
std::array<std::string, kReasons>& examples() {
  static auto& all = *new std::array<std::string, kReasons>;
  return all;
}

c10::Dict<std::string, int64_t> routed() {
  c10::Dict<std::string, int64_t> counts;
  for (size_t i = 0; i < kWays; ++i) counts.insert(kWayNames[i], taken_counts[i].load());
  return counts;
}

c10::Dict<std::string, int64_t> fallbacks(bool traced) {
  c10::Dict<std::string, int64_t> counts;
  for (size_t i = 1; i < kReasons; ++i) {
    counts.insert(kReasonNames[i], (traced ? traced_reason_counts : reason_counts)[i].load());
  }
  return counts;
}

c10::Dict<std::string, std::string> fallback_examples() {
  c10::Dict<std::string, std::string> texts;
  const std::lock_guard lock(examples_mutex);
  for (size_t i = 1; i < kReasons; ++i) texts.insert(kReasonNames[i], examples()[i]);
  return texts;
}

std::string reason_name(int64_t reason) {
  TORCH_CHECK_INDEX(reason >= 0 && reason < static_cast<int64_t>(kReasons), "no reason has number ", reason);
  return kReasonNames[static_cast<size_t>(reason)];
}

// For calls that Python sends to torch before they reach our ops.
void count_fallback(const std::string& name, const std::string& example) {
  for (size_t i = 1; i < kReasons; ++i) {
    if (name == kReasonNames[i]) count(static_cast<Reason>(i), /*traced=*/false, [&] { return example; });
  }
}

void reset() {
  const std::lock_guard lock(examples_mutex);
  for (auto& n : taken_counts) n = 0;
  bytes_saved = 0;
  for (auto& n : reason_counts) n = 0;
  for (auto& n : traced_reason_counts) n = 0;
  for (auto& text : examples()) text.clear();
}

}  // namespace

void count(Taken taken) { taken_counts[static_cast<size_t>(taken)].fetch_add(1, std::memory_order_relaxed); }

void count_training(int64_t saved) {
  count(Taken::kTraining);
  bytes_saved.fetch_add(saved, std::memory_order_relaxed);
}

void count(Reason reason, bool traced, c10::function_ref<std::string()> example) {
  const size_t i = static_cast<size_t>(reason);
  auto& counts = traced ? traced_reason_counts : reason_counts;
  if (counts[i].fetch_add(1, std::memory_order_relaxed) > 0) return;
  std::string text = example();
  const std::lock_guard lock(examples_mutex);
  examples()[i] = std::move(text);
}

TORCH_LIBRARY_FRAGMENT(fattn, library) {
  library.def("_routed() -> Dict(str, int)", routed);
  library.def("_bytes_saved() -> int", [] { return bytes_saved.load(); });
  library.def("_fallbacks(bool traced) -> Dict(str, int)", fallbacks);
  library.def("_fallback_examples() -> Dict(str, str)", fallback_examples);
  library.def("_reason_name(int reason) -> str", reason_name);
  library.def("_count_fallback(str name, str example) -> ()", count_fallback);
  library.def("_reset_routing() -> ()", reset);
}

}  // namespace fattn
