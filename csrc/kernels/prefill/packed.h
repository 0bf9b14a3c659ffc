// The query rows of a tile of prefill: of one sequence, and of one head or of all that share their keys; or
// of a packed call, where the rows of all sequences lie in one tensor and cu_seqlens [batch + 1] says where
// each begins. And the keys of a sequence, where those are packed too.
//
// A packed tile holds (row, head) pairs of all query heads that share a key-value head, heads side by side.
// One decoded token then fills as many rows of a tile as there are heads to share its keys, which are read
// once for all of them; and a long chunk of a prompt makes no more tiles than it would head by head, each
// reading the keys once for as many rows, from fewer positions: less of its diagonal is hidden. A grouped
// tile of a dense call is the same; the planner has them where they are fewer.
#pragma once

#include "../common/config.h"

namespace fattn {

FATTN_CONSTEXPR int kTileRows = kSimdgroups / kColumnShares * kRowFragments * 8;

// A row of a tile, and where its operands and results are.
struct QueryRow {
  int row;  // of its sequence
  long head;
  bool exists;
};

// Sequence and heads are 64-bit for the offsets that they make: an int would stay beside its widened copy.
struct QueryTile {
  long batch;     // -1: rows before the first sequence or behind the last, which see no key
  int first_row;  // of the sequence, among the rows of the call
  int q_len;
  long head;  // of pairs: the first that shares the key-value head
  long kv_head;
  int begin;  // the tile's first pair, or row
  int end;    // of the sequence's pairs, or rows

  QueryRow row(int item, int group_size) const thread {
    QueryRow at;
    at.row = fc_pairs ? item / group_size : item;
    at.head = fc_pairs ? head + item % group_size : head;
    at.exists = item < end;
    return at;
  }

  // The last row at or before that one that exists.
  int last_row(int most, int group_size) const thread {
    const int item = min(most, end - 1);
    return fc_pairs ? item / group_size : item;
  }
};

// What a threadgroup is for. Under a causal mask the last rows have the most keys: their tiles start first,
// in one head after the other or, so that the GPU does not wait for the last head's, in all heads.
struct GridPlace {
  int part;  // of the tile's keys
  int tile;
  uint head;  // a key-value head if tiles are grouped, else a query head
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

// The largest number up to this lane.
inline int prefix_max(int x, ushort lane) {
#pragma clang loop unroll(full)
  for (ushort distance = 1; distance < kSimdWidth; distance *= 2) {
    const int below = simd_shuffle_up(x, distance);
    x = lane >= distance ? max(x, below) : x;
  }
  return x;
}

// Number `tile` of the tiles of all sequences; `end` is 0 if there are fewer. The lanes look at 32 sequences
// at a time. Where each ends is cut to the rows that there are and to where those before it end, whatever
// cu_seqlens holds: every row belongs to exactly one tile. The rows before the first sequence and those
// behind the last are sequences without keys.
inline QueryTile packed_tile(const device int* cu_seqlens, constant PrefillParams& params, int tile,
                             int kv_head, ushort lane) {
  QueryTile found;
  found.end = 0;
  found.kv_head = kv_head;
  found.head = kv_head * params.group_size;
  int tiles_before = 0;
  int rows_before = 0;
  for (int first = 0; first < params.batch + 2 && found.end == 0; first += kSimdWidth) {
    const int sequence = first + lane - 1;
    int row_end = params.q_len;
    if (sequence < params.batch) {
      row_end = clamp(cu_seqlens[(sequence + 1) * params.cu_seqlens_stride], 0, params.q_len);
    }
    row_end = max(prefix_max(row_end, lane), rows_before);
    const int end_before = simd_shuffle_up(row_end, ushort(1));
    const int row_begin = lane == 0 ? rows_before : end_before;
    const int pairs = (row_end - row_begin) * params.group_size;
    const int tiles = (pairs + kTileRows - 1) / kTileRows;
    const int through = tiles_before + simd_prefix_inclusive_sum(tiles);
    const int passed = simd_sum(int(through <= tile));  // sequences that end before the tile
    if (passed < kSimdWidth) {
      const ushort owner = ushort(passed);
      found.batch = first + passed - 1 < params.batch ? first + passed - 1 : -1;
      found.first_row = simd_shuffle(row_begin, owner);
      found.end = simd_shuffle(pairs, owner);
      found.q_len = simd_shuffle(row_end, owner) - found.first_row;
      found.begin = (tile - simd_shuffle(through - tiles, owner)) * kTileRows;
    }
    tiles_before = simd_shuffle(through, ushort(kSimdWidth - 1));
    rows_before = simd_shuffle(row_end, ushort(kSimdWidth - 1));
  }
  return found;
}

// Keys of one sequence among those of all.
struct PackedKeys {
  long first;
  int count;
};

// Whatever cu_seqlens_k holds: no more keys than there are, nor than a sequence has. The rows of no sequence
// have none.
inline PackedKeys packed_keys(const device int* cu_seqlens_k, constant PrefillParams& params, long batch) {
  PackedKeys keys;
  keys.first = 0;
  keys.count = 0;
  if (batch >= 0) {
    const int first = clamp(cu_seqlens_k[batch * params.cu_seqlens_k_stride], 0, params.kv_rows);
    const int end = clamp(cu_seqlens_k[(batch + 1) * params.cu_seqlens_k_stride], first, params.kv_rows);
    keys.first = first;
    keys.count = min(end - first, params.kv_len);
  }
  return keys;
}

}  // namespace fattn
