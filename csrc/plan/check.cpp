// Refusals. Each is one sentence that names the op, the value, the limit, and what to do instead.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <numbers>
#include <string>

#include "kv_format.h"
#include "planners.h"
#include "refuse.h"

namespace fattn {
namespace {

using Kind = Refusal::Kind;

// `more`: further advice about padding.
std::optional<Refusal> check_head_dim(const char* op, const char* what, int64_t dim,
                                      const std::string& padded, const std::string& more,
                                      const std::string& instead, int64_t most = kMaxHeadDim) {
  if (dim <= 0) {
    return refuse(Kind::kValue, op, what, " head_dim ", dim, " is not a positive multiple of ",
                  kHeadDimMultiple, "; pass heads of at least ", kHeadDimMultiple, " columns");
  }
  if (dim > most) {
    return refuse(Kind::kNotImplemented, op, what, " head_dim ", dim, " is above ", most,
                  ", the largest with a kernel so far; ", instead);
  }
  if (dim % kHeadDimMultiple != 0) {
    return refuse(Kind::kValue, op, what, " head_dim ", dim, " is not a positive multiple of ",
                  kHeadDimMultiple, "; pad ", padded, " with zeros to ",
                  ceil_div(dim, kHeadDimMultiple) * kHeadDimMultiple, more);
  }
  return std::nullopt;
}

std::string inverse_root(int64_t dim) { return std::to_string(dim) + " ** -0.5"; }

std::string columns_cut(int64_t dim) { return " and cut the result to " + std::to_string(dim) + " columns"; }

// Names the likely cause: flash-attn has the length before the heads.
std::string layout_of_heads(const Problem& p) {
  if (p.packed_keys) return "query and key are [rows, heads, head_dim]: transpose them if yours are not";
  if (p.op == Op::kPagedPrefill) {
    return "query is [rows, heads, head_dim] and key_cache [num_blocks, block_size, kv_heads, head_dim]: "
           "transpose them if yours are not";
  }
  if (p.op == Op::kPagedDecode) {
    return "query is [batch, heads, length, head_dim] and key_cache [num_blocks, block_size, kv_heads, "
           "head_dim]: transpose them if yours are not";
  }
  return "query and key are [batch, heads, length, head_dim]: use .transpose(1, 2) if yours have the length "
         "before the heads";
}

bool is_paged(const Problem& p) { return p.op == Op::kPagedDecode || p.op == Op::kPagedPrefill; }

const char* names_of_keys(const Problem& p) { return is_paged(p) ? "query/key_cache" : "query/key"; }

const char* name_of_values(const Problem& p) { return is_paged(p) ? "value_cache" : "value"; }

// The equivalent call of torch, for the advice. torch aligns causal masks to the upper left corner and has no
// lengths, windows or trees.
std::string call_of_torch(const Problem& p) {
  const ScoreOptions& options = p.options;
  if (p.kv_format != kKvFloat || changes_scores(options)) {
    const std::string name = name_of(p.op);  // "fattn.decode"
    return "use torch_fattn.reference" + name.substr(name.find('.')) + " for this layer, in float64";
  }
  std::string call = "use F.scaled_dot_product_attention for this layer";
  if (is_paged(p) || p.packed_keys) call += " and each sequence";
  const bool gqa = p.q_heads != p.kv_heads;
  const bool is_prefill = is_dense_prefill(p.op);
  const bool is_last_row = p.q_len == 1 && (is_prefill ? p.q_offset + 1 >= p.kv_len : p.op == Op::kDecode);
  const bool is_torchs = is_prefill && p.q_offset == 0 && p.mask_dtype == DType::kOther;
  const bool hides = (p.is_causal && !is_last_row && !is_torchs) || p.has_seq_lens || options.tree_mask ||
                     options.window_left >= 0 || options.window_right >= 0;
  if (gqa) call += ", with enable_gqa=True";
  if (hides) call += gqa ? " and an attn_mask of" : ", with an attn_mask of";
  if (hides) call += " the keys that each row sees";
  return call;
}

std::optional<Refusal> check_head_dims(const Problem& p) {
  const char* op = name_of(p.op);
  const std::string instead = call_of_torch(p);
  const int64_t most = is_backward(p.op) ? kMaxBackwardHeadDim : kMaxHeadDim;
  // Padding does not change an explicit scale.
  const bool default_scale = p.scale == 1.0 / std::sqrt(static_cast<double>(p.head_dim));
  const std::string scale = default_scale ? " and pass scale=" + inverse_root(p.head_dim) : std::string();
  if (auto refusal =
          check_head_dim(op, names_of_keys(p), p.head_dim,
                         is_paged(p) ? "query and key_cache" : "query and key", scale, instead, most))
    return refusal;
  return check_head_dim(op, name_of_values(p), p.value_dim, name_of_values(p), columns_cut(p.value_dim),
                        instead, most);
}

// The kernels multiply in float32, in units of log2(e).
std::optional<Refusal> check_scale(const char* op, double scale) {
  if (!std::isfinite(static_cast<float>(scale * std::numbers::log2e))) {
    return refuse(Kind::kValue, op, "scale ", scale,
                  " is not finite in float32; leave it out for 1 / sqrt(head_dim)");
  }
  return std::nullopt;
}

std::optional<Refusal> check_packing(const char* op, const Problem& p) {
  if (p.max_seqlen_q < 0) {
    return refuse(Kind::kValue, op, "max_seqlen_q ", p.max_seqlen_q,
                  " is negative; pass the query rows of the longest sequence");
  }
  if (p.max_seqlen_k < 0) {
    return refuse(Kind::kValue, op, "max_seqlen_k ", p.max_seqlen_k,
                  " is negative; pass the keys of the longest sequence");
  }
  if (p.packed_keys && p.kv_len > kMaxLength) {
    return refuse(Kind::kValue, op, p.kv_len, " keys of all sequences are above ", kMaxLength,
                  "; split the call");
  }
  if (p.kv_heads > 0 && p.q_len * (p.q_heads / p.kv_heads) > kMaxLength) {
    return refuse(Kind::kValue, op, p.q_len, " query rows of ", p.q_heads / p.kv_heads,
                  " heads that share keys are above ", kMaxLength, "; split the call");
  }
  return std::nullopt;
}

std::optional<Refusal> check_tree_rows(const Problem& p) {
  if (!p.options.tree_mask || p.q_len <= kMaxTreeRows) return std::nullopt;
  return refuse(Kind::kNotImplemented, name_of(p.op), p.q_len, " query rows per sequence are above ",
                kMaxTreeRows, ", the maximum for tree_mask; use an attn_mask instead");
}

std::optional<Refusal> check_paging(const char* op, const Problem& p) {
  if (p.block_size < 1) {
    return refuse(Kind::kValue, op, "block_size ", p.block_size,
                  " of the key cache is not >= 1; use blocks of 1 key or more");
  }
  if (p.num_blocks >= kMaxBlocks) {
    return refuse(Kind::kValue, op, p.num_blocks,
                  " cache blocks cannot be numbered by an int32 block table; use larger blocks");
  }
  return std::nullopt;
}

}  // namespace

std::optional<Refusal> check_eps(const char* op, double eps) {
  if (std::isfinite(static_cast<float>(eps)) && eps >= 0.0) return std::nullopt;
  return refuse(Kind::kValue, op, "eps ", eps,
                " is not a finite number >= 0 in float32; pass that of the model's norms");
}

std::optional<Refusal> check(const Problem& p) {
  const char* op = name_of(p.op);
  if (!is_float(p.dtype)) {
    return refuse(Kind::kType, op, "query dtype is not supported; use float32, float16 or bfloat16");
  }
  if (p.kv_heads == 0 ? p.q_heads != 0 : p.q_heads % p.kv_heads != 0) {
    return refuse(Kind::kValue, op, p.q_heads, " query heads cannot share ", p.kv_heads,
                  " key-value heads (Hq % Hkv must be 0)", "; ", layout_of_heads(p));
  }
  if (auto refusal = check_head_dims(p)) return refusal;
  if (auto refusal = check_format_dim(op, names_of_keys(p), p.kv_format, p.head_dim)) return refusal;
  if (auto refusal = check_format_dim(op, name_of_values(p), p.kv_format, p.value_dim)) return refusal;
  if (auto refusal = check_scale(op, p.scale)) return refusal;
  if (auto refusal = check_score_options(p)) return refusal;
  if (auto refusal = check_tree_rows(p)) return refusal;
  if (p.q_len > kMaxLength) {
    return refuse(Kind::kValue, op, "query length ", p.q_len, " is above ", kMaxLength,
                  p.packed ? "; split the call" : "; split the rows, each part with its q_offset");
  }
  const int64_t length = max_sequence_keys(p);
  if (length > kMaxLength && is_backward(p.op)) {
    return refuse(Kind::kValue, op, "length ", length, " is above ", kMaxLength, "; use shorter sequences");
  }
  if (length > kMaxLength) {
    return refuse(Kind::kValue, op, "length ", length, " is above ", kMaxLength,
                  "; split the sequence and merge the parts with fattn.merge",
                  is_paged(p) ? ", or leave out columns of block_tables that no sequence fills" : "");
  }
  if (p.batch > kMaxLength || p.q_heads > kMaxLength) {
    return refuse(Kind::kValue, op, p.batch > kMaxLength ? "batch " : "query head count ",
                  p.batch > kMaxLength ? p.batch : p.q_heads, " is above ", kMaxLength, "; split the call");
  }
  const double rows = double(p.packed ? 1 : p.batch) * double(p.q_heads) * double(p.q_len);
  if (rows > double(kMaxRows)) {
    return refuse(Kind::kValue, op, "the result has ", rows, " rows, more than ", kMaxRows,
                  "; split the call");
  }
  if (p.packed) {
    if (auto refusal = check_packing(op, p)) return refusal;
  }
  return is_paged(p) ? check_paging(op, p) : std::nullopt;
}

std::optional<Refusal> check(const MergeProblem& p) {
  const char* op = name_of(Op::kMerge);
  if (!is_float(p.dtype)) {
    return refuse(Kind::kType, op, "outs dtype is not supported; use float32, float16 or bfloat16");
  }
  if (p.parts < 1) {
    return refuse(Kind::kValue, op, p.parts, " parts leave nothing to merge; pass at least one");
  }
  if (p.head_dim < 1) {
    return refuse(Kind::kValue, op, "outs has head_dim ", p.head_dim, " and must have at least 1");
  }
  if (p.rows > kMaxLength || p.parts > kMaxLength || p.head_dim > kMaxLength) {
    return refuse(Kind::kValue, op, "a dimension of outs is above ", kMaxLength, "; merge in pieces");
  }
  return std::nullopt;
}

std::optional<Refusal> check(const CacheWriteProblem& p) {
  const char* op = name_of(Op::kCacheWrite);
  const char* instead = "keep keys and values for F.scaled_dot_product_attention";
  const int64_t dims[] = {p.key.head_dim, p.value.head_dim};
  const std::string later[] = {" and decode with scale=" + inverse_root(dims[0]), columns_cut(dims[1])};
  const char* const names[] = {"key", "value"};
  for (int side = 0; side < 2; ++side) {
    const std::string padded = std::string(names[side]) + " and its cache";
    if (auto refusal = check_head_dim(op, names[side], dims[side], padded, later[side], instead)) {
      return refusal;
    }
    if (auto refusal = check_format_dim(op, names[side], p.format, dims[side])) return refusal;
  }
  if (p.block_size < 1 || p.block_size > kMaxLength) {
    return refuse(Kind::kValue, op, "block_size ", p.block_size, " of key_cache is not between 1 and ",
                  kMaxLength, "; use blocks of 1 key or more, up to that");
  }
  if (p.tokens > kMaxLength || p.kv_heads > kMaxLength || p.tokens * p.kv_heads > kMaxLength) {
    return refuse(Kind::kValue, op, p.tokens, " tokens of ", p.kv_heads, " heads are more than ", kMaxLength,
                  " rows; write them in pieces");
  }
  return std::nullopt;
}

std::optional<Refusal> check(const RotaryProblem& p) {
  const char* op = name_of(p.op);
  const CacheWriteProblem& write = p.write;
  const bool writes = p.op == Op::kRotaryWrite;
  const int64_t head_dim = write.key.head_dim, dims[] = {head_dim, write.value.head_dim};
  const char* const names[] = {"query/key", "value"};
  for (int side = 0; side < 2; ++side) {
    if (dims[side] <= 0 || dims[side] > kMaxHeadDim || dims[side] % kRotaryMultiple != 0) {
      return refuse(dims[side] > kMaxHeadDim ? Kind::kNotImplemented : Kind::kValue, op, names[side],
                    " head_dim ", dims[side], " is not a positive multiple of ", kRotaryMultiple, " up to ",
                    kMaxHeadDim, "; use the model's own functions for this layer");
    }
    if (auto refusal = check_format_dim(op, names[side], write.format, dims[side])) return refusal;
  }
  if (p.rotary_dim < 2 || p.rotary_dim % 2 != 0) {
    return refuse(Kind::kValue, op, "rotary_dim ", p.rotary_dim,
                  " is not a positive even number; pass the columns that are rotated");
  }
  if (p.rotary_offset < 0 || p.rotary_offset > head_dim - p.rotary_dim) {
    return refuse(Kind::kValue, op, "rotary_offset ", p.rotary_offset, " and ", p.rotary_dim,
                  " rotated columns do not fit in head_dim ", head_dim, "; pass one from 0 to ",
                  std::max<int64_t>(head_dim - p.rotary_dim, 0), ", or tables of fewer columns");
  }
  if (auto refusal = check_eps(op, p.eps)) return refusal;
  const int64_t capacity = write.block_size, start = p.params.start;
  if (writes && (capacity < 1 || capacity > kMaxLength)) {
    return refuse(Kind::kValue, op, "block_size ", capacity, " of key_cache is not between 1 and ",
                  kMaxLength, "; use blocks of 1 key or more, up to that");
  }
  if (start < 0) {
    return refuse(Kind::kValue, op, "start ", start,
                  " is negative; pass the number of tokens that the cache holds");
  }
  if (!p.has_slots && start > capacity - p.q_len && write.tokens > 0) {
    return refuse(Kind::kValue, op, p.q_len, " tokens from start ", start, " on exceed the capacity of ",
                  capacity, "; pass larger caches");
  }
  const int64_t heads = p.q_heads + 2 * write.kv_heads;
  if (write.tokens > kMaxLength || heads > kMaxLength || write.tokens * heads > kMaxLength) {
    return refuse(Kind::kValue, op, write.tokens, " tokens of ", heads, " heads are more than ", kMaxLength,
                  " rows; pass them in pieces");
  }
  return std::nullopt;
}

std::optional<Refusal> check(const RmsNormProblem& p) {
  const char* op = name_of(Op::kRmsNorm);
  if (auto refusal = check_eps(op, p.eps)) return refusal;
  if (p.columns > kMaxLength || p.rows > kMaxLength) {
    return refuse(Kind::kValue, op, p.rows, " rows of ", p.columns, " columns are more or longer than ",
                  kMaxLength, "; pass them in pieces");
  }
  return std::nullopt;
}

std::optional<Refusal> check(const LogitsProblem& p) {
  const char* op = name_of(p.op);
  const bool by_row = is_row_op(p.op);
  const bool has_cap = !by_row || p.softcap != 0.0;
  // In float32: a GPU flushes subnormal numbers to 0, and would divide by 0.
  const float cap = static_cast<float>(p.softcap);
  if (has_cap && !(std::isfinite(cap) && cap >= std::numeric_limits<float>::min())) {
    return refuse(Kind::kValue, op, by_row ? "softcap " : "cap ", p.softcap,
                  " is not a positive normal number of float32",
                  by_row ? "; use 0 for none" : "; pass the bound of the result");
  }
  if (by_row && p.columns > kMaxLength) {
    return refuse(Kind::kValue, op, "row length ", p.columns, " is above ", kMaxLength,
                  "; split the rows and join the parts by their sums");
  }
  if (p.rows > kMaxLogitsRows) {
    return refuse(Kind::kValue, op, p.rows, " rows are more than ", kMaxLogitsRows, "; split the tensor");
  }
  if (p.columns > 0 && p.rows > kMaxLogits / p.columns) {
    return refuse(Kind::kValue, op, p.rows, " rows of ", p.columns, " are more than ", kMaxLogits,
                  " elements; split the tensor");
  }
  return std::nullopt;
}

std::optional<Refusal> check(const MaskMapProblem& p) {
  const char* op = name_of(Op::kMaskMap);
  if (p.rows > kMaxLength || p.keys > kMaxLength) {
    return refuse(Kind::kValue, op, "length ", std::max(p.rows, p.keys), " of attn_mask is above ",
                  kMaxLength, "; split the mask");
  }
  if (map_groups(p) > double(kMaxMapGroups)) {
    return refuse(Kind::kValue, op, "attn_mask has ",
                  double(p.batch) * double(p.heads) * double(p.rows) * double(p.keys),
                  " elements, more than are mapped in ", kMaxMapGroups,
                  " threadgroups; leave out the dimensions in which it is expanded");
  }
  return std::nullopt;
}

std::optional<Refusal> check(const DeviceFacts& device, Op op) {
  if (device.family < kMinFamily) {
    return refuse(Kind::kNotImplemented, name_of(op), device.name, " is of Apple family ", device.family,
                  " and the kernels need simdgroup matrices, which begin with family ", kMinFamily,
                  " (M1); use F.scaled_dot_product_attention, or tensors on the CPU");
  }
  return std::nullopt;
}

}  // namespace fattn
