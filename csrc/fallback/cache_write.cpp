// cache_write in plain PyTorch: bit-identical to the kernel, without waiting for a GPU.
#include "fallback.h"

#include <limits>

#include <ATen/ops/arange.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>

#include "../plan/kv_format.h"

namespace fattn {
namespace {

using at::Tensor;

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kSmallestNormal = std::numeric_limits<float>::min();
constexpr double kHalfMax = 65504.0;

// Rows in the format of a cache.
struct StoredRows {
  Tensor stored;
  Tensor scales{};
};

Tensor flushed(const Tensor& x) { return x.masked_fill(x.abs().lt(kSmallestNormal), 0.0); }

Tensor int8_of(const Tensor& x) { return x.round().to(at::kChar); }

Tensor e4m3_of(const Tensor& x) {
  constexpr double kMax = largest_code(kKvFp8E4M3);
  const Tensor codes = x.clamp(-kMax, kMax).to(at::kFloat8_e4m3fn).view(at::kByte);
  return codes.masked_fill(codes.eq(0x80), 0).masked_fill(x.isnan(), 0x7f);
}

// Rounds to half toward -inf: if the nearest half is above x, its neighbour. Halves of one sign are ordered
// by their bits.
Tensor rounded_down(const Tensor& x) {
  const Tensor nearest = x.to(at::kHalf);
  const Tensor bits = nearest.view(at::kShort);
  const Tensor below =
      at::where(nearest.gt(0.0), bits.sub(1), bits.add(1)).masked_fill(nearest.eq(0.0), -0x7fff);
  return at::where(nearest.to(at::kFloat).gt(x), below, bits).view(at::kHalf);
}
Tensor rounded_up(const Tensor& x) {  // x >= 0
  const Tensor nearest = x.to(at::kHalf);
  const Tensor bits = nearest.view(at::kShort);
  return at::where(nearest.to(at::kFloat).lt(x), bits.add(1), bits).view(at::kHalf);
}

// Rows with one scale, or without scales. `codes_of` rounds to the codes of the format.
StoredRows scaled_rows(const Tensor& rows, KvFormat format, bool has_scales,
                       Tensor (*codes_of)(const Tensor&)) {
  if (!has_scales) return {codes_of(rows)};
  Tensor scale = flushed(rows.abs().amax(-1, /*keepdim=*/true).div(double(largest_code(format))));
  scale = scale.masked_fill(at::isfinite(rows).all(-1, /*keepdim=*/true).logical_not(), kNaN);
  const Tensor q = at::where(scale.gt(0.0), rows.div(scale), 0.0);
  return {codes_of(q), scale.squeeze(-1)};
}

StoredRows grouped_rows(const Tensor& rows) {
  const Tensor raw = rows.unflatten(-1, {rows.size(-1) / kInt4Group, kInt4Group});
  const Tensor good = at::isfinite(raw).all(-1, /*keepdim=*/true);
  const Tensor groups = raw.clamp(-kHalfMax, kHalfMax).masked_fill(raw.isnan(), 0.0);
  const Tensor minimum = rounded_down(groups.amin(-1, /*keepdim=*/true));
  const Tensor low = minimum.to(at::kFloat);
  const Tensor scale =
      rounded_up(flushed(groups.amax(-1, /*keepdim=*/true).sub(low).div(double(largest_code(kKvInt4)))));
  const Tensor q = groups.sub(low).div(scale.to(at::kFloat));
  const Tensor codes = at::where(good.logical_and(scale.gt(0.0)), q, 0.0)
                           .round()
                           .to(at::kByte)
                           .flatten(-2)
                           .unflatten(-1, {rows.size(-1) / 2, 2});
  const Tensor scales = at::stack({scale, minimum}, -1).squeeze(-2).masked_fill(good.logical_not(), kNaN);
  return {codes.select(-1, 0).bitwise_or(codes.select(-1, 1).mul(16)), scales};
}

StoredRows stored_rows(const Tensor& rows, KvFormat format, bool has_scales) {
  const auto numbers = [&] { return flushed(rows.to(at::kFloat)); };
  switch (format) {
    case kKvFloat:
      return {rows};
    case kKvInt8:
      return scaled_rows(numbers(), format, has_scales, int8_of);
    case kKvFp8E4M3:
      return scaled_rows(numbers(), format, has_scales, e4m3_of);
    case kKvInt4:
      return grouped_rows(numbers());
  }
  return {};
}

// Destinations of the tokens. Skipping dropped tokens would wait for the GPU. Instead, a dropped token
// repeats the write of another token; if all are dropped, each rewrites the current content.
struct Targets {
  Tensor token;  // whose row to write, [tokens]
  Tensor block;
  Tensor slot;
  Tensor any;  // bool: not all are dropped
};

Targets targets_of(const CacheWriteCall& call) {
  const int64_t block_size = call.problem.block_size;
  const int64_t count = call.problem.num_blocks * block_size;
  const Tensor slots = call.slot_mapping.to(at::kLong);
  const Tensor kept = slots.ge(0).logical_and(slots.lt(count));
  const Tensor one = kept.to(at::kInt).argmax();
  const Tensor token = at::where(kept, at::arange(slots.size(0), slots.options()), one);
  const Tensor slot = slots.index_select(0, token).clamp(0, count - 1);
  return {token, slot.floor_divide(block_size), slot.remainder(block_size), kept.any()};
}

void write(const Tensor& rows, const Tensor& pool, const Targets& to) {
  const Tensor present = pool.index({to.block, to.slot});
  pool.index_put_({to.block, to.slot}, at::where(to.any, rows.index_select(0, to.token), present));
}

}  // namespace

std::tuple<> run_in_torch(const CacheWriteCall& call) {
  const CacheWriteProblem& problem = call.problem;
  if (problem.tokens * problem.kv_heads == 0 || problem.num_blocks * problem.block_size == 0) return {};
  const Targets targets = targets_of(call);
  const auto write_side = [&](const Tensor& rows, const Tensor& cache, const Tensor& scales) {
    const StoredRows side = stored_rows(rows, problem.format, problem.has_scales);
    write(side.stored, cache, targets);
    if (scales.defined()) write(side.scales, scales, targets);
  };
  const Tensor value = rows_to_read(call.value, call.copy_value);
  write_side(rows_to_read(call.key, call.copy_key), call.key_cache, call.key_scales);
  if (!problem.value_in_key) write_side(value, call.value_cache, call.value_scales);
  return {};
}

}  // namespace fattn
