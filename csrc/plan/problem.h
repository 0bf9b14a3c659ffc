// Problems: calls as plain data, the planner's input. Independent of torch and Metal.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "../kernels/common/params.h"
#include "../kernels/delta/delta_params.h"
#include "score_options.h"

namespace fattn {

// X(op, name, ...)
#define FATTN_OPS(X)         \
  FATTN_ATTENTION_OPS(X)     \
  FATTN_BACKWARD_OPS(X)      \
  X(Merge, merge)            \
  X(CacheWrite, cache_write) \
  FATTN_ROTARY_OPS(X)        \
  X(RmsNorm, rms_norm)       \
  FATTN_DELTA_OPS(X)         \
  FATTN_LOGITS_OPS(X)        \
  X(MaskMap, mask_map)

#define FATTN_ATTENTION_OPS(X)   \
  X(Prefill, prefill)            \
  X(Decode, decode)              \
  X(PagedDecode, paged_decode)   \
  X(PagedPrefill, paged_prefill) \
  X(VarlenPrefill, varlen_prefill)

// They share a kernel: X(op, name).
#define FATTN_ROTARY_OPS(X) \
  X(Rotary, rotary)         \
  X(RotaryWrite, rotary_write)

// Linear attention: X(op, name).
#define FATTN_DELTA_OPS(X)            \
  X(GatedDeltaRule, gated_delta_rule) \
  X(GatedDeltaStep, gated_delta_step) \
  X(CausalConv1d, causal_conv1d)

// Backward operators: X(op, name, the forward operator).
#define FATTN_BACKWARD_OPS(X)                   \
  X(PrefillBackward, prefill_backward, Prefill) \
  X(VarlenPrefillBackward, varlen_prefill_backward, VarlenPrefill)

// Operators on logits. Each has a kernel of the same name: rows of FATTN_OPS and of FATTN_KERNELS.
#define FATTN_LOGITS_OPS(X) \
  FATTN_ROW_OPS(X)          \
  FATTN_ELEMENT_OPS(X)
// name(Tensor scores, *, float softcap=0.0): along the last dimension.
#define FATTN_ROW_OPS(X) X(Softmax, softmax, logits, LogitsParams)
// name(Tensor x, float cap): element by element.
#define FATTN_ELEMENT_OPS(X) X(Softcap, softcap, logits, LogitsParams)

#define FATTN_ENUMERATOR(op, name, ...) k##op,
enum class Op : uint8_t { FATTN_OPS(FATTN_ENUMERATOR) };
#undef FATTN_ENUMERATOR

// X(id, name, bytes, type in Metal)
#define FATTN_DTYPES(X)            \
  X(Float32, float32, 4, float)    \
  X(Float16, float16, 2, half)     \
  X(BFloat16, bfloat16, 2, bfloat) \
  X(Bool, bool, 1, bool)           \
  X(Int8, int8, 1, char)           \
  X(UInt8, uint8, 1, uchar)        \
  X(Other, other, 0, float) /* none of these, or no tensor */
#define FATTN_ENUMERATOR(id, ...) k##id,
enum class DType : uint8_t { FATTN_DTYPES(FATTN_ENUMERATOR) };
#undef FATTN_ENUMERATOR

// The public name: "fattn.prefill" and so on.
const char* name_of(Op op);
const char* name_of(DType dtype);
int size_of(DType dtype);
inline bool is_row_op(Op op) {
#define FATTN_IS(id, ...) || op == Op::k##id
  return false FATTN_ROW_OPS(FATTN_IS);
#undef FATTN_IS
}
inline bool is_backward(Op op) {
#define FATTN_IS(id, ...) || op == Op::k##id
  return false FATTN_BACKWARD_OPS(FATTN_IS);
#undef FATTN_IS
}
inline bool is_decode(Op op) { return op == Op::kDecode || op == Op::kPagedDecode; }
// Whether the op takes the operands of prefill.
inline bool is_dense_prefill(Op op) { return op == Op::kPrefill || op == Op::kPrefillBackward; }
inline bool is_float(DType dtype) {
  return dtype == DType::kFloat32 || dtype == DType::kFloat16 || dtype == DType::kBFloat16;
}

inline FloatKind float_kind(DType dtype) {
  return dtype == DType::kFloat16 ? kKindFloat16 : dtype == DType::kBFloat16 ? kKindBFloat16 : kKindFloat32;
}

inline DType dtype_of(FloatKind kind) {
  return kind == kKindFloat16 ? DType::kFloat16 : kind == kKindBFloat16 ? DType::kBFloat16 : DType::kFloat32;
}

// Switches of the attention operators, false by default. decode and paged_decode take all of them.
// X(name, whether prefill takes it)
#define FATTN_FLAGS(X) X(token_major_out, true) /* strides of the result: out_strides() */

// One attention call over query [batch, q_heads, q_len, head_dim], key [batch, kv_heads, kv_len, head_dim]
// and value [batch, kv_heads, kv_len, value_dim]. Paged calls read key and value from a pool of blocks.
// Packed calls have the rows of all sequences in one query [q_len, q_heads, head_dim], and may pack their
// keys likewise [kv_len, kv_heads, head_dim]. All strides are in elements.
struct Problem {
  Op op = Op::kPrefill;
  DType dtype = DType::kFloat32;  // of query and result, and of key and value unless quantised
  int64_t batch = 0;
  int64_t q_heads = 0;
  int64_t kv_heads = 0;
  int64_t q_len = 0;   // packed: rows of all sequences
  int64_t kv_len = 0;  // decode: the capacity; paged: max_blocks * block_size; packed keys: of all sequences
  int64_t head_dim = 0;
  int64_t value_dim = 0;

  Strides3 query{};
  Strides3 key{};  // paged: block, head, slot
  Strides3 value{};
#define FATTN_FLAG(name, prefill_has_it) bool name = false;
  FATTN_FLAGS(FATTN_FLAG)
#undef FATTN_FLAG
  bool part = false;  // returns a partial result for merge.parts: float32, with sums of weights
  // Forward: also returns what rounding takes off out (remainder_of). Backward: out is given with it.
  bool has_out_remainder = false;
  bool value_in_key = false;    // decode: the value is the first columns of the key, in the same memory
  bool vector_aligned = false;  // query, key, value rows are 16-byte aligned, pairs of int4 scales 4-byte

  DType mask_dtype = DType::kOther;  // kOther: no attn_mask
  Strides4 mask{};                   // 0 where the mask is broadcast
  bool mask_pairs = false;           // pairs of keys can be read with one load, from key 0 on
  bool has_mask_map = false;
  Strides4 mask_map{};     // like `mask`, in cells; of a block mask in blocks
  int64_t block_rows = 0;  // of a block mask, which is the map of no mask; 0: none
  int64_t block_keys = 0;

  bool is_causal = false;
  int64_t q_offset = 0;  // prefill: absolute position of query row 0; packed keys: in each sequence
  double scale = 0.0;

  KvFormat kv_format = kKvFloat;
  bool has_scales = false;
  Strides3 key_scales{};  // in the order of key and value
  Strides3 value_scales{};

  bool has_seq_lens = false;
  int64_t seq_lens_stride = 0;
  int64_t block_size = 0;  // paged: keys per block
  int64_t num_blocks = 0;
  int64_t max_blocks = 0;
  int64_t block_table_batch_stride = 0;
  int64_t block_table_entry_stride = 0;

  bool packed = false;
  int64_t max_seqlen_q = 0;  // packed: rows of the longest sequence
  int64_t cu_seqlens_stride = 0;

  bool packed_keys = false;
  int64_t max_seqlen_k = 0;     // packed keys: of the longest sequence
  bool last_rows_meet = false;  // packed keys: the last row is at the last key; q_offset is not used
  int64_t cu_seqlens_k_stride = 0;

  // Backward: operands that the forward does not have. vector_aligned covers grad_out.
  Strides3 grad_out{};
  bool has_grad_lse = false;
  bool has_saved_out = false;  // the forward's result is given: in float32, or with its remainder
  Strides3 out{};
  Strides3 out_remainder{};

  ScoreOptions options;
};

// Rows and keys per sequence that the plan of a packed call assumes. Larger ones still give right results.
inline int64_t max_sequence_rows(const Problem& p) { return std::min(p.max_seqlen_q, p.q_len); }
inline int64_t max_sequence_keys(const Problem& p) {
  return p.packed_keys ? std::min(p.max_seqlen_k, p.kv_len) : p.kv_len;
}

inline DType out_dtype(const Problem& p) { return p.part ? DType::kFloat32 : p.dtype; }

// The strides of `out`: batch, head, row; or token-major, batch, row, head, as always for packed rows. A size
// of 0 counts as 1, as in torch's strides.
inline Strides3 out_strides(const Problem& p) {
  const int64_t rows = std::max<int64_t>(p.q_len, 1);
  const int64_t heads = std::max<int64_t>(p.q_heads, 1);
  const bool token_major = (p.packed || p.token_major_out) && !p.part;  // a part is in the order of lse
  Strides3 strides{};
  strides.batch = p.packed ? 0 : heads * rows * p.value_dim;
  strides.head = token_major ? p.value_dim : rows * p.value_dim;
  strides.row = token_major ? heads * p.value_dim : p.value_dim;
  return strides;
}
// Whether `out` is token-major where that differs. Packed rows always are; lse and the parts never are.
inline bool is_token_major(const Problem& p) {
  return (p.packed || p.token_major_out) && !p.part && p.q_len > 1 && p.q_heads > 1;
}

// Partial results over disjoint keys, contiguous: outs [parts, ..., head_dim] of `dtype`, lses [parts, ...]
// of float32. With `sums`, sums of weights (kSumFloats) replace lses.
struct MergeProblem {
  DType dtype = DType::kFloat32;
  DType out_dtype = DType::kFloat32;
  bool sums = false;
  int64_t parts = 0;
  int64_t rows = 0;
  int64_t head_dim = 0;
};

// Strides of a cache [num_blocks, block_size, kv_heads, columns] and of its scales, in the order block, head,
// slot.
struct CacheSide {
  int64_t head_dim = 0;
  Strides3 cache{};
  Strides3 scales{};
};

// Writes the rows of `tokens` tokens into the slots of a cache.
struct CacheWriteProblem {
  DType dtype = DType::kFloat32;  // of the rows
  KvFormat format = kKvFloat;
  bool has_scales = false;
  bool long_slots = false;  // slot_mapping is int64, else int32
  int64_t tokens = 0;
  int64_t kv_heads = 0;
  int64_t num_blocks = 0;
  int64_t block_size = 0;
  CacheSide key;
  CacheSide value;
  bool value_in_key = false;    // the value is the first columns of the key, stored once
  bool vector_aligned = false;  // four columns of a row can be read and written with one access
  CacheWriteParams params{};    // cache_write: strides of rows and slots; the planner sets the others
};

// What is compiled into a kernel of norms and rotations.
struct RotaryForm {
  RotaryStyle style = kStyleHalves;
  NormForm norm = kNormRounded;
  int64_t rotary_dim = 0;
  int64_t rotary_offset = 0;
  DType table_dtype = DType::kFloat32;   // of cos and sin
  DType weight_dtype = DType::kFloat32;  // of the norms

  bool operator==(const RotaryForm&) const = default;
};

// Rotates query [batch, q_heads, q_len, head_dim] and key [batch, kv_heads, q_len, head_dim], and writes key
// and value. Without slots or starts, the tokens of a sequence are written side by side, from `start` on,
// into the block of its number.
struct RotaryProblem : RotaryForm {
  Op op = Op::kRotary;
  bool token_major_out = false;
  int64_t table_columns = 0;  // rotary_dim, or half of it
  double eps = 0.0;
  bool has_query_norm = false;
  bool has_key_norm = false;
  bool has_slots = false;
  bool has_starts = false;
  bool vector_tables = false;  // four columns of cos and sin can be read with one access
  int64_t q_len = 0;
  int64_t q_heads = 0;
  // Strides of rows, tables, slots and starts, and `start`. The planner sets the others.
  RotaryParams params{};
  // Rows and caches. kRotary: the cache is the rotated key, of
  // whose head_dim the absent value is.
  CacheWriteProblem write;
};

// The strides of contiguous rows [batch, heads, length, columns], or of a transposed view of [batch, length,
// heads, columns]. A size of 0 counts as 1.
inline Strides3 row_strides(int64_t heads, int64_t length, int64_t columns, bool token_major) {
  heads = std::max<int64_t>(heads, 1), length = std::max<int64_t>(length, 1);
  return {.batch = heads * length * columns,
          .head = token_major ? columns : length * columns,
          .row = token_major ? heads * columns : columns};
}

// The map of a mask [batch, heads, rows, keys], with size 1 where it is broadcast. The map is contiguous.
struct MaskMapProblem {
  DType dtype = DType::kBool;
  int64_t batch = 1;
  int64_t heads = 1;
  int64_t rows = 1;
  int64_t keys = 1;
  Strides4 mask{};
};

// A row op or an element op over rows of `columns`; LogitsParams has the sizes and strides of the rows. The
// result is contiguous.
struct LogitsProblem {
  Op op = Op::kSoftmax;
  DType dtype = DType::kFloat32;
  int dims = 1;
  std::array<int64_t, kLogitsDims> sizes{1};
  std::array<int64_t, kLogitsDims> strides{};
  int64_t rows = 1;
  int64_t columns = 1;
  int64_t column_stride = 1;
  bool vector_aligned = false;  // kLogitsVector columns can be read and written with one access
  double softcap = 0.0;         // row op: 0 for none
};

// Normalises rows [batch, heads, length, columns]. The result is contiguous.
struct RmsNormProblem {
  DType dtype = DType::kFloat32;  // of x and gate
  DType weight_dtype = DType::kFloat32;
  DType out_dtype = DType::kFloat32;
  NormForm norm = kNormRounded;
  GateKind gate = kGateNone;
  bool has_weight = false;
  bool vector_aligned = false;
  double eps = 0.0;
  int64_t rows = 0;
  int64_t columns = 0;
  RmsNormParams params{};  // strides, heads and length; the planner sets the others
};

// Linear attention over tokens [batch, length, ..] and the states of their sequences. Packed sequences share
// one batch.
struct SequenceProblem {
  Op op = Op::kGatedDeltaRule;
  DType dtype = DType::kFloat32;  // of the tokens
  bool packed = false;
  bool has_state = false;
  bool has_initial = false;  // bool per sequence: whether it begins with its state, not with zeros
  bool has_slots = false;
  int64_t batch = 0;
  int64_t length = 0;
  int64_t sequences = 0;
  int64_t states = 0;
};

// The gated delta rule over tokens [batch, length, heads, columns]: query and key have key_heads, value and
// the result value_heads, a multiple of them.
struct GatedDeltaProblem : SequenceProblem {
  DType decay_dtype = DType::kFloat32;  // of g or a
  DType beta_dtype = DType::kFloat32;   // of beta or b
  DType a_log_dtype = DType::kFloat32;
  DType dt_bias_dtype = DType::kFloat32;
  bool channel_decay = false;  // a decay per channel of a key, not per head
  bool raw_gates = false;
  bool l2norm = false;
  bool writes_state = false;
  bool vector_aligned = false;  // four columns of query and key can be read with one access
  int64_t key_heads = 0;
  int64_t value_heads = 0;
  int64_t head_dim = 0;
  int64_t value_dim = 0;
  double scale = 1.0;
  GatedDeltaParams params{};  // strides; the planner sets the others
};

// The rule, after a convolution of query, key and value and before a gated norm, for a few tokens.
struct GatedDeltaStepProblem : GatedDeltaProblem {
  DType conv_dtype = DType::kFloat32;  // of the convolution's weight and bias
  DType norm_dtype = DType::kFloat32;
  bool conv_bias = false;
  bool has_counts = false;
  bool conv_state_out = false;  // written in place of conv_state, which value heads share
  GateKind gate = kGateSilu;
  double eps = 0.0;
  int64_t taps = 0;
  int64_t conv_columns = 0;
  GatedDeltaStepParams step{};  // strides of its own operands
};

// A causal convolution of each channel of tokens [batch, length, channels].
struct CausalConv1dProblem : SequenceProblem {
  DType weight_dtype = DType::kFloat32;
  bool silu = false;
  bool biased = false;
  int64_t channels = 0;
  int64_t taps = 0;
  CausalConv1dParams params{};  // strides and columns
};

}  // namespace fattn
