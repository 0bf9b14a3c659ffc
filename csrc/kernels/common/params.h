// The interface of host and kernels: buffer slots, function constants, parameter structs. The planner (C++20)
// and the kernels (MSL) include this file, so it must compile as both.
#pragma once

#include "formats.h"
#include "sizes.h"

namespace fattn {

// Enums, declarations, fields, explain's JSON and the tables of the tests are generated from the lists below.

// The buffers of the kernels. The position in the list is the buffer slot, the same in every kernel; explain
// shows the name. ALWAYS and OPTIONAL are inputs of the attention operators, Call::<name> on the host. The
// attention kernels take them and RESULT; OPTIONAL and RESULT depend on a function constant.
// ALWAYS, OTHER(slot, type, name), OPTIONAL, RESULT(slot, type, name, function constant)
#define FATTN_OPERANDS(ALWAYS, OPTIONAL, RESULT, OTHER)                                          \
  ALWAYS(Query, const device Element*, query)                                                    \
  ALWAYS(Key, const device Stored*, key)                                                         \
  ALWAYS(Value, const device Stored*, value)                                                     \
  RESULT(Out, device Element*, out, fc_whole)                                                    \
  RESULT(Lse, device float*, lse, fc_whole)                                                      \
  OTHER(Params, constant Params&, params)                                                        \
  OPTIONAL(Mask, const device uchar*, attn_mask, fc_has_mask)                                    \
  OPTIONAL(SeqLens, const device int*, seq_lens, fc_has_seq_lens)                                \
  OPTIONAL(BlockTables, const device int*, block_tables, fc_paged)                               \
  RESULT(PartialOut, device float*, partial_out, fc_split)                                       \
  RESULT(PartialSum, device float4*, partial_sum, fc_split)                                      \
  RESULT(OutRemainder, device Element*, out_remainder, fc_out_remainder) /* remainder_of(out) */ \
  OPTIONAL(Sinks, const device uchar*, sinks, fc_sinks)                                          \
  OPTIONAL(AlibiSlopes, const device uchar*, alibi_slopes, fc_alibi)                             \
  OPTIONAL(TreeMask, const device long*, tree_mask, fc_tree)                                     \
  OPTIONAL(KeyScales, const device Scale*, key_scales, fc_scales)                                \
  OPTIONAL(ValueScales, const device Scale*, value_scales, fc_scales)                            \
  OPTIONAL(CuSeqlens, const device int*, cu_seqlens_q, fc_packed)                                \
  OTHER(Slice, constant GridSlice&, slice)                                                       \
  OPTIONAL(CuSeqlensK, const device int*, cu_seqlens_k, fc_packed_keys)                          \
  OPTIONAL(MaskMap, const device uchar*, mask_map, fc_mask_map) /* a block_mask, or made here */ \
  OTHER(KeyCache, device Stored*, key_cache)                    /* of cache_write */             \
  OTHER(ValueCache, device Stored*, value_cache)                                                 \
  OTHER(SlotMapping, const device SlotNumber*, slot_mapping)                                     \
  OTHER(Logits, const device Element*, logits)    /* of softmax and softcap */                   \
  OTHER(GradOut, const device Element*, grad_out) /* from here on of a backward */               \
  OTHER(GradLse, const device float*, grad_lse)                                                  \
  OTHER(SavedOut, const device uchar*, saved_out) /* the result of the forward */                \
  OTHER(RowStates, device float4*, row_states)    /* scratch: RowState */                        \
  OTHER(GradKey, device Element*, grad_key)                                                      \
  OTHER(GradValue, device Element*, grad_value)                                                  \
  OTHER(GradQuery, device Element*, grad_query) /* written to the slot of out */                 \
  OTHER(GradSinks, device Element*, grad_sinks) /* likewise */                                   \
  OTHER(GradAlibi, device Element*, grad_alibi) /* likewise */                                   \
  OTHER(TensorFacts, device int*, tensor_facts) /* of tensor_probe; likewise */                  \
  OTHER(Cos, const device Table*, cos)          /* from here on of rotary, in RotaryBuffer */    \
  OTHER(Sin, const device Table*, sin)                                                           \
  OTHER(Starts, const device SlotNumber*, starts)                                                \
  OTHER(QueryNorm, const device Weight*, query_norm)                                             \
  OTHER(KeyNorm, const device Weight*, key_norm)                                                 \
  OTHER(Rows, const device Element*, x) /* from here on of rms_norm, in RmsNormBuffer */         \
  OTHER(Weight, const device Weight*, weight)                                                    \
  OTHER(Gate, const device Element*, gate)                                                       \
  OTHER(Decay, const device Decay*, g) /* from here on of linear attention, in DeltaBuffer */    \
  OTHER(Beta, const device Beta*, beta)                                                          \
  OTHER(RawDecay, const device Decay*, a)                                                        \
  OTHER(RawBeta, const device Beta*, b)                                                          \
  OTHER(ALog, const device ALog*, A_log)                                                         \
  OTHER(DtBias, const device DtBias*, dt_bias)                                                   \
  OTHER(State, device float*, state)                                                             \
  OTHER(HasInitial, const device bool*, has_initial_state)                                       \
  OTHER(StateSlots, const device int*, slots)                                                    \
  OTHER(Seqlens, const device int*, cu_seqlens)                                                  \
  OTHER(Chunks, device float*, chunks) /* scratch: kDeltaChunkFloats per chunk and head */       \
  OTHER(OutGate, const device Element*, z)                                                       \
  OTHER(ConvWeight, const device Weight*, conv_weight)                                           \
  OTHER(ConvBias, const device Weight*, conv_bias)                                               \
  OTHER(NormWeight, const device Weight*, norm_weight)                                           \
  OTHER(ConvState, device Element*, conv_state)                                                  \
  OTHER(ConvStateOut, device Element*, conv_state_out)                                           \
  OTHER(Counts, const device int*, counts)                                                       \
  OTHER(Bias, const device Weight*, bias)

#define FATTN_ENUMERATOR(slot, ...) kSlot##slot,
enum Slot {
  FATTN_OPERANDS(FATTN_ENUMERATOR, FATTN_ENUMERATOR, FATTN_ENUMERATOR, FATTN_ENUMERATOR) kSlotCount
};
#undef FATTN_ENUMERATOR
// Operands from this one on share slots: Metal has 31.
FATTN_CONSTEXPR int kBufferSlots = kSlotGradQuery;
static_assert(kBufferSlots <= 31, "Metal has no more buffers");
// The slots of rotary's own operands, which it takes from the backward.
enum RotaryBuffer {
  kBufferCos = kSlotGradOut,
  kBufferSin = kSlotGradLse,
  kBufferStarts = kSlotSavedOut,
  kBufferQueryNorm = kSlotRowStates,
  kBufferKeyNorm = kSlotGradKey,
};
enum RmsNormBuffer { kBufferRows = kSlotQuery, kBufferWeight = kSlotKey, kBufferGate = kSlotValue };

// Function constants: features that are switched per pipeline. X(type, name): fc_<name> in the kernels,
// KernelSpec::<name> on the host. The position in the list is the index of the constant.
#define FATTN_FUNCTION_CONSTANTS(X)                                                                     \
  X(uint, mask)       /* MaskKind */                                                                    \
  X(bool, mask_pairs) /* two neighbouring elements of a mask's row can be read at once */               \
  X(bool, causal)                                                                                       \
  X(bool, vector_loads) /* rows of Q, K, V start on 16-byte boundaries; cache_write: on four columns */ \
  X(bool, split)        /* attention writes, or merge reads, float32 partial results and their sums */  \
  X(bool, has_seq_lens)                                                                                 \
  X(uint, block_size) /* keys per cache block; 0: dense */                                              \
  X(bool, window)     /* rows see a window of keys, and the sink tokens below it */                     \
  X(bool, softcap)                                                                                      \
  X(bool, alibi)                                                                                        \
  X(bool, sinks)           /* a learned logit per head */                                               \
  X(bool, tree)            /* the newest keys are draft tokens under a tree mask */                     \
  X(bool, scales)          /* quantised K and V have scales */                                          \
  X(bool, packed)          /* the query rows of all sequences lie in one tensor, cut by cu_seqlens */   \
  X(bool, sliced)          /* the grid takes several dispatches (plan/slices.h) */                      \
  X(bool, packed_keys)     /* the keys of all sequences lie in one tensor, cut by cu_seqlens_k */       \
  X(bool, mask_map)        /* there is a map of the mask, or a block mask */                            \
  X(bool, token_major_out) /* decode, merge: out is [batch, row, head] in memory */                     \
  X(bool, grouped)         /* a dense tile has rows of all query heads that share a key-value head */   \
  X(uint, sinks_kind)      /* FloatKind of sinks */                                                     \
  X(uint, slopes_kind)     /* FloatKind of alibi_slopes */                                              \
  X(bool, grad_lse)        /* backward: lse has a gradient */                                           \
  X(bool, saved_out)       /* backward: the result of the forward is given */                           \
  X(bool, out_remainder)   /* out has a remainder: attention and merge write it, a backward reads it */ \
  X(bool, query_norm)      /* from here on of rotary: the heads of the query are normalised */          \
  X(bool, key_norm)                                                                                     \
  X(bool, slots)         /* each token has a slot; else positions are adjacent */                       \
  X(bool, starts)        /* the slots of the first positions are on the device */                       \
  X(bool, values)        /* values are written too */                                                   \
  X(bool, vector_tables) /* four columns of cos and sin can be read with one access */                  \
  X(uint, gate)          /* rms_norm: GateKind */                                                       \
  X(bool, weighted)                                                                                     \
  X(bool, raw_gates) /* from here on of linear attention: g and beta are computed from a and b */       \
  X(bool, qk_norm)   /* queries and keys are normalised */                                              \
  X(bool, has_state)                                                                                    \
  X(bool, writes_state)                                                                                 \
  X(bool, has_initial)    /* some sequences may begin with a state of zeros */                          \
  X(bool, biased)         /* the convolution has a bias */                                              \
  X(bool, counts)         /* each sequence has a number of tokens */                                    \
  X(bool, conv_state_out) /* the convolution's new state has memory of its own */

#define FATTN_ENUMERATOR(type, name) kConst_##name,
enum FunctionConstant { FATTN_FUNCTION_CONSTANTS(FATTN_ENUMERATOR) kConstCount };
#undef FATTN_ENUMERATOR
// Declares a function constant; use it at global scope.
#define FATTN_DECLARE_CONSTANT(type, name) \
  constant type fc_##name [[function_constant(fattn::kConst_##name)]];

// What multiplies a normalised row.
enum GateKind { kGateNone = 0, kGateSilu = 1, kGateSigmoid = 2 };

enum FloatKind { kKindFloat32 = 0, kKindFloat16 = 1, kKindBFloat16 = 2 };

// An additive mask is kMaskFloat32 plus its FloatKind.
enum MaskKind { kMaskNone = 0, kMaskBool = 1, kMaskFloat32 = 2, kMaskFloat16 = 3, kMaskBFloat16 = 4 };

// A mask map has a byte for each cell of kCellRows rows and kCellKeys keys.
enum CellKind {
  kCellHidden = 0,  // no row sees any of the keys
  kCellMixed = 1,   // any other cell; bit kCellKindBits + f: fragment f is hidden from every row
  kCellWhole = 2,   // every row sees every key, and the mask adds 0
};

#define FATTN_FIELD(type, name) type name;
// For a list that a caller of the macros below does not need.
#define FATTN_NOTHING(...)

#define FATTN_STRIDES3(X) X(fattn_i64, batch) X(fattn_i64, head) X(fattn_i64, row)
struct Strides3 {  // in elements; the last dimension of every operand is contiguous
  FATTN_STRIDES3(FATTN_FIELD)
};

#define FATTN_STRIDES4(X) FATTN_STRIDES3(X) X(fattn_i64, key)
struct Strides4 {
  FATTN_STRIDES4(FATTN_FIELD)
};

// `second`: from the column of the first number of a pair to that of the second.
#define FATTN_TABLE_STRIDES(X) X(fattn_i64, batch) X(fattn_i64, row) X(fattn_i32, column) X(fattn_i32, second)
struct TableStrides {
  FATTN_TABLE_STRIDES(FATTN_FIELD)
};

// One of the dispatches of a sliced grid: consecutive threadgroups, along x.
struct GridSlice {
  fattn_i64 first_group;  // its index in the grid, along x, then y, then z
  fattn_i32 grid_x;
  fattn_i32 grid_y;
};

// The operands of prefill and decode.
#define FATTN_OPERAND_STRIDES(X)                                           \
  X(Strides3, query)                                                       \
  X(Strides3, key) /* dense: batch, head, row. Paged: block, head, slot */ \
  X(Strides3, value)                                                       \
  X(Strides3, key_scales) /* in the order of `key` */                      \
  X(Strides3, value_scales)                                                \
  X(Strides4, mask)

// The score options of prefill and decode: strides of their tensors, and numbers.
#define FATTN_SCORE_STRIDES(X)                                                       \
  X(fattn_i64, sinks_stride)                                                         \
  X(fattn_i64, alibi_slopes_batch_stride) /* 0: the same slopes for all sequences */ \
  X(fattn_i64, alibi_slopes_stride)                                                  \
  X(fattn_i64, tree_mask_batch_stride) /* tree_mask: of decode */                    \
  X(fattn_i64, tree_mask_row_stride)
#define FATTN_SCORE_PARAMS(X)                                                                           \
  X(fattn_f32, score_scale) /* from a product to score units (softmax.h), or to the argument of tanh */ \
  X(fattn_f32, softcap)     /* in score units */                                                        \
  X(fattn_f32, slope_scale) /* from ALiBi's slopes to score units */

#define FATTN_PREFILL_PARAMS(X)                                                                        \
  FATTN_OPERAND_STRIDES(X)                                                                             \
  X(Strides4, mask_map) /* by cells or blocks */                                                       \
  X(Strides3, out)      /* packed rows: head and row of the call */                                    \
  X(fattn_i64, block_table_batch_stride)                                                               \
  X(fattn_i64, block_table_entry_stride)                                                               \
  X(fattn_i64, seq_lens_stride)                                                                        \
  X(fattn_i64, cu_seqlens_stride)                                                                      \
  X(fattn_i64, cu_seqlens_k_stride)                                                                    \
  FATTN_SCORE_STRIDES(X)                                                                               \
  X(fattn_i32, batch)                                                                                  \
  X(fattn_i32, q_len)  /* packed: rows of all sequences */                                             \
  X(fattn_i32, kv_len) /* paged: max_blocks * block_size; packed keys: of all sequences */             \
  X(fattn_i32, q_heads)                                                                                \
  X(fattn_i32, group_size)   /* query heads per key-value head */                                      \
  X(fattn_i32, q_offset)     /* absolute position of query row 0; unused with seq_lens */              \
  X(fattn_i32, window_left)  /* kNoLimit: every key below the row's own */                             \
  X(fattn_i32, window_right) /* kNoLimit: every key above it */                                        \
  X(fattn_i32, sink_tokens)                                                                            \
  X(fattn_i32, num_blocks)                                                                             \
  X(fattn_i32, q_tiles)                                                                                \
  X(fattn_i32, last_rows_meet) /* packed keys: the last row is at the last key, instead of q_offset */ \
  X(fattn_i32, map_row_shift)  /* of a block mask: log2 of the rows of cells in a row of blocks */     \
  X(fattn_i32, map_key_shift)  /* the same along the keys */                                           \
  FATTN_SCORE_PARAMS(X)                                                                                \
  X(fattn_i32, parts)        /* per tile, in the grid */                                               \
  X(fattn_i32, max_parts)    /* per tile, unless largest_part makes them more */                       \
  X(fattn_i32, min_part)     /* steps */                                                               \
  X(fattn_i32, largest_part) /* steps */                                                               \
  X(fattn_i32, heads_first)  /* heads are neighbours in the grid, not the tiles of a head */
struct PrefillParams {
  FATTN_PREFILL_PARAMS(FATTN_FIELD)
};

// Backward: the parameters of the forward, where `out` is the gradient of the query, and these.
#define FATTN_BACKWARD_PARAMS(X) \
  X(PrefillParams, forward)      \
  X(Strides3, grad_out)          \
  X(Strides3, saved_out)         \
  X(Strides3, out_remainder)     \
  X(Strides3, grad_key)          \
  X(Strides3, grad_value)        \
  X(fattn_f32, grad_scale) /* the scale of scores */
struct BackwardParams {
  FATTN_BACKWARD_PARAMS(FATTN_FIELD)
};

// A sum over the rows of a head, in all sequences or in one; with fc_packed in one that cu_seqlens delimits.
#define FATTN_BACKWARD_HEAD_PARAMS(X)                                        \
  X(fattn_i64, sinks_stride)                                                 \
  X(fattn_i64, cu_seqlens_stride)                                            \
  X(fattn_i32, sequences) /* in a sum; packed: 1, their rows are adjacent */ \
  X(fattn_i32, q_heads)                                                      \
  X(fattn_i32, q_len)
struct BackwardHeadParams {
  FATTN_BACKWARD_HEAD_PARAMS(FATTN_FIELD)
};

// Visibility by position for the rows of decode, and the sizes of chunks. window_left is kNoWindow without a
// window.
#define FATTN_CAUSAL_SPAN(X)                                                                \
  X(fattn_i32, q_len)                                                                       \
  X(fattn_i32, window_left)                                                                 \
  X(fattn_i32, sink_tokens)                                                                 \
  X(fattn_i32, capacity)      /* most keys of a sequence: Lk, or max_blocks * block_size */ \
  X(fattn_i32, chunk_unit)    /* keys; a chunk is a multiple of it */                       \
  X(fattn_i32, min_chunk)     /* keys */                                                    \
  X(fattn_i32, max_chunks)    /* per sequence, unless largest_chunk makes them more */      \
  X(fattn_i32, few_chunks)    /* a power of two: most chunks of less than kLargeChunk */    \
  X(fattn_i32, largest_chunk) /* keys */                                                    \
  X(fattn_i64, seq_lens_stride)
struct CausalSpan {
  FATTN_CAUSAL_SPAN(FATTN_FIELD)
};

#define FATTN_DECODE_PARAMS(X)                                                                \
  FATTN_OPERAND_STRIDES(X)                                                                    \
  X(fattn_i64, block_table_batch_stride)                                                      \
  X(fattn_i64, block_table_entry_stride)                                                      \
  FATTN_SCORE_STRIDES(X)                                                                      \
  X(CausalSpan, span)                                                                         \
  X(fattn_i32, batch)                                                                         \
  X(fattn_i32, q_heads)                                                                       \
  X(fattn_i32, group_size)                                                                    \
  X(fattn_i32, num_blocks)                                                                    \
  X(fattn_i32, row_blocks) /* threadgroups that share the query rows of one key-value head */ \
  FATTN_SCORE_PARAMS(X)                                                                       \
  X(fattn_i32, workers) /* threadgroups per key-value head and row block, which divide all chunks */
struct DecodeParams {
  FATTN_DECODE_PARAMS(FATTN_FIELD)
};

#define FATTN_TENSOR_PROBE_PARAMS(X) X(fattn_i64, max_facts) /* integers that the result has room for */
struct TensorProbeParams {
  FATTN_TENSOR_PROBE_PARAMS(FATTN_FIELD)
};

#define FATTN_MERGE_PARAMS(X)       \
  X(fattn_i64, rows) /* per part */ \
  X(fattn_i32, parts)               \
  X(fattn_i32, head_dim)            \
  X(fattn_i64, rows_per_sequence)   \
  X(CausalSpan, span)               \
  X(fattn_i32, puts_part) /* the result is partial too: lse receives RowSum::of_part() */
struct MergeParams {
  FATTN_MERGE_PARAMS(FATTN_FIELD)
};

// Strides of caches are block, head, slot, as in DecodeParams.
#define FATTN_CACHE_WRITE_PARAMS(X)                                                  \
  X(fattn_i64, key_token_stride)                                                     \
  X(fattn_i64, key_head_stride)                                                      \
  X(fattn_i64, value_token_stride)                                                   \
  X(fattn_i64, value_head_stride)                                                    \
  X(Strides3, key_cache)                                                             \
  X(Strides3, value_cache)                                                           \
  X(Strides3, key_scales)                                                            \
  X(Strides3, value_scales)                                                          \
  X(fattn_i64, slot_stride) /* of slot_mapping */                                    \
  X(fattn_i64, slots)       /* in the cache; a token with another slot is dropped */ \
  X(fattn_i32, rows)        /* tokens times heads */                                 \
  X(fattn_i32, kv_heads)                                                             \
  X(fattn_i32, block_size)
struct CacheWriteParams {
  FATTN_CACHE_WRITE_PARAMS(FATTN_FIELD)
};

// How rotary pairs the columns of a head: those of the two halves, or neighbours, whose results stay in place
// or move to the halves.
enum RotaryStyle { kStyleHalves = 0, kStylePairs = 1, kStylePairsToHalves = 2 };
// Where rotary and rms_norm round a normalised number: round(round(x) * weight), round(x * (1 + weight)),
// round(x * weight).
enum NormForm { kNormRounded = 0, kNormPlusOne = 1, kNormFloat = 2 };

#define FATTN_ROTARY_PARAMS(X)                                                                      \
  X(Strides3, query)                                                                                \
  X(Strides3, key)                                                                                  \
  X(Strides3, value)                                                                                \
  X(Strides3, out)                                                                                  \
  X(Strides3, key_cache) /* block, head, slot; rotary: of the rotated key: batch, head, position */ \
  X(Strides3, value_cache)                                                                          \
  X(Strides3, key_scales)                                                                           \
  X(Strides3, value_scales)                                                                         \
  X(TableStrides, cos)                                                                              \
  X(TableStrides, sin)                                                                              \
  X(fattn_i64, slots)      /* in the cache; a token with another slot is dropped */                 \
  X(fattn_i64, slot_batch) /* of slot_mapping or starts */                                          \
  X(fattn_i64, slot_row)                                                                            \
  X(fattn_i64, start) /* slot of position 0, in its sequence; starts are added */                   \
  X(fattn_i32, q_heads)                                                                             \
  X(fattn_i32, kv_heads)                                                                            \
  X(fattn_i32, q_units)  /* simdgroups that share the query heads of a token */                     \
  X(fattn_i32, kv_units) /* the same of key heads, and of value heads */                            \
  X(fattn_i32, tokens)                                                                              \
  X(fattn_i32, q_len)                                                                               \
  X(fattn_i32, block_size)                                                                          \
  X(fattn_f32, eps)
struct RotaryParams {
  FATTN_ROTARY_PARAMS(FATTN_FIELD)
};

// A mask, and its contiguous map [batch, heads, row_cells, key_cells]. Dimensions in which the mask is
// broadcast have size 1.
#define FATTN_MASK_MAP_PARAMS(X) \
  X(Strides4, mask)              \
  X(fattn_i32, heads)            \
  X(fattn_i32, rows)             \
  X(fattn_i32, keys)             \
  X(fattn_i32, row_cells)        \
  X(fattn_i32, key_cells)        \
  X(fattn_i32, row_groups) /* threadgroups per row of cells */
struct MaskMapParams {
  FATTN_MASK_MAP_PARAMS(FATTN_FIELD)
};

// Parameters of softmax and softcap. Rows are along the innermost dimension. The other dimensions are listed
// innermost first, merged where their strides allow.
typedef fattn_i64 LogitsExtents[kLogitsDims];
#define FATTN_LOGITS_PARAMS(X) \
  X(LogitsExtents, sizes)      \
  X(LogitsExtents, strides)    \
  X(fattn_i64, column_stride)  \
  X(fattn_i64, rows)           \
  X(fattn_i64, columns)        \
  X(fattn_i32, dims)           \
  X(fattn_f32, cap)
struct LogitsParams {
  FATTN_LOGITS_PARAMS(FATTN_FIELD)
};

// Rows [batch, heads, length, columns] of x and of a gate.
#define FATTN_RMS_NORM_PARAMS(X) \
  X(Strides3, x)                 \
  X(Strides3, gate)              \
  X(fattn_i64, rows)             \
  X(fattn_i32, heads)            \
  X(fattn_i32, length)           \
  X(fattn_i32, columns)          \
  X(fattn_f32, eps)
struct RmsNormParams {
  FATTN_RMS_NORM_PARAMS(FATTN_FIELD)
};

// Both compilers check this, so host and MSL agree on the layout.
#define FATTN_CHECK_SIZE(type, bytes) \
  static_assert(sizeof(type) == bytes, #type " must have one layout everywhere")
FATTN_CHECK_SIZE(GridSlice, 16);
// A parameter struct has padding at its end only, to a multiple of 8 bytes.
#define FATTN_BYTES(type, name) +sizeof(type)
#define FATTN_CHECK_PARAMS(Params, LIST) FATTN_CHECK_SIZE(Params, (0 LIST(FATTN_BYTES) + 7) / 8 * 8)
FATTN_CHECK_PARAMS(PrefillParams, FATTN_PREFILL_PARAMS);
FATTN_CHECK_PARAMS(BackwardParams, FATTN_BACKWARD_PARAMS);
FATTN_CHECK_PARAMS(BackwardHeadParams, FATTN_BACKWARD_HEAD_PARAMS);
FATTN_CHECK_PARAMS(CausalSpan, FATTN_CAUSAL_SPAN);
FATTN_CHECK_PARAMS(DecodeParams, FATTN_DECODE_PARAMS);
FATTN_CHECK_PARAMS(TensorProbeParams, FATTN_TENSOR_PROBE_PARAMS);
FATTN_CHECK_PARAMS(MergeParams, FATTN_MERGE_PARAMS);
FATTN_CHECK_PARAMS(CacheWriteParams, FATTN_CACHE_WRITE_PARAMS);
FATTN_CHECK_PARAMS(RotaryParams, FATTN_ROTARY_PARAMS);
FATTN_CHECK_PARAMS(MaskMapParams, FATTN_MASK_MAP_PARAMS);
FATTN_CHECK_PARAMS(LogitsParams, FATTN_LOGITS_PARAMS);
FATTN_CHECK_PARAMS(RmsNormParams, FATTN_RMS_NORM_PARAMS);

}  // namespace fattn
