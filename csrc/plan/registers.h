// Estimates the registers of a step, to choose a row of tuning.h without a compiler.
// tests/plan/test_registers.py compares the estimates with Mesa's compiler for M1 and M2.
#pragma once

#include <algorithm>

#include "kv_format.h"
#include "plan.h"

namespace fattn {

#define FATTN_REGISTERS(X) X(query) X(out) X(state) X(scores) X(operands) X(staged) X(rest)

// Half registers (16 bits) per lane at the peak of a step without options. M1 and M2 have 256; up to 208, a
// core holds 512 threads. Sinks add 6, a window about 25, a mask up to 70.
struct Registers {
  int64_t query = 0;
  int64_t out = 0;
  int64_t state = 0;     // maximum and sum of each row
  int64_t scores = 0;    // of a step
  int64_t operands = 0;  // keys or values on their way to a product
  int64_t staged = 0;    // a thread's part of the next K and V, on the way to threadgroup memory
  int64_t rest = 0;      // addresses, counters, limits, temporaries: fitted to Mesa's counts
  bool early_loads = false;

  // Scores and operands are not needed while K and V are staged, unless those are loaded a step ahead.
  int64_t total() const {
    const int64_t step = scores + operands;
    return query + out + state + (early_loads ? step + staged : std::max(step, staged)) + rest;
  }
};

inline constexpr int64_t kRestOfStaged = 35;    // prefill
inline constexpr int64_t kRestOfUnstaged = 74;  // the others also hold row limits and places in the cache
inline constexpr int64_t kFloatHalves = 2;
inline constexpr int64_t kLoadHalves = 8;  // of 16 bytes
inline constexpr int64_t kMaxValueRun = 16;

// Halves per lane of `rows` by `columns` elements in fragments: a lane has 2 of 64.
constexpr int64_t fragment_halves(int64_t rows, int64_t columns, int64_t halves) {
  return rows * columns / kSimdWidth * halves;
}

// A thread's part of a staged tile (staging.h): one chunk (16 bytes, or up to 16 quantised elements) per
// round. A round covers as many rows, or pairs of rows, as the threads have chunks for.
constexpr int64_t staged_halves(int64_t keys, int64_t row_bytes, int64_t row_chunks, int64_t threads,
                                int64_t rows_together) {
  const int64_t round_rows = threads / row_chunks * rows_together;
  const int64_t chunks = (keys + round_rows - 1) / round_rows * rows_together;
  return chunks * (row_bytes / row_chunks / 2);
}

inline Registers registers_of(const KernelSpec& spec) {
  const bool widens = spec.kv_format == kKvInt4 || (spec.dtype != DType::kFloat16 && !spec.native_bfloat);
  const int64_t operand = widens ? kFloatHalves : 1;
  const int64_t stored = spec.kv_format == kKvFloat ? size_of(spec.dtype) / 2 : operand;  // in an operand
  const int64_t rows = spec.row_fragments * kFragment, keys = spec.tile_keys;
  const bool shares_columns = spec.kernel == Kernel::kPrefillWide || spec.kernel == Kernel::kDecodeWide;
  const int64_t shares = shares_columns ? spec.simdgroups / spec.row_groups : 1;
  const int64_t columns = spec.value_dim / shares;

  const auto row_bytes = [&](int64_t dim) {
    return stored_columns(spec.kv_format, dim) * size_of(storage_dtype(spec.kv_format, spec.dtype));
  };

  const auto row_chunks = [&](int64_t dim) {
    const int64_t of_quantised = dim % 16 == 0 ? dim / 16 : dim / 8;
    return spec.kv_format == kKvFloat ? row_bytes(dim) / 16 : of_quantised;
  };

  Registers sum;
  sum.out = fragment_halves(rows, columns, kFloatHalves);
  sum.state = spec.row_fragments * 2 * kFloatHalves;
  sum.scores = fragment_halves(rows, keys, kFloatHalves);
  sum.rest = kRestOfUnstaged;
  sum.early_loads = spec.early_loads;
  if (spec.kernel == Kernel::kPrefill) {
    const int64_t threads = spec.simdgroups * kSimdWidth;
    const int64_t together =
        spec.early_loads || (spec.head_dim > 64 && operand == stored) ? 2 : 1;  // pairs of keys
    sum.query = fragment_halves(rows, spec.head_dim, operand);
    sum.operands =
        std::max(together * 2 * kLoadHalves, std::min<int64_t>(spec.value_dim / 4, kMaxValueRun) * stored);
    const int64_t pair = spec.early_loads || spec.kv_format != kKvFloat ? 1 : 2;
    sum.staged = staged_halves(keys, row_bytes(spec.head_dim), row_chunks(spec.head_dim), threads, pair) +
                 staged_halves(keys, row_bytes(spec.value_dim), row_chunks(spec.value_dim), threads, 1);
    sum.rest = kRestOfStaged;
  } else if (spec.kernel == Kernel::kPrefillWide) {
    const int64_t fragments = spec.early_loads ? keys / kFragment : 1;
    sum.operands = fragments * columns / 4 * stored;
  } else if (spec.kernel == Kernel::kDecodeWide) {
    sum.operands = fragment_halves(keys, spec.head_dim / shares + columns, operand);
  } else if (spec.kv_format == kKvFloat) {
    sum.operands = 2 * kLoadHalves;
  } else {  // a whole step is loaded at once
    sum.operands = keys * (row_bytes(spec.head_dim) + row_bytes(spec.value_dim)) / 2 / kSimdWidth;
  }
  return sum;
}

// decode_vector is not estimated: its lanes hold columns instead of fragments.
inline bool has_registers(Kernel kernel) {
  return kernel == Kernel::kPrefill || kernel == Kernel::kPrefillWide || kernel == Kernel::kDecode ||
         kernel == Kernel::kDecodeWide;
}

}  // namespace fattn
