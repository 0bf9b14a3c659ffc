// From tensors to plain data: the checks that only tensors can answer (rank, shape, dtype, device), and the
// Problem that the planner judges and plans. Serves every device, so all of them refuse with the same
// sentence.
#pragma once

#include <cstdint>
#include <optional>

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include "plan/plan.h"

namespace fattn {

using OptionalTensor = std::optional<at::Tensor>;

// An attention call: what it asks for, and the tensors it is about. An absent operand is an undefined tensor.
struct Call {
  Problem problem;
  at::Tensor query;
  at::Tensor key;
  at::Tensor value;
  at::Tensor mask{};
  at::Tensor seq_lens{};
  at::Tensor block_tables{};
  at::Tensor sinks{};
  at::Tensor alibi_slopes{};
  at::Tensor tree_mask{};
  at::Tensor cu_seqlens_q{};

  at::Device device() const { return query.device(); }
};

struct MergeCall {
  MergeProblem problem;
  at::Tensor outs;
  at::Tensor lses;

  at::Device device() const { return outs.device(); }
};

// The signatures are those of the ops.
Call describe_prefill(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                      const OptionalTensor& attn_mask, bool is_causal, std::optional<int64_t> q_offset,
                      int64_t window_left, int64_t window_right, int64_t sink_tokens,
                      const OptionalTensor& sinks, const OptionalTensor& alibi_slopes, double softcap,
                      std::optional<double> scale);
Call describe_decode(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                     const OptionalTensor& seq_lens, const OptionalTensor& attn_mask,
                     const OptionalTensor& tree_mask, int64_t window_left, int64_t window_right,
                     int64_t sink_tokens, const OptionalTensor& sinks, const OptionalTensor& alibi_slopes,
                     double softcap, std::optional<double> scale);
Call describe_paged_decode(const at::Tensor& query, const at::Tensor& key_cache,
                           const at::Tensor& value_cache, const at::Tensor& block_tables,
                           const at::Tensor& seq_lens, const OptionalTensor& attn_mask,
                           const OptionalTensor& tree_mask, int64_t window_left, int64_t window_right,
                           int64_t sink_tokens, const OptionalTensor& sinks,
                           const OptionalTensor& alibi_slopes, double softcap, std::optional<double> scale);
Call describe_paged_prefill(const at::Tensor& query, const at::Tensor& key_cache,
                            const at::Tensor& value_cache, const at::Tensor& block_tables,
                            const at::Tensor& seq_lens, const at::Tensor& cu_seqlens_q, int64_t max_seqlen_q,
                            bool is_causal, int64_t window_left, int64_t window_right, int64_t sink_tokens,
                            const OptionalTensor& sinks, const OptionalTensor& alibi_slopes, double softcap,
                            std::optional<double> scale);
MergeCall describe_merge(const at::Tensor& outs, const at::Tensor& lses);

// Shapes of out and lse.
struct ResultSizes {
  c10::SmallVector<int64_t, 4> out;
  c10::SmallVector<int64_t, 3> lse;
};
ResultSizes result_sizes(const Problem& problem);

// The tensor itself, or a copy where its last dimension is not contiguous: what the strides in Problem
// describe.
at::Tensor with_contiguous_rows(const at::Tensor& operand);

// Raises the Python exception that the refusal stands for.
[[noreturn]] void raise(const Refusal& refusal);

}  // namespace fattn
