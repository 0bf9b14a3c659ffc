#include "tuned.h"

#include <algorithm>
#include <initializer_list>
#include <iterator>
#include <variant>

#include "planners.h"

namespace fattn {
namespace {

bool is_decode(Kernel kernel) {
  return kernel == Kernel::kDecode || kernel == Kernel::kDecodeWide || kernel == Kernel::kDecodeVector;
}
bool is_wide(Kernel kernel) { return kernel == Kernel::kPrefillWide || kernel == Kernel::kDecodeWide; }

// Upper bound of the rows of a sequence, as prefill packs them.
int64_t length_of(const Problem& p) {
  return p.packed ? max_sequence_rows(p) * (p.q_heads / p.kv_heads) : p.q_len;
}

const TunedRow* find(const DeviceFacts& device, Kernel kernel, const Problem& p) {
  // A quantised cache was not timed.
  if (device.tuned == nullptr || p.kv_format != kKvFloat) return nullptr;
  const int64_t dim = std::max(p.head_dim, p.value_dim);
  for (const TunedRow& row : device.tuned->rows) {
    const bool matches = row.kernel == kernel && row.dtype == p.dtype && row.min_dim <= dim &&
                         dim <= row.max_dim &&
                         (row.max_length == kAnyLength || length_of(p) <= row.max_length);
    if (matches) return &row;
  }
  return nullptr;
}

bool is_one_of(int64_t value, std::initializer_list<int64_t> allowed) {
  return std::find(allowed.begin(), allowed.end(), value) != allowed.end();
}

// The static_asserts of the kernels and their fragments require these sizes.
const char* fault_of_sizes(const TunedRow& row) {
  if (row.kernel == Kernel::kPrefillTensor) {
    const TunedRow scope{.kernel = row.kernel,
                         .dtype = row.dtype,
                         .min_dim = row.min_dim,
                         .max_dim = row.max_dim,
                         .macos = row.macos};
    return row == scope ? nullptr : "a row of prefill_tensor has no sizes and is for all lengths";
  }
  if (!is_one_of(row.tile_keys, {8, 16, 32})) return "tile_keys is not 8, 16 or 32";
  if (!is_one_of(row.simdgroups, {2, 4, 8, 16})) return "simdgroups is not 2, 4, 8 or 16";
  if (is_simdgroup_prefill(row.kernel)) {
    if (!is_one_of(row.row_fragments, {1, 2})) return "row_fragments is not 1 or 2";
    const bool groups =
        row.kernel == Kernel::kPrefillWide ? is_one_of(row.row_groups, {1, 2}) : row.row_groups == 0;
    if (!groups) return "row_groups is not 1 or 2 (prefill_wide) or 0 (prefill)";
    if (row.early_loads > 1) return "early_loads is not 0 or 1";
    if (row.min_chunk != 0 || row.threadgroups_per_core != 0) return "a prefill has no chunks";
    return nullptr;
  }
  if (row.row_fragments != 0 || row.row_groups != 0 || row.early_loads != 0) {
    return "row_fragments, row_groups and early_loads belong to prefill";
  }
  if (row.max_length != kAnyLength) return "decode sizes cannot depend on the length";
  if (row.kernel == Kernel::kDecodeVector && row.tile_keys != kSimdWidth) return "tile_keys is not 32";
  const int64_t unit = row.kernel == Kernel::kDecodeWide ? row.tile_keys : row.tile_keys * row.simdgroups;
  if (row.min_chunk == 0 || row.min_chunk % unit != 0 || row.min_chunk > kLargeChunk) {
    return "min_chunk is not a multiple of the keys of a step, up to 512";
  }
  if (row.threadgroups_per_core < 1 || row.threadgroups_per_core > 16) {
    return "threadgroups_per_core is not between 1 and 16";
  }
  return nullptr;
}

bool has_units_size(const TunedRow& row) {
  return std::any_of(kUnitsDims.begin(), kUnitsDims.end(),
                     [&](uint16_t dim) { return row.min_dim <= dim && dim <= row.max_dim; });
}

const char* fault_of_scope(const TunedRow& row) {
  const bool is_of_units = row.kernel == Kernel::kPrefillTensor;
  if (is_of_units != (row.macos != 0)) return "a row of prefill_tensor, and no other, names its macOS";
  if (is_of_units) {
    if (row.dtype != DType::kFloat16 && row.dtype != DType::kBFloat16)
      return "tensor operations are for float16 and bfloat16";
    return has_units_size(row) && row.max_dim <= kUnitsDims.back()
               ? nullptr
               : "the kernel does not support these head sizes";
  }
  if (!is_simdgroup_prefill(row.kernel) && !is_decode(row.kernel)) return "the kernel has no tiles";
  if (!is_float(row.dtype)) return "the dtype is not float32, float16 or bfloat16";
  const int64_t least = is_wide(row.kernel) ? kMaxRowDim + 1 : 1;
  const int64_t most = is_wide(row.kernel)                   ? kMaxHeadDim
                       : row.kernel == Kernel::kDecodeVector ? kMaxVectorDim
                                                             : kMaxRowDim;
  if (row.min_dim < least || row.max_dim < row.min_dim || row.max_dim > most) {
    return "the kernel does not support these head sizes";
  }
  if (row.max_length < 0) return "max_length is negative";
  return nullptr;
}

// The largest call of the row.
Problem largest_call(const TunedRow& row, int64_t group_size) {
  Problem p;
  p.op = is_decode(row.kernel) ? Op::kDecode : Op::kPrefill;
  p.dtype = row.dtype;
  p.batch = p.kv_heads = 1;
  p.q_len = is_decode(row.kernel) ? 1 : 1024;
  p.q_heads = group_size;
  p.kv_len = 1;
  p.head_dim = p.value_dim = row.max_dim / kHeadDimMultiple * kHeadDimMultiple;
  return p;
}

// Checks the threadgroup memory that the planner computes.
const char* fault_of_memory(const TunedRow& row) {
  DeviceFacts device;
  const TunedRows alone{{row}, ""};
  device.tuned = &alone;
  for (const int64_t group_size :
       {1, 2, 3, 9, 17, 33}) {  // rows of decode_vector, and one to more row groups
    const auto planned = plan(largest_call(row, group_size), device);
    const Plan* plan = std::get_if<Plan>(&planned);
    if (plan == nullptr) return "the kernel does not support these head sizes";
    if (plan->passes[0].threadgroup_bytes > device.max_threadgroup_bytes) {
      return "the tile takes more than 32 KiB of threadgroup memory";
    }
  }
  return nullptr;
}

// Identifies a prefill's summation order: keys per step, and simdgroups that divide a product's columns.
int64_t order_of(const TunedRow& row) {
  const bool divides = row.kernel == Kernel::kPrefillWide;
  const int shares = divides ? sum_shares(row.simdgroups / row.row_groups, row.tile_keys / kFragment) : 1;
  return row.tile_keys * 1000 + shares;
}

bool overlap(const TunedRow& a, const TunedRow& b) {
  return a.kernel == b.kernel && a.dtype == b.dtype && a.min_dim <= b.max_dim && b.min_dim <= a.max_dim;
}

// A row for some lengths precedes one for all lengths, with the same head sizes and summation order.
const char* fault_of_lengths(const std::vector<TunedRow>& rows) {
  for (auto row = rows.begin(); row != rows.end(); ++row) {
    if (row->max_length == kAnyLength) continue;
    const auto other =
        std::find_if(std::next(row), rows.end(), [&](const TunedRow& r) { return overlap(*row, r); });
    if (other == rows.end() || other->min_dim != row->min_dim || other->max_dim != row->max_dim) {
      return "a row for some lengths is not followed by one for the others";
    }
    if (order_of(*other) != order_of(*row)) return "the order of a sum would depend on the length";
  }
  return nullptr;
}

}  // namespace

std::string fault_of(const std::vector<TunedRow>& rows) {
  for (size_t i = 0; i < rows.size(); ++i) {
    const char* fault = fault_of_scope(rows[i]);
    if (fault == nullptr) fault = fault_of_sizes(rows[i]);
    if (fault == nullptr) fault = fault_of_memory(rows[i]);
    if (fault != nullptr) return "row " + std::to_string(i) + ": " + fault;
  }
  const char* fault = fault_of_lengths(rows);
  return fault != nullptr ? fault : "";
}

std::string fault_of(const std::vector<TunedRoute>& routes) {
  for (size_t i = 0; i < routes.size(); ++i) {
    const TunedRoute& route = routes[i];
    const char* fault = nullptr;
    if (!is_float(route.dtype)) fault = "the dtype is not float32, float16 or bfloat16";
    const int64_t max_dim = is_training(route.op) ? kMaxBackwardHeadDim : kMaxHeadDim;
    if (route.dim < 1 || route.dim > max_dim) fault = "the kernels do not support this head size";
    if (route.min_length < 1 || route.max_length < route.min_length)
      fault = "min_length is below 1 or above max_length";
    if (fault != nullptr) return "route " + std::to_string(i) + ": " + fault;
  }
  return "";
}

bool are_units_faster(UnitsSize size, const DeviceFacts& device) {
  if (device.tuned == nullptr || size.is_backward) return false;
  const auto& rows = device.tuned->rows;
  return std::any_of(rows.begin(), rows.end(), [&](const TunedRow& row) {
    return row.kernel == Kernel::kPrefillTensor && row.macos == device.macos && row.dtype == size.dtype &&
           row.min_dim <= size.dim && size.dim <= row.max_dim;
  });
}

PrefillRow tuned_or(const PrefillRow& row, Kernel kernel, const DeviceFacts& device, const Problem& p) {
  const TunedRow* tuned = find(device, kernel, p);
  if (tuned == nullptr) return row;
  return {{.source = device.tuned->provenance.c_str()},
          {.row_fragments = tuned->row_fragments,
           .row_groups = tuned->row_groups,
           .tile_keys = tuned->tile_keys,
           .simdgroups = tuned->simdgroups,
           .early_loads = tuned->early_loads != 0}};
}

DecodeRow tuned_or(const DecodeRow& row, Kernel kernel, const DeviceFacts& device, const Problem& p) {
  const TunedRow* tuned = find(device, kernel, p);
  if (tuned == nullptr) return row;
  return {{.source = device.tuned->provenance.c_str()},
          {.tile_keys = tuned->tile_keys,
           .simdgroups = tuned->simdgroups,
           .min_chunk = tuned->min_chunk,
           .threadgroups_per_core = tuned->threadgroups_per_core}};
}

}  // namespace fattn
