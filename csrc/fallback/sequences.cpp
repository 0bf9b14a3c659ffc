// Attention in plain PyTorch over the sequences of a call, all at once or one at a time.
#include "sequences.h"

#include <algorithm>
#include <limits>

#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/where.h>

#include "attention.h"
#include "block_mask.h"
#include "fallback.h"
#include "../plan/supported.h"

namespace fattn {
namespace {

using at::Tensor;
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

// Whether the last row of each sequence is at its last key.
bool ends_meet(const Problem& problem) {
  if (problem.packed_keys) return problem.last_rows_meet;
  return !is_dense_prefill(problem.op) || problem.has_seq_lens;
}

// The position of row 0. Clamping changes nothing: the checks bound it for windows and slopes.
int64_t first_row(const Problem& problem) { return std::clamp(problem.q_offset, -kMaxLength, kMaxLength); }

std::vector<int64_t> numbers_of(const Tensor& tensor) {
  const Tensor numbers = tensor.to(at::kLong).contiguous();
  return {numbers.const_data_ptr<int64_t>(), numbers.const_data_ptr<int64_t>() + numbers.numel()};
}

// The packed rows of each sequence.
std::vector<Run> runs_of_rows(const Call& call) {
  std::vector<Run> runs;
  int64_t begin = 0;
  for (const int64_t given : numbers_of(call.cu_seqlens_q)) {
    const int64_t end = std::max(begin, std::clamp<int64_t>(given, 0, call.problem.q_len));
    runs.push_back({begin, end - begin});
    begin = end;
  }
  runs.erase(runs.begin());  // rows before the first sequence
  return runs;
}

// The keys of each sequence: packed, or from the sequence's first key on.
std::vector<Run> runs_of_keys(const Call& call) {
  const Problem& problem = call.problem;
  std::vector<Run> runs;
  const auto counts = numbers_of(key_counts(call));
  const auto starts = problem.packed_keys ? numbers_of(first_packed_keys(call)) : std::vector<int64_t>();
  for (int64_t b = 0; b < problem.batch; ++b) {
    runs.push_back({problem.packed_keys ? starts[b] : 0, counts[b]});
  }
  return runs;
}

// The call restricted to sequence `b`, except its query. Keys of a pool come in whole blocks.
Call with_own_keys(const Call& call, int64_t b, Run keys) {
  Call own = call;
  Problem& problem = own.problem;
  problem.batch = 1;
  problem.kv_len = keys.count;
  if (call.block_tables.defined()) {
    problem.max_blocks = (keys.count + problem.block_size - 1) / problem.block_size;
    problem.kv_len = problem.max_blocks * problem.block_size;
    own.block_tables = call.block_tables.narrow(0, b, 1).narrow(1, 0, problem.max_blocks);
    own.seq_lens = call.seq_lens.narrow(0, b, 1);
  } else {
    problem.has_seq_lens = problem.packed_keys = false;
    for (Tensor* operand : {&own.key, &own.value, &own.key_scales, &own.value_scales}) {
      if (!operand->defined()) continue;
      *operand = call.problem.packed_keys
                     ? operand->narrow(0, keys.first, keys.count).transpose(0, 1).unsqueeze(0)
                     : operand->narrow(0, b, 1).narrow(2, 0, keys.count);
    }
  }
  if (call.attn_mask.defined()) {
    if (call.attn_mask.dim() == 4 && call.attn_mask.size(0) > 1)
      own.attn_mask = own.attn_mask.narrow(0, b, 1);
    if (call.attn_mask.dim() > 0 && call.attn_mask.size(-1) > 1)
      own.attn_mask = own.attn_mask.narrow(-1, 0, problem.kv_len);
  }
  if (problem.block_rows > 0 && call.mask_map.size(0) > 1) own.mask_map = call.mask_map.narrow(0, b, 1);
  if (call.tree_mask.defined() && call.tree_mask.dim() == 2) own.tree_mask = own.tree_mask.narrow(0, b, 1);
#define FATTN_TENSOR(slot, name, shapes) \
  if (problem.options.name.of_sequences) own.name = own.name.narrow(0, b, 1);
  FATTN_SCORE_OPTIONS(FATTN_NOTHING, FATTN_TENSOR)
#undef FATTN_TENSOR
  return own;
}

// Pads the packed rows.
std::tuple<Tensor, Tensor> attend_packed(const Call& call) {
  const Problem& problem = call.problem;
  const auto [no_key_out, no_key_lse] = no_key_results(call);
  if (no_key_out.numel() == 0 || problem.batch == 0) return {no_key_out, no_key_lse};
  const PaddedRows rows(call);
  const Call padded = rows.padded(call);
  const auto [out, lse] = no_key_results(padded);
  attend({.call = padded, .first_position = rows.first_position, .count = rows.count}, out, lse);
  const auto of_rows = [&](const Tensor& own, const Tensor& rest, at::IntArrayRef shape) {
    return at::where(rows.owned.view(shape), own, rest).masked_fill(rows.lost.view(shape), kNaN);
  };
  const Tensor own_lse = rows.unpad(lse).transpose(0, 1).contiguous();
  return {of_rows(rows.unpad(out), no_key_out, {-1, 1, 1}),
          problem.part ? of_rows(own_lse, no_key_lse, {1, -1, 1}) : of_rows(own_lse, no_key_lse, {1, -1})};
}

// All sequences at once, without waiting for values on the device.
std::tuple<Tensor, Tensor> attend_together(const Call& call) {
  if (call.problem.packed) return attend_packed(call);
  const auto [out, lse] = no_key_results(call);
  attend({.call = call, .first_position = first_positions(call)}, out, lse);
  return {out, lse};
}

std::tuple<Tensor, Tensor> attend_one_by_one(const Call& call) {
  const auto [out, lse] = no_key_results(call);
  if (out.numel() == 0) return {out, lse};
  for (const Sequence& sequence : sequences_of(call)) {
    Call own = sequence.call;
    own.query = sequence.rows_of(call.query);
    const Tensor own_out = sequence.rows_of(out), own_lse = sequence.rows_of(lse, 1);
    if (call.problem.block_rows == 0) {
      attend({.call = own, .first_position = sequence.first_position()}, own_out, own_lse);
      continue;
    }
    visit_block_rows(own, [&](const BlockRows& rows) {
      attend({.call = rows.call,
              .first_position = sequence.first_position().add(rows.row),
              .key_positions = rows.key_positions},
             rows.rows_of(own_out), rows.rows_of(own_lse));
    });
  }
  return {out, lse};
}

}  // namespace

Tensor Sequence::rows_of(const Tensor& tensor, int64_t row_dim) const {
  if (!packed) return tensor.narrow(0, number, 1);
  const Tensor own = tensor.narrow(row_dim, rows.first, rows.count).unsqueeze(0);
  return row_dim == 0 ? own.transpose(1, 2) : own;
}

Tensor Sequence::keys_of(const Tensor& tensor) const {
  if (packed) return tensor.narrow(0, keys.first, keys.count).transpose(0, 1).unsqueeze(0);
  return tensor.narrow(0, number, 1).narrow(2, 0, keys.count);
}

Tensor Sequence::first_position() const {
  return at::full({1, 1}, position, call.query.options().dtype(at::kLong));
}

std::vector<Sequence> sequences_of(const Call& call) {
  const Problem& problem = call.problem;
  std::vector<Sequence> sequences;
  const auto keys = runs_of_keys(call);
  auto rows = problem.packed ? runs_of_rows(call) : std::vector<Run>(problem.batch, {0, problem.q_len});
  for (int64_t b = 0; b < problem.batch; ++b) {
    const int64_t position = ends_meet(problem) ? keys[b].count - rows[b].count : first_row(problem);
    Call own = with_own_keys(call, b, keys[b]);
    own.problem.packed = false;
    own.problem.q_len = rows[b].count;
    sequences.push_back({std::move(own), b, position, rows[b], keys[b], problem.packed});
  }
  return sequences;
}

Tensor first_positions(const Call& call) {
  const Problem& problem = call.problem;
  if (ends_meet(problem)) return key_counts(call).sub(problem.q_len);
  return at::full({1, 1}, first_row(problem), call.query.options().dtype(at::kLong));
}

PaddedRows::PaddedRows(const Call& call)
    : batch(call.problem.batch), q_len(std::max<int64_t>(max_sequence_rows(call.problem), 1)) {
  const Problem& problem = call.problem;
  const auto ends = std::get<0>(call.cu_seqlens_q.to(at::kLong).clamp(0, problem.q_len).cummax(0));
  const Tensor starts = ends.slice(0, 0, batch);
  count = ends.slice(0, 1).sub(starts).unsqueeze(1);
  const Tensor keys = key_counts(call);
  first_position = ends_meet(problem) ? keys.sub(count) : at::full_like(count, first_row(problem));
  index_ = at::arange(q_len, ends.options()).add(starts.unsqueeze(1)).clamp_max(problem.q_len - 1).flatten();
  // The sequence of each row, and its index in the sequence.
  const Tensor row = at::arange(problem.q_len, ends.options());
  const Tensor sequence = at::searchsorted(ends, row, /*out_int32=*/false, /*right=*/true).sub(1);
  const Tensor owner = sequence.clamp(0, batch - 1);
  const Tensor place = row.sub(starts.index_select(0, owner));
  owned = sequence.eq(owner);
  const Tensor cut = keys.flatten().gt(max_sequence_keys(problem)).index_select(0, owner);
  lost = owned.logical_and(place.ge(q_len).logical_or(cut));
  source_ = owner.mul(q_len).add(place.clamp(0, q_len - 1));
}

Call PaddedRows::padded(const Call& call) const {
  Call padded = call;
  padded.problem.packed = false;
  padded.problem.q_len = q_len;
  padded.problem.kv_len = max_sequence_keys(call.problem);
  padded.query = pad(call.query);
  return padded;
}

Tensor PaddedRows::pad(const Tensor& rows) const {
  return rows.index_select(0, index_).unflatten(0, {batch, q_len}).transpose(1, 2);
}

Tensor PaddedRows::unpad(const Tensor& padded) const {
  return padded.transpose(1, 2).flatten(0, 1).index_select(0, source_);
}

std::vector<Tensor> run_in_torch(const Call& call, bool may_wait) {
  const bool waits = may_wait || call.problem.block_rows > 0;
  const auto [out, lse] = waits ? attend_one_by_one(call) : attend_together(call);
  return {out, lse};
}

}  // namespace fattn
