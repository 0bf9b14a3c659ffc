// What host and kernels must agree on: parameter structs, buffer slots, function-constant indices, tile
// arithmetic. Included by the planner (C++20) and by the kernels (MSL), so it uses only what both languages
// have.
#pragma once

#ifdef __METAL_VERSION__
#include <metal_stdlib>
typedef long fattn_i64;
typedef int fattn_i32;
typedef float fattn_f32;
#define FATTN_CONSTEXPR constant constexpr
#else
#include <cstdint>
typedef int64_t fattn_i64;
typedef int32_t fattn_i32;
typedef float fattn_f32;
#define FATTN_CONSTEXPR inline constexpr
#endif

namespace fattn {

// Buffer slots, the same for every kernel that has the operand.
enum Slot {
  kSlotQuery = 0,
  kSlotKey = 1,
  kSlotValue = 2,
  kSlotOut = 3,
  kSlotLse = 4,
  kSlotParams = 5,
  kSlotMask = 6,
  kSlotSeqLens = 7,
  kSlotBlockTables = 8,
  kSlotPartialOut = 9,
  kSlotPartialSum = 10,
  kSlotSinks = 11,
  kSlotAlibiSlopes = 12,
  kSlotTreeMask = 13,
  kSlotKeyScales = 14,
  kSlotValueScales = 15,
  kSlotCuSeqlens = 16,
  kSlotSlice = 17,
  kSlotCuSeqlensK = 18,
  kSlotMaskMap = 19,
  // Of cache_write, beside kSlotKey and kSlotValue.
  kSlotKeyCache = 20,
  kSlotValueCache = 21,
  kSlotSlotMapping = 22,
  kSlotLogits = 23,  // of softmax and softcap
};

// Function constants: features that are switched on or off per pipeline. Everything else is a macro (dtype,
// head dims, tile) or a parameter.
enum FunctionConstant {
  kConstMask = 0,         // uint, MaskKind
  kConstCausal = 1,       // bool
  kConstVectorLoads = 2,  // bool: every K/V/Q row starts on a 16-byte boundary; cache_write: on four columns
  kConstSplit = 3,  // bool: write a part of the result, or merge those of one call: floats and their sums
  kConstHasSeqLens = 4,      // bool
  kConstBlockSize = 5,       // uint: keys per cache block; 0 = dense
  kConstWindow = 6,          // bool: rows see a window of keys, and the sink tokens below it
  kConstSoftcap = 7,         // bool
  kConstAlibi = 8,           // bool
  kConstSinks = 9,           // bool: a learned logit per head
  kConstTree = 10,           // bool: the newest keys are draft tokens under a tree mask
  kConstScales = 11,         // bool: quantised K and V have scales
  kConstPacked = 12,         // bool: the query rows of all sequences lie in one tensor, cut by cu_seqlens
  kConstSliced = 13,         // bool: the grid takes several dispatches (plan/slices.h)
  kConstPackedKeys = 14,     // bool: so do the keys of all sequences, cut by cu_seqlens_k
  kConstMaskMap = 15,        // bool: there is a map of the mask
  kConstTokenMajorOut = 16,  // bool: decode, merge: `out` is [batch, row, head] in memory
  kConstGrouped = 17,        // bool: a dense tile has rows of all query heads that share a key-value head
};

// How a cache stores a row of keys or values: see plan/kv_format.h.
enum KvFormat { kKvFloat = 0, kKvInt8 = 1, kKvFp8E4M3 = 2, kKvInt4 = 3 };

enum MaskKind { kMaskNone = 0, kMaskBool = 1, kMaskFloat32 = 2, kMaskFloat16 = 3, kMaskBFloat16 = 4 };

// What a map of a mask says of a cell of kCellRows rows and kCellKeys keys: a byte.
enum CellKind {
  kCellHidden = 0,  // no row sees a key
  kCellMixed = 1,   // anything: the mask says which; bit kCellKindBits + f: no row sees a key of fragment f
  kCellWhole = 2,   // every row sees every key, and nothing is added
};

struct Strides3 {  // in elements; the last dimension of every operand is contiguous
  fattn_i64 batch;
  fattn_i64 head;
  fattn_i64 row;
};

struct Strides4 {
  fattn_i64 batch;
  fattn_i64 head;
  fattn_i64 row;
  fattn_i64 key;
};

// One of the dispatches that a grid takes, which has neighbouring threadgroups along x.
struct GridSlice {
  fattn_i64 first_group;  // of the grid, counted along x, then y, then z
  fattn_i32 grid_x;
  fattn_i32 grid_y;
};

struct PrefillParams {
  Strides3 query;
  Strides3 key;  // dense: batch, head, row. Paged: block, head, slot
  Strides3 value;
  Strides3 key_scales;  // of quantised keys, as `key` has them
  Strides3 value_scales;
  Strides4 mask;
  Strides4 mask_map;  // by cells
  Strides3 out;       // packed rows: head and row of the call
  fattn_i64 block_table_batch_stride;
  fattn_i64 block_table_entry_stride;
  fattn_i64 seq_lens_stride;
  fattn_i64 cu_seqlens_stride;
  fattn_i64 cu_seqlens_k_stride;
  fattn_i64 sinks_stride;
  fattn_i64 alibi_slopes_batch_stride;  // 0: the same slopes for all sequences
  fattn_i64 alibi_slopes_stride;
  fattn_i32 batch;
  fattn_i32 q_len;   // packed: rows of all sequences
  fattn_i32 kv_len;  // paged: max_blocks * block_size; packed keys: the most that a sequence has
  fattn_i32 q_heads;
  fattn_i32 group_size;    // query heads per key-value head
  fattn_i32 q_offset;      // absolute position of query row 0; of a pool: each sequence has its own
  fattn_i32 window_left;   // kNoLimit: every key below the row's own
  fattn_i32 window_right;  // kNoLimit: every key above it
  fattn_i32 sink_tokens;
  fattn_i32 num_blocks;
  fattn_i32 q_tiles;
  fattn_i32 kv_rows;         // packed keys: of all sequences
  fattn_i32 last_rows_meet;  // packed keys: instead of q_offset, the last row is at the last key
  fattn_f32 score_scale;     // from a product to score units (softmax.h), or to the argument of tanh
  fattn_f32 softcap;         // in score units
  fattn_f32 slope_scale;     // from ALiBi's slopes to score units
  fattn_i32 parts;           // that the steps of a tile are cut into, at most
  fattn_i32 least_part;      // steps
  fattn_i32 heads_first;     // neighbours in the grid are heads, not tiles of one
  fattn_i32 reserved;
};

// What decode sees by position. kNoWindow as window_left: every key up to the row's own.
struct CausalSpan {
  fattn_i32 q_len;
  fattn_i32 window_left;
  fattn_i32 sink_tokens;
  fattn_i32 capacity;     // keys that a sequence can have: Lk, or max_blocks * block_size
  fattn_i32 chunk_unit;   // keys; a chunk is a multiple of it
  fattn_i32 least_chunk;  // keys
  fattn_i32 most_chunks;  // of a sequence whose keys lie together, unless they are longer than largest_chunk
  fattn_i32 largest_chunk;  // keys
  fattn_i64 seq_lens_stride;
};

struct DecodeParams {
  Strides3 query;
  Strides3 key;  // dense: batch, head, row. Paged: block, head, slot
  Strides3 value;
  Strides3 key_scales;  // of quantised keys, as `key` has them
  Strides3 value_scales;
  Strides4 mask;
  fattn_i64 block_table_batch_stride;
  fattn_i64 block_table_entry_stride;
  fattn_i64 sinks_stride;
  fattn_i64 alibi_slopes_batch_stride;  // 0: the same slopes for all sequences
  fattn_i64 alibi_slopes_stride;
  fattn_i64 tree_mask_batch_stride;
  fattn_i64 tree_mask_row_stride;
  CausalSpan span;
  fattn_i32 batch;
  fattn_i32 q_heads;
  fattn_i32 group_size;
  fattn_i32 num_blocks;
  fattn_i32 row_blocks;   // threadgroups that share the group_size * q_len query rows of one key-value head
  fattn_f32 score_scale;  // from a product to score units (softmax.h), or to the argument of tanh
  fattn_f32 softcap;      // in score units
  fattn_f32 slope_scale;  // from ALiBi's slopes to score units
  fattn_i32 shares;       // that the chunks of all sequences are cut into, per key-value head and row block
  fattn_i32 reserved;
};

struct MergeParams {
  fattn_i64 rows;  // rows of one part
  fattn_i32 parts;
  fattn_i32 head_dim;
  // Of decode's second pass, where a sequence has as many parts as its length asks for.
  fattn_i64 rows_per_sequence;
  CausalSpan span;
  fattn_i32 puts_part;  // the result is a part itself: lse holds what RowSum::of_part() has
  fattn_i32 reserved;
};

// Caches are block, head, slot, as in DecodeParams.
struct CacheWriteParams {
  fattn_i64 key_token_stride;
  fattn_i64 key_head_stride;
  fattn_i64 value_token_stride;
  fattn_i64 value_head_stride;
  Strides3 key_cache;
  Strides3 value_cache;
  Strides3 key_scales;
  Strides3 value_scales;
  fattn_i64 slot_stride;  // of slot_mapping
  fattn_i64 slots;        // of the cache; a token with another slot is dropped
  fattn_i32 rows;         // tokens times heads
  fattn_i32 kv_heads;
  fattn_i32 block_size;
  fattn_i32 reserved;
};

// The mask as it is, and its map: contiguous, batch, head, row_cells, key_cells. Along a dimension in which
// the mask is broadcast there is one of each.
struct MaskMapParams {
  Strides4 mask;
  fattn_i32 heads;
  fattn_i32 rows;
  fattn_i32 keys;
  fattn_i32 row_cells;
  fattn_i32 key_cells;
  fattn_i32 row_groups;  // threadgroups of a row of cells
};

// Of softmax and softcap. A row of theirs is along the innermost dimension; the others are counted innermost
// first, neighbours that lie like one dimension taken as one.
FATTN_CONSTEXPR int kLogitsDims = 5;
struct LogitsParams {
  fattn_i64 sizes[kLogitsDims];
  fattn_i64 strides[kLogitsDims];
  fattn_i64 column_stride;
  fattn_i64 rows;
  fattn_i64 columns;
  fattn_i32 dims;
  fattn_f32 cap;
};

// Bytes as the host lays them out; MSL has the same rules, and checks it too.
#define FATTN_CHECK_SIZE(type, bytes) \
  static_assert(sizeof(type) == bytes, #type " must have one layout everywhere")
FATTN_CHECK_SIZE(GridSlice, 16);
FATTN_CHECK_SIZE(PrefillParams, 352);
FATTN_CHECK_SIZE(CausalSpan, 40);
FATTN_CHECK_SIZE(DecodeParams, 288);
FATTN_CHECK_SIZE(MergeParams, 72);
FATTN_CHECK_SIZE(CacheWriteParams, 160);
FATTN_CHECK_SIZE(MaskMapParams, 56);
FATTN_CHECK_SIZE(LogitsParams, 112);

// Tile arithmetic. A simdgroup works on 8-row fragments.
FATTN_CONSTEXPR int kFragment = 8;
FATTN_CONSTEXPR int kSimdWidth = 32;
// A cell of a mask map: the rows of a simdgroup of prefill, and the keys of a step.
FATTN_CONSTEXPR int kCellRows = 16;
FATTN_CONSTEXPR int kCellKeys = 32;
FATTN_CONSTEXPR int kCellFragments = kCellKeys / kFragment;
FATTN_CONSTEXPR int kAllCellFragments = (1 << kCellFragments) - 1;
FATTN_CONSTEXPR int kCellKindBits = 2;
// What a byte of a map is below.
FATTN_CONSTEXPR int kCellBytes = 1 << (kCellKindBits + kCellFragments);
// Cells that a threadgroup makes, neighbours along the keys: 256 bytes of a row of booleans.
FATTN_CONSTEXPR int kGroupCells = 8;
// No window: more keys than a sequence can have.
FATTN_CONSTEXPR int kNoWindow = 1 << 30;
// No end of a window on one side of a row: further than any two positions are apart.
FATTN_CONSTEXPR int kNoLimit = 0x7fffffff;
// Chunks of decode (schedule.h): a sequence has at most kFewChunks until they are of kLargeChunk keys.
FATTN_CONSTEXPR int kFewChunks = 32;
FATTN_CONSTEXPR int kLargeChunk = 512;
// Columns of a row of an int4 cache that share a scale and a minimum.
FATTN_CONSTEXPR int kInt4Group = 32;
// Columns that softmax and softcap read and write at once.
FATTN_CONSTEXPR int kLogitsVector = 4;
// Of a row of a part: its largest logit in score units, the same in natural ones, the sum of its weights, and
// log2 of the weight that a score unit makes.
FATTN_CONSTEXPR int kSumFloats = 4;
// The same without the last, which all parts share: what merge keeps of a row.
FATTN_CONSTEXPR int kMergeSumFloats = 3;
// Columns that merge sums at a time: four per lane.
FATTN_CONSTEXPR int kMergeColumns = 4 * kSimdWidth;
// Rows of a staged K or V tile are this much longer than the head, so that what the lanes of a simdgroup read
// together (tile.h) lies in different banks: of K, 16 bytes in each of eight rows; of V, 64 bytes.
FATTN_CONSTEXPR int kKeyPadBytes = 16;
FATTN_CONSTEXPR int kValuePadBytes = 64;

}  // namespace fattn
