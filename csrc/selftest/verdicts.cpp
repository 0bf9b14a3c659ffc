#include "verdicts.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include <c10/util/Exception.h>

#include "verdict_file.h"

namespace fattn {
namespace {

constexpr const char* kByHand = "FATTN_TENSOR, without a self-test";

struct Verdicts {
  std::mutex mutex;  // of the other members
  UnitsSetting setting = UnitsSetting::kAuto;
  std::string wrong_setting;
  std::string folder;
  std::vector<std::pair<UnitsSize, Verdict>> known;
  std::vector<UnitsSize> delayed;

  bool is_by_hand() const { return setting != UnitsSetting::kAuto; }

  Verdict of(UnitsSize size, const DeviceFacts& gpu) {
    for (const auto& [one, verdict] : known) {
      if (one == size) return verdict;
    }
    if (is_by_hand()) {
      const bool registers = setting == UnitsSetting::kRegisters && !size.is_latent();
      return {registers ? UnitsState::kRegisters : UnitsState::kThreadgroup, kByHand};
    }
    if (!wrong_setting.empty()) return {};
    const auto kept = read_verdict(folder, size, gpu);
    if (kept) known.emplace_back(size, *kept);
    return kept.value_or(Verdict{});
  }
};
Verdicts& verdicts() {
  static auto& all = *new Verdicts;
  return all;
}
std::atomic<uint64_t> changes{0};

template <typename Change>
void change(const Change& make) {
  Verdicts& all = verdicts();
  std::lock_guard lock(all.mutex);
  make(all);
  ++changes;
}

// Stores a verdict in this process and, if it is lasting and not from a setting, in a file.
void settle(UnitsSize size, const DeviceFacts& gpu, const Verdict& verdict) {
  change([&](Verdicts& all) {
    std::erase_if(all.known, [&](const auto& known) { return known.first == size; });
    all.known.emplace_back(size, verdict);
    if (verdict.lasting && !all.is_by_hand()) write_verdict(all.folder, size, gpu, verdict);
  });
}

}  // namespace

void use_units_setting(UnitsSetting setting, std::string wrong) {
  change([&](Verdicts& all) {
    all.setting = setting;
    all.wrong_setting = std::move(wrong);
    all.known.clear();
  });
}

void check_units_setting() {
  Verdicts& all = verdicts();
  std::lock_guard lock(all.mutex);
  TORCH_CHECK_VALUE(all.wrong_setting.empty(), all.wrong_setting);
}

void use_verdict_folder(std::string folder) {
  change([&](Verdicts& all) {
    all.folder = std::move(folder);
    all.known.clear();
  });
}

void add_units_states(DeviceFacts& gpu) {
  for (const UnitsSize size : all_units_sizes()) {
    if (passes_gate(size, gpu)) gpu.units.set(size, verdict_of(size, gpu).state);
  }
  gpu.only_prefills_on_units = gpu.units.any() && !why_units_are_off(gpu).empty();
}

uint64_t count_of_verdicts() { return changes; }

std::string why_units_are_off(const DeviceFacts& gpu) {
  Verdicts& all = verdicts();
  std::lock_guard lock(all.mutex);
  return why_units_are_off(gpu, all.setting);
}

bool passes_gate(UnitsSize size, const DeviceFacts& gpu) {
  Verdicts& all = verdicts();
  std::lock_guard lock(all.mutex);
  return passes_gate(size, gpu, all.setting);
}

Verdict verdict_of(UnitsSize size, const DeviceFacts& gpu) {
  Verdicts& all = verdicts();
  std::lock_guard lock(all.mutex);
  return all.of(size, gpu);
}

void test_size(UnitsSize size, const DeviceFacts& gpu) {
  if (gpu.units.of(size) != UnitsState::kUntested) return;
  check_units_setting();
  static auto& testing = *new std::mutex;
  std::lock_guard one_at_a_time(testing);
  if (verdict_of(size, gpu).state == UnitsState::kUntested) settle(size, gpu, run_self_test(size, gpu));
}

void delay_test(UnitsSize size) {
  check_units_setting();
  Verdicts& all = verdicts();
  std::lock_guard lock(all.mutex);
  const bool is_known = std::find(all.delayed.begin(), all.delayed.end(), size) != all.delayed.end();
  if (!is_known) all.delayed.push_back(size);
}

void test_delayed_sizes(const DeviceFacts& gpu) {
  std::vector<UnitsSize> delayed;
  {
    Verdicts& all = verdicts();
    std::lock_guard lock(all.mutex);
    delayed = std::exchange(all.delayed, {});
  }
  for (const UnitsSize size : delayed) test_size(size, gpu);
}

bool compiles(const Plan& plan, UnitsSize size, const DeviceFacts& gpu) {
  const Fault fault = compiler_fault(plan);
  if (!fault) return true;
  const Verdict before = verdict_of(size, gpu);
  const std::string why = std::string(name_of(before.state)) + ": " + fault.why;
  if (before.why == kByHand && before.state == UnitsState::kRegisters) {
    settle(size, gpu, {UnitsState::kThreadgroup, std::string(kByHand) + "; " + why});
  } else {
    settle(size, gpu, {UnitsState::kOff, why, fault.lasting});
  }
  return false;
}

}  // namespace fattn
