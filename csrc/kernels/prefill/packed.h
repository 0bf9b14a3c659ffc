// The query rows of a prefill tile. In a dense call they belong to one sequence, and to one head or to all
// heads that share a key-value head. In a packed call the rows of all sequences are in one tensor, and
// cu_seqlens [batch + 1] has the start of each. The keys may be packed likewise.
//
// A packed tile holds (row, head) pairs of all query heads that share a key-value head, with the heads of a
// row side by side. A decoded token then fills one row of a tile per head that shares its keys, and the keys
// are read once for them. A long chunk of a prompt needs no more tiles than head by head, and its tiles span
// fewer positions, so less of their diagonal is hidden. The planner groups the rows of a dense call in the
// same way if this saves tiles.
#pragma once

#include "../common/config.h"

namespace fattn {

FATTN_CONSTEXPR int kTileRows = kSimdgroups / kColumnShares * kRowFragments * 8;

// A row of a tile.
struct QueryRow {
  int row;  // in its sequence
  long head;
  bool exists;
};

// Sequence and heads, factors of offsets, have 64 bits: an int would be kept beside its widened copy.
struct QueryTile {
  long batch;     // -1: rows before the first or after the last sequence, which have no keys
  int first_row;  // the sequence's first row in the call
  int q_len;
  long head;  // pairs: the first head that shares the key-value head
  long kv_head;
  int begin;  // the tile's first pair or row
  int end;    // end of the sequence's pairs or rows

  QueryRow row(int item, int group_size) const thread {
    QueryRow at;
    at.row = fc_pairs ? item / group_size : item;
    at.head = fc_pairs ? head + item % group_size : head;
    at.exists = item < end;
    return at;
  }

  // The row of item `most`, or of the sequence's last item if that is earlier.
  int last_row(int most, int group_size) const thread {
    const int item = min(most, end - 1);
    return fc_pairs ? item / group_size : item;
  }
};

// The work of a threadgroup. Under a causal mask the last rows have the most keys, so their tiles start
// first: head by head, or in all heads so that the GPU does not wait for the last head.
struct GridPlace {
  int part;  // of the tile's keys
  int tile;
  uint head;  // the key-value head of pairs, otherwise the query head
  uint batch;
};

inline GridPlace place_in_grid(constant PrefillParams& params, uint3 group) {
  const int along = int(params.heads_first ? group.y : group.x);
  GridPlace place;
  place.part = fc_split ? along % params.parts : 0;
  place.tile = params.q_tiles - 1 - along / (fc_split ? params.parts : 1);
  place.head = params.heads_first ? group.x : group.y;
  place.batch = group.z;
  return place;
}

inline QueryTile dense_tile(constant PrefillParams& params, GridPlace place) {
  const uint head = place.head;
  QueryTile found;
  found.batch = place.batch;
  found.first_row = 0;
  found.q_len = params.q_len;
  found.head = fc_grouped ? head * uint(params.group_size) : head;
  found.kv_head = fc_grouped ? head : head / uint(params.group_size);
  found.begin = place.tile * kTileRows;
  found.end = fc_grouped ? params.q_len * params.group_size : params.q_len;
  return found;
}

// The maximum over this and lower lanes.
inline int prefix_max(int x, ushort lane) {
  FATTN_UNROLL
  for (ushort distance = 1; distance < kSimdWidth; distance *= 2) {
    const int below = simd_shuffle_up(x, distance);
    x = lane >= distance ? max(x, below) : x;
  }
  return x;
}

// The rows of all sequences, cut into tiles of `tile_items` items. A row has `row_items` items.
struct PackedRows {
  const device int* cu_seqlens;
  long stride;
  int sequences;
  int rows;
  int row_items;
  int tile_items;
};

// A tile of a sequence's rows, with the members of QueryTile.
struct SequenceTile {
  long batch;
  int first_row;
  int q_len;
  int begin;
  int end;
};

// Tile `tile` of all sequences; `end` is 0 if there are fewer. The lanes examine 32 sequences at a time. The
// end of a sequence is clamped to the rows of the call and to the ends before it, so every row belongs to
// exactly one tile, for any cu_seqlens. The rows before the first sequence and after the last count as
// sequences without keys.
inline SequenceTile sequence_tile(PackedRows packed, int tile, ushort lane) {
  SequenceTile found;
  found.end = 0;
  int tiles_before = 0;
  int rows_before = 0;
  for (int first = 0; first < packed.sequences + 2 && found.end == 0; first += kSimdWidth) {
    const int sequence = first + lane - 1;
    int row_end = packed.rows;
    if (sequence < packed.sequences) {
      row_end = clamp(packed.cu_seqlens[(sequence + 1) * packed.stride], 0, packed.rows);
    }
    row_end = max(prefix_max(row_end, lane), rows_before);
    const int end_before = simd_shuffle_up(row_end, ushort(1));
    const int row_begin = lane == 0 ? rows_before : end_before;
    const int items = (row_end - row_begin) * packed.row_items;
    const int tiles = (items + packed.tile_items - 1) / packed.tile_items;
    const int through = tiles_before + simd_prefix_inclusive_sum(tiles);
    const int passed = simd_sum(int(through <= tile));  // sequences whose tiles end before this one
    if (passed < kSimdWidth) {
      const ushort owner = ushort(passed);
      found.batch = first + passed - 1 < packed.sequences ? first + passed - 1 : -1;
      found.first_row = simd_shuffle(row_begin, owner);
      found.end = simd_shuffle(items, owner);
      found.q_len = simd_shuffle(row_end, owner) - found.first_row;
      found.begin = (tile - simd_shuffle(through - tiles, owner)) * packed.tile_items;
    }
    tiles_before = simd_shuffle(through, ushort(kSimdWidth - 1));
    rows_before = simd_shuffle(row_end, ushort(kSimdWidth - 1));
  }
  return found;
}

// The tile of (row, head) pairs that share a key-value head.
inline QueryTile packed_tile(const device int* cu_seqlens, constant PrefillParams& params, int tile,
                             int kv_head, ushort lane) {
  PackedRows packed;
  packed.cu_seqlens = cu_seqlens;
  packed.stride = params.cu_seqlens_stride;
  packed.sequences = params.batch;
  packed.rows = params.q_len;
  packed.row_items = params.group_size;
  packed.tile_items = kTileRows;
  const SequenceTile of_sequence = sequence_tile(packed, tile, lane);
  QueryTile found;
  found.batch = of_sequence.batch;
  found.first_row = of_sequence.first_row;
  found.q_len = of_sequence.q_len;
  found.begin = of_sequence.begin;
  found.end = of_sequence.end;
  found.kv_head = kv_head;
  found.head = kv_head * params.group_size;
  return found;
}

// The packed keys of one sequence.
struct PackedKeys {
  long first;
  int count;
};

// Clamps cu_seqlens_k to the existing keys. Rows outside every sequence have no keys.
inline PackedKeys packed_keys(const device int* cu_seqlens_k, constant PrefillParams& params, long batch) {
  PackedKeys keys;
  keys.first = 0;
  keys.count = 0;
  if (batch >= 0) {
    const int first = clamp(cu_seqlens_k[batch * params.cu_seqlens_k_stride], 0, params.kv_len);
    const int end = clamp(cu_seqlens_k[(batch + 1) * params.cu_seqlens_k_stride], first, params.kv_len);
    keys.first = first;
    keys.count = end - first;
  }
  return keys;
}

}  // namespace fattn
