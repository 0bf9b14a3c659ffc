// GPU properties that the planner reads. The Metal executor fills them in; tests and `explain` set their own.
#pragma once

#include <cstdint>
#include <string>

#include "matrix_units.h"

namespace fattn {

struct TunedRows;

struct DeviceFacts {
  std::string name = "Apple M1";
  int family = 7;  // n of MTLGPUFamilyApple<n>
  int cores = 8;   // 0: unknown, as in a virtual machine
  int64_t max_threadgroup_bytes = 32768;
  int64_t working_set_bytes = 5726630912;  // recommendedMaxWorkingSetSize; the default is an 8 GB machine's
  bool metal4 = false;                     // supports MTLGPUFamilyMetal4
  std::string architecture;                // "applegpu_g13g"; "": unknown
  const TunedRows* tuned = nullptr;        // timed on this exact GPU (tuned.h); lives as long as the process
  UnitsStates units;                       // matrix units (matrix_units.h)
  bool only_prefills_on_units = false;     // `tune` enabled them before M5, and timed only prefills

  // Versions of macOS and torch: they determine how torch's own attention runs (route.h).
  int macos = 0;              // 26.2 as 2602; 0: another system
  int torch = 0;              // 2.14 as 214
  bool torch_metal4 = true;   // false: PYTORCH_MPS_METAL_VERSION requests an older language
  bool torch_prefill = true;  // false: PYTORCH_MPS_DISABLE_PREFILL_ATTENTION

  // M3 and later; older GPUs emulate its arithmetic.
  bool multiplies_bfloat() const { return family >= 9; }
};

}  // namespace fattn
