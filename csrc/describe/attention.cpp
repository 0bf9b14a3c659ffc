// Tensors -> Problem. The planner checks everything that follows from the Problem alone: head dims, head
// counts, lengths, options.
#include "calls.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <string_view>
#include <utility>

#include <c10/util/Exception.h>

#include "layout.h"
#include "options.h"
#include "tensor_checks.h"

namespace fattn {
namespace {

using at::Tensor;

constexpr std::string_view kPool = "[num_blocks, block_size, kv_heads, head_dim]";
void check_operand_dtypes(const char* op, const Tensor& query, const Tensor& key, const Tensor& value,
                          const char* key_name = "key", const char* value_name = "value") {
  check_float(op, "query", query);
  if (key.scalar_type() == query.scalar_type() && value.scalar_type() == query.scalar_type()) return;
  // The elements of a quantised cache are codes: advise no conversion.
  const bool all_float = at::isFloatingType(key.scalar_type()) && at::isFloatingType(value.scalar_type());
  const std::string both = std::string(key_name) + " and " + value_name;
  TORCH_CHECK_TYPE(false, op, ": query is ", dtype_name(query), ", ", key_name, " ", dtype_name(key), " and ",
                   value_name, " ", dtype_name(value), "; all three must have the same dtype",
                   all_float ? ": convert " + both + " with .to(query.dtype)" : std::string());
}

// Checks the dtypes of query and cache, and returns the format of the cache, which may be quantised.
KvFormat check_cache_dtypes(const char* op, std::string_view kv_format, const Tensor& query,
                            const Tensor& key, const char* key_name, const Tensor& value,
                            const char* value_name) {
  const DType stored = dtype_of(key.scalar_type());
  if (kv_format == "auto" && stored != DType::kInt8 && stored != DType::kUInt8) {
    check_operand_dtypes(op, query, key, value, key_name, value_name);
    return kKvFloat;
  }
  check_operand_dtypes(op, query, query, query);
  return check_kv_format(op, kv_format, key, value, key_name, value_name);
}

// Whether `value` is the first columns of `key`, as in multi-head latent attention.
bool is_in_key(const Tensor& value, const Tensor& key) {
  bool is = value.is_alias_of(key) && value.storage_offset() == key.storage_offset() &&
            value.size(3) <= key.size(3) && has_contiguous_rows(key) && has_contiguous_rows(value);
  for (int dim = 0; dim < 3; ++dim) {
    is = is && (value.size(dim) <= 1 || value.stride(dim) == key.stride(dim));
  }
  return is;
}

// Fields that do not depend on the layout. Strides of key and value are in the order of their dimensions.
Problem problem_of(Op op, const Tensor& query, const Tensor& key, const Tensor& value, KvFormat format) {
  const Layout q = layout_of(query), k = layout_of(key), v = layout_of(value);
  Problem problem;
  problem.op = op;
  problem.dtype = dtype_of(query.scalar_type());
  problem.q_heads = query.size(1);
  problem.head_dim = query.size(-1);
  problem.value_dim = head_dim_of(format, value.size(-1));
  problem.kv_format = format;
  problem.query = q.by_dimension();
  problem.key = k.by_dimension();
  problem.value = v.by_dimension();
  problem.vector_aligned = q.vector_aligned && k.vector_aligned && v.vector_aligned;
  return problem;
}

// Reads query, key and value of a dense op.
Call describe_dense(Op op, const Arguments& arguments) {
  const char* name = name_of(op);
  const Tensor &query = arguments.tensor("query"), &key = arguments.tensor("key"),
               &value = arguments.tensor("value");
  check_rank(name, "query", query, 4, kHeadsFirst);
  check_rank(name, "key", key, 4, kHeadsFirst);
  check_rank(name, "value", value, 4, kHeadsFirst);
  check_device(name, "key", key, query);
  check_device(name, "value", value, query);
  KvFormat format = kKvFloat;
  if (is_dense_prefill(op)) {
    check_operand_dtypes(name, query, key, value);
  } else {
    format = check_cache_dtypes(name, arguments.text("kv_format"), query, key, "key", value, "value");
  }
  check_same_size(name, "batch size", "query", query.size(0), "key", key.size(0));
  check_same_size(name, "batch size", "query", query.size(0), "value", value.size(0));
  check_same_size(name, "head count", "key", key.size(1), "value", value.size(1));
  check_same_size(name, "length", "key", key.size(2), "value", value.size(2));
  check_head_dim(name, "query", query.size(3), "key", key, format);

  Problem problem = problem_of(op, query, key, value, format);
  problem.batch = query.size(0);
  problem.kv_heads = key.size(1);
  problem.q_len = query.size(2);
  problem.kv_len = key.size(2);
  problem.value_in_key = is_in_key(value, key);
  return {.problem = problem, .query = query, .key = key, .value = value};
}

// Reads query, the two pools and their block table. The caller adds the rows of query.
Call describe_paged(Op op, const Arguments& arguments) {
  const char* name = name_of(op);
  const Tensor &query = arguments.tensor("query"), &key_cache = arguments.tensor("key_cache"),
               &value_cache = arguments.tensor("value_cache"),
               &block_tables = arguments.tensor("block_tables");
  check_rank(name, "key_cache", key_cache, 4, kPool);
  check_rank(name, "value_cache", value_cache, 4, kPool);
  check_rank(name, "block_tables", block_tables, 2, "[batch, max_blocks]");
  check_device(name, "key_cache", key_cache, query);
  check_device(name, "value_cache", value_cache, query);
  check_device(name, "block_tables", block_tables, query);
  const KvFormat format = check_cache_dtypes(name, arguments.text("kv_format"), query, key_cache, "key_cache",
                                             value_cache, "value_cache");
  check_int32(name, "block_tables", block_tables);
  check_same_size(name, "num_blocks", "key_cache", key_cache.size(0), "value_cache", value_cache.size(0));
  check_same_size(name, "block_size", "key_cache", key_cache.size(1), "value_cache", value_cache.size(1));
  check_same_size(name, "head count", "key_cache", key_cache.size(2), "value_cache", value_cache.size(2));
  check_head_dim(name, "query", query.size(-1), "key_cache", key_cache, format);

  Problem problem = problem_of(op, query, key_cache, value_cache, format);
  swap_rows_and_heads(problem.key);
  swap_rows_and_heads(problem.value);
  problem.batch = block_tables.size(0);
  problem.kv_heads = key_cache.size(2);
  problem.kv_len = block_tables.size(1) * key_cache.size(1);
  problem.value_in_key = is_in_key(value_cache, key_cache);
  problem.block_size = key_cache.size(1);
  problem.num_blocks = key_cache.size(0);
  problem.max_blocks = block_tables.size(1);
  problem.block_table_batch_stride = block_tables.stride(0);
  problem.block_table_entry_stride = block_tables.stride(1);
  return {.problem = problem,
          .query = query,
          .key = key_cache,
          .value = value_cache,
          .block_tables = block_tables};
}

// The strides of a cache's scales by batch or block, head, and row or slot.
Strides3 scale_strides(const Call& call, const Tensor& scales) {
  const auto strides = scales.strides();
  if (call.block_tables.defined()) return {strides[0], strides[2], strides[1]};
  return {strides[0], strides[1], strides[2]};
}

// Whether a single load can read scale and minimum of a group.
bool has_aligned_pairs(const Tensor& scales) {
  bool aligned = scales.storage_offset() % 2 == 0;
  for (int64_t dim = 0; dim < 3; ++dim) {
    aligned = aligned && (scales.size(dim) <= 1 || scales.stride(dim) % 2 == 0);
  }
  return aligned;
}

void add_scales(Call& call, const Arguments& arguments) {
  const OptionalTensor key_scales = arguments.optional_tensor("key_scales");
  const OptionalTensor value_scales = arguments.optional_tensor("value_scales");
  Problem& problem = call.problem;
  const char* name = name_of(problem.op);
  const bool paged = call.block_tables.defined();
  const bool of_keys =
      check_scales(name, "key_scales", key_scales, paged ? "key_cache" : "key", call.key, problem.kv_format);
  const bool of_values = check_scales(name, "value_scales", value_scales, paged ? "value_cache" : "value",
                                      call.value, problem.kv_format);
  TORCH_CHECK_VALUE(of_keys == of_values, name, ": ", of_keys ? "key_scales" : "value_scales",
                    " is given and ", of_keys ? "value_scales" : "key_scales",
                    " is not; pass both, or neither with kv_format ",
                    formats_where([](KvFormat format) { return !needs_scales(format); }));
  if (!of_keys) return;
  problem.has_scales = true;
  // Row scales apply after the products, so key and value may differ in them. Elements of groups are equal
  // only if their groups are.
  const bool grouped = scales_kind(problem.kv_format) == kScalesGroup;
  if (grouped) {
    problem.value_in_key = problem.value_in_key && is_in_key(*value_scales, *key_scales);
  }
  problem.key_scales = scale_strides(call, *key_scales);
  problem.value_scales = scale_strides(call, *value_scales);
  if (grouped) {
    problem.vector_aligned =
        problem.vector_aligned && has_aligned_pairs(*key_scales) && has_aligned_pairs(*value_scales);
  }
  call.key_scales = *key_scales;
  call.value_scales = *value_scales;
}

void add_seq_lens(Call& call, const Tensor& seq_lens) {
  Problem& problem = call.problem;
  const char* name = name_of(problem.op);
  // The fourth argument of torch's own attention is a mask.
  const bool is_mask =
      seq_lens.scalar_type() == at::kBool || (seq_lens.is_floating_point() && seq_lens.dim() > 1);
  TORCH_CHECK_TYPE(problem.packed || !is_mask, name, ": seq_lens is ", dtype_name(seq_lens),
                   " and must be torch.int32; pass a mask as attn_mask");
  check_rank(name, "seq_lens", seq_lens, 1, "[batch]");
  check_device(name, "seq_lens", seq_lens, call.query);
  check_int32(name, "seq_lens", seq_lens);
  check_same_size(name, "batch size", problem.packed ? "block_tables" : "query", problem.batch, "seq_lens",
                  seq_lens.size(0));
  problem.has_seq_lens = true;
  problem.seq_lens_stride = seq_lens.stride(0);
  call.seq_lens = seq_lens;
}

// Checks cu_seqlens: the start of each sequence among the packed rows, and the end of the last one.
void check_starts(const Call& call, const char* starts_name, const Tensor& starts) {
  const char* name = name_of(call.problem.op);
  check_rank(name, starts_name, starts, 1, "[batch + 1]");
  check_device(name, starts_name, starts, call.query);
  check_int32(name, starts_name, starts);
}

// The rows of all sequences in one query [rows, heads, head_dim].
void add_packing(Call& call, const Arguments& arguments) {
  const Tensor& cu_seqlens_q = arguments.tensor("cu_seqlens_q");
  Problem& problem = call.problem;
  const char* name = name_of(problem.op);
  check_starts(call, "cu_seqlens_q", cu_seqlens_q);
  const int64_t entries = cu_seqlens_q.size(0), wanted = problem.batch + 1;
  TORCH_CHECK_VALUE(entries == wanted || !problem.packed_keys, name, ": cu_seqlens_q has ", entries,
                    " entries and cu_seqlens_k has ", wanted,
                    "; pass one entry more than there are sequences in both");
  TORCH_CHECK_VALUE(entries == wanted, name, ": cu_seqlens_q has ", entries, " entries and must have ",
                    wanted, ", one more than block_tables has rows");
  problem.packed = true;
  problem.q_len = call.query.size(0);
  swap_rows_and_heads(problem.query);
  problem.max_seqlen_q = arguments.get<int64_t>("max_seqlen_q");
  problem.cu_seqlens_stride = cu_seqlens_q.stride(0);
  call.cu_seqlens_q = cu_seqlens_q;
}

// The keys of all sequences in one key and one value [rows, heads, head_dim].
Call describe_packed(Op op, const Arguments& arguments) {
  const char* name = name_of(op);
  const Tensor &query = arguments.tensor("query"), &key = arguments.tensor("key"),
               &value = arguments.tensor("value"), &cu_seqlens_k = arguments.tensor("cu_seqlens_k");
  check_rank(name, "query", query, 3, kPacked);
  check_rank(name, "key", key, 3, kPacked);
  check_rank(name, "value", value, 3, kPacked);
  check_device(name, "key", key, query);
  check_device(name, "value", value, query);
  check_operand_dtypes(name, query, key, value);
  check_same_size(name, "row count", "key", key.size(0), "value", value.size(0));
  check_same_size(name, "head count", "key", key.size(1), "value", value.size(1));
  check_same_size(name, "head_dim", "query", query.size(2), "key", key.size(2));

  Call call{
      .problem = problem_of(op, query, key, value, kKvFloat), .query = query, .key = key, .value = value};
  Problem& problem = call.problem;
  swap_rows_and_heads(problem.key);
  swap_rows_and_heads(problem.value);
  problem.kv_heads = key.size(1);
  problem.packed_keys = true;
  problem.max_seqlen_k = arguments.get<int64_t>("max_seqlen_k");
  problem.kv_len = key.size(0);

  check_starts(call, "cu_seqlens_k", cu_seqlens_k);
  TORCH_CHECK_VALUE(cu_seqlens_k.size(0) > 0, name,
                    ": cu_seqlens_k has no entries and must have one more than there are sequences");
  problem.batch = cu_seqlens_k.size(0) - 1;
  problem.cu_seqlens_k_stride = cu_seqlens_k.stride(0);
  call.cu_seqlens_k = cu_seqlens_k;
  add_packing(call, arguments);
  return call;
}

void add_flags(Call& call, const Arguments& arguments) {
#define FATTN_FLAG(name, prefill_has_it) \
  if (prefill_has_it || !is_dense_prefill(call.problem.op)) call.problem.name = arguments.get<bool>(#name);
  FATTN_FLAGS(FATTN_FLAG)
#undef FATTN_FLAG
}

// Reads the arguments that both decode ops take after the keys.
void add_decode_options(Call& call, const Arguments& arguments, const OptionalTensor& seq_lens) {
  call.problem.is_causal = true;
  add_score_options(call, arguments);
  add_tree_mask(call, arguments);
  if (seq_lens.has_value()) add_seq_lens(call, *seq_lens);
  add_mask(call, arguments);
  add_flags(call, arguments);
}

}  // namespace

Call describe_prefill_of(Op op, const Arguments& arguments) {
  Call call = describe_dense(op, arguments);
  Problem& problem = call.problem;
  problem.is_causal = arguments.get<bool>("is_causal");
  const auto q_offset = arguments.get<std::optional<int64_t>>("q_offset");
  problem.q_offset = q_offset.value_or(problem.kv_len - problem.q_len);
  if (const OptionalTensor seq_lens = arguments.optional_tensor("seq_lens")) {
    TORCH_CHECK_VALUE(!q_offset, name_of(op), ": q_offset ", *q_offset,
                      " came with seq_lens, which place the last row at the last key; pass one of them");
    add_seq_lens(call, *seq_lens);
  }
  add_score_options(call, arguments);
  add_mask(call, arguments);
  add_block_mask(call, arguments);
  add_mask_map(call, arguments);
  add_flags(call, arguments);
  return call;
}

Call describe_varlen_prefill_of(Op op, const Arguments& arguments) {
  Call call = describe_packed(op, arguments);
  const auto q_offset = arguments.get<std::optional<int64_t>>("q_offset");
  call.problem.is_causal = arguments.get<bool>("is_causal");
  call.problem.last_rows_meet = !q_offset.has_value();
  call.problem.q_offset = q_offset.value_or(0);
  add_score_options(call, arguments);
  return call;
}

Call describe_prefill(const Arguments& arguments) { return describe_prefill_of(Op::kPrefill, arguments); }

Call describe_decode(const Arguments& arguments) {
  Call call = describe_dense(Op::kDecode, arguments);
  add_scales(call, arguments);
  add_decode_options(call, arguments, arguments.optional_tensor("seq_lens"));
  return call;
}

Call describe_paged_decode(const Arguments& arguments) {
  const char* name = name_of(Op::kPagedDecode);
  const Tensor& query = arguments.tensor("query");
  check_rank(name, "query", query, 4, kHeadsFirst);
  Call call = describe_paged(Op::kPagedDecode, arguments);
  check_same_size(name, "batch size", "query", query.size(0), "block_tables", call.problem.batch);
  add_scales(call, arguments);
  call.problem.q_len = query.size(2);
  add_decode_options(call, arguments, arguments.tensor("seq_lens"));
  return call;
}

Call describe_paged_prefill(const Arguments& arguments) {
  check_rank(name_of(Op::kPagedPrefill), "query", arguments.tensor("query"), 3, kPacked);
  Call call = describe_paged(Op::kPagedPrefill, arguments);
  add_scales(call, arguments);
  add_packing(call, arguments);
  call.problem.is_causal = arguments.get<bool>("is_causal");
  add_score_options(call, arguments);
  add_seq_lens(call, arguments.tensor("seq_lens"));
  return call;
}

Call describe_varlen_prefill(const Arguments& arguments) {
  return describe_varlen_prefill_of(Op::kVarlenPrefill, arguments);
}

ResultSizes result_sizes(const Problem& p) {
  const Strides3 out = out_strides(p);
  ResultSizes sizes;
  if (p.packed) {
    sizes = {{p.q_len, p.q_heads, p.value_dim}, {out.row, out.head, 1}, {p.q_heads, p.q_len}};
  } else {
    sizes = {{p.batch, p.q_heads, p.q_len, p.value_dim},
             {out.batch, out.head, out.row, 1},
             {p.batch, p.q_heads, p.q_len}};
  }
  if (p.part) sizes.lse.push_back(kSumFloats);
  return sizes;
}

void raise(const Refusal& refusal) {
  switch (refusal.kind) {
    case Refusal::Kind::kValue:
      C10_THROW_ERROR(ValueError, refusal.message);
    case Refusal::Kind::kType:
      C10_THROW_ERROR(TypeError, refusal.message);
    case Refusal::Kind::kNotImplemented:
      C10_THROW_ERROR(NotImplementedError, refusal.message);
  }
  C10_THROW_ERROR(Error, refusal.message);
}

}  // namespace fattn
