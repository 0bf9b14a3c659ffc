// The sequences of a call: one at a time, or packed rows padded to the longest.
#pragma once

#include <vector>

#include "../describe/calls.h"

namespace fattn {

// Rows or keys of a call that are contiguous in memory.
struct Run {
  int64_t first;
  int64_t count;
};

// A sequence with its own keys, without unused capacity.
struct Sequence {
  Call call;  // not packed, with the query of the whole call
  int64_t number;
  int64_t position;  // of row 0
  Run rows;
  Run keys;  // packed: among all keys
  bool packed;

  // The part of a tensor [batch, heads, length, ..], or [length, heads, ..] of packed rows, that belongs to
  // the sequence, with the heads first. `row_dim`: of packed rows.
  at::Tensor rows_of(const at::Tensor& tensor, int64_t row_dim = 0) const;
  at::Tensor keys_of(const at::Tensor& tensor) const;
  at::Tensor first_position() const;  // [1, 1]
};

// Reads lengths from the device.
std::vector<Sequence> sequences_of(const Call& call);

// The position of the first rows of a call that is not packed: [batch or 1, 1].
at::Tensor first_positions(const Call& call);

// The packed rows of a call, padded to max_seqlen_q, which may be too small.
struct PaddedRows {
  explicit PaddedRows(const Call& call);

  Call padded(const Call& call) const;               // with the query of pad()
  at::Tensor pad(const at::Tensor& rows) const;      // [rows, heads, ..] -> [batch, heads, q_len, ..]
  at::Tensor unpad(const at::Tensor& padded) const;  // back; rows outside every sequence are arbitrary

  int64_t batch;
  int64_t q_len;
  at::Tensor count;           // rows of each sequence: [batch, 1]
  at::Tensor first_position;  // [batch, 1]
  at::Tensor owned;           // rows that belong to a sequence: bool [rows]
  at::Tensor lost;            // of these, rows beyond max_seqlen_q or with more than max_seqlen_k keys

 private:
  at::Tensor index_;   // the packed row of each padded one
  at::Tensor source_;  // the padded row of each packed one
};

}  // namespace fattn
