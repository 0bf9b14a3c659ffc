// Tiles that were timed on this GPU. They precede the tables of tuning.h; torch_fattn/tuning/tuned_file.py
// keeps them in a file.
//
// Results are batch-invariant, so the summation order must not depend on the other sequences of a batch or on
// a cache's capacity. Rows of one kernel, dtype and head size therefore have the same keys per step at all
// lengths, and decode has one row for all lengths.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "problem.h"
#include "route.h"
#include "matrix_units.h"
#include "tuning.h"

namespace fattn {

inline constexpr int32_t kAnyLength = 0;

// For calls of one kernel and dtype whose larger head size is in [min_dim, max_dim]. Sizes that the kernel
// does not have are 0. A row of prefill_tensor has no sizes: it marks padded head sizes whose prefills were
// faster on matrix units, on a GPU without units for them and with this macOS, since that depends on its
// compiler. torch_fattn/tuning/tuned_file.py has the same names.
struct TunedRow {
  Kernel kernel = Kernel::kPrefill;
  DType dtype = DType::kFloat32;
  uint16_t min_dim = 0;
  uint16_t max_dim = 0;
  int32_t max_length = kAnyLength;  // of the rows of a prefill
  uint16_t row_fragments = 0;
  uint16_t row_groups = 0;
  uint16_t tile_keys = 0;
  uint16_t simdgroups = 0;
  uint16_t early_loads = 0;
  uint16_t min_chunk = 0;
  uint16_t threadgroups_per_core = 0;
  int macos = 0;  // of prefill_tensor: 26.2 as 2602

  bool operator==(const TunedRow&) const = default;
};

struct TunedRows {
  std::vector<TunedRow> rows;  // the first that matches wins
  std::string provenance;
  std::vector<TunedRoute> routes;
};

// Why the kernels cannot run with these rows; "" if they can. Faults are unknown sizes, too much threadgroup
// memory, and a summation order that depends on lengths.
std::string fault_of(const std::vector<TunedRow>& rows);

// The same for routes that were timed against torch. Faults are sizes or lengths that no such call has.
std::string fault_of(const std::vector<TunedRoute>& routes);

// Whether calls of this size were faster on matrix units, on this GPU and macOS.
bool are_units_faster(UnitsSize size, const DeviceFacts& device);

// `row` of the built-in table, or the sizes that were timed for such a call on this GPU.
PrefillRow tuned_or(const PrefillRow& row, Kernel kernel, const DeviceFacts& device, const Problem& p);
DecodeRow tuned_or(const DecodeRow& row, Kernel kernel, const DeviceFacts& device, const Problem& p);

}  // namespace fattn
