#include "gate.h"

#include <cstdio>

#include "../plan/tuned.h"

namespace fattn {
namespace {

// As in MLX: "applegpu_g17s" is an M5; "p" is a phone, whose units begin one generation later.
bool has_units(const std::string& architecture) {
  int generation = 0;
  char size = 0;
  if (std::sscanf(architecture.c_str(), "applegpu_g%d%c", &generation, &size) != 2) return false;
  constexpr int kFirst = 17;
  return generation >= (size == 'p' ? kFirst + 1 : kFirst);
}

std::string version_text(int version) {
  return std::to_string(version / 100) + "." + std::to_string(version % 100);
}

std::string why_system_is_not(const DeviceFacts& device) {
  const std::string needed = "macOS " + version_text(kMinUnitsMacos) + " or newer";
  if (device.macos == 0) return "this system is not " + needed;
  return "macOS " + version_text(device.macos) + " is not " + needed;
}

}  // namespace

std::string why_units_are_off(const DeviceFacts& device, UnitsSetting setting) {
  if (setting == UnitsSetting::kOff) return "FATTN_TENSOR=0";
  const bool by_hand = setting != UnitsSetting::kAuto;
  const bool is_other_system = device.macos == 0;
  if (device.macos < kMinUnitsMacos && !(is_other_system && by_hand)) return why_system_is_not(device);
  if (by_hand) return "";
  if (!device.metal4) return "the GPU does not support Metal 4";
  const std::string unless = "; `python -m torch_fattn tune` turns them on for prefills that gain";
  if (device.family < kMinUnitsFamily)
    return "GPUs before M5 have no units for them: this is of Apple family " + std::to_string(device.family) +
           ", an M5 of " + std::to_string(kMinUnitsFamily) + unless;
  if (!has_units(device.architecture))
    return "the GPU's architecture, '" + device.architecture + "', is not that of an M5 or newer" + unless;
  return "";
}

bool passes_gate(UnitsSize size, const DeviceFacts& device, UnitsSetting setting) {
  if (why_units_are_off(device, setting).empty()) return true;
  const bool is_by_hand = setting != UnitsSetting::kAuto;
  const bool has_system = device.macos >= kMinUnitsMacos;
  return device.metal4 && has_system && !is_by_hand && are_units_faster(size, device);
}

}  // namespace fattn
