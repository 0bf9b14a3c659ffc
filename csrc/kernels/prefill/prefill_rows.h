// The query rows of a prefill tile: their visible keys, and the places of their operands and results. Shared
// by the prefill kernels.
#pragma once

#include "packed.h"
#include "../common/operands.h"
#include "../common/saved.h"
#include "../common/scores.h"
#include "../common/steps.h"

namespace fattn {

// Whether K and V are loaded a step ahead and held in registers.
FATTN_CONSTEXPR bool kEarlyLoads = FATTN_EARLY_LOADS;

// The keys and values that a tile reads.
struct KeySource {
  StoredOperand key;  // `first` is in `starts`
  StoredOperand value;
  KeyTable table;  // of sequence 0: blocks() adds the offset
  threadgroup SavedStarts* starts;
  long key_stride;  // from row to row
  long value_stride;

  StoredOperand keys() const thread {
    StoredOperand operand = key;
    operand.first = starts->key;
    return operand;
  }
  StoredOperand values() const thread {
    StoredOperand operand = value;
    operand.first = starts->value;
    return operand;
  }
  KeyTable blocks() const thread {
    KeyTable of_sequence = table;
    if (fc_paged) {
      of_sequence.blocks += starts->blocks;
    }
    return of_sequence;
  }
};

FATTN_CONSTEXPR int kOwnRows = kRowFragments * 8;                          // of a simdgroup
FATTN_CONSTEXPR int kTileCells = (kTileRows + kCellRows - 1) / kCellRows;  // of a mask map

// A tile in threadgroup memory while its steps run.
struct SavedTile {
  SavedStarts starts;
  SavedPlaces places[kTileRows];
  fattn_i64 map_rows[kTileCells];  // where these rows of the mask map begin
  SavedLimits limits[kTileRows];
  SavedRanges ranges[kTileRows / kOwnRows];  // of the rows of a simdgroup
};
static_assert(sizeof(SavedTile) == saved_tile_bytes(kTileRows, kOwnRows), "the planner counts this");

struct TileState {
  threadgroup SavedTile* saved;
  ushort row;  // this lane's first row in the tile

  // Saves the ranges of this simdgroup's rows; called by one of its lanes.
  void put_ranges(KeyRanges ranges) const thread {
    threadgroup SavedRanges& to = saved->ranges[row / kOwnRows];
    to.sink_end = ranges.sink_end;
    to.begin = ranges.begin;
    to.end = ranges.end;
    to.all_begin = ranges.all_begin;
  }
  KeyRanges own_ranges() const thread {
    const threadgroup SavedRanges& from = saved->ranges[row / kOwnRows];
    const threadgroup SavedLimits& first = saved->limits[row / kOwnRows * kOwnRows];
    KeyRanges ranges;
    ranges.sink_end = from.sink_end;
    ranges.begin = from.begin;
    ranges.end = from.end;
    ranges.all_begin = from.all_begin;
    ranges.all_end = first.limit;
    ranges.all_sink_end = first.sink_end;
    return in_whole_steps(ranges, kTileKeys);
  }
  // Whether every row of the tile sees the step at `key` by its position.
  bool all_see(int key) const thread {
    const threadgroup SavedLimits& first = saved->limits[0];
    KeyRanges ranges;
    ranges.all_begin = saved->ranges[kTileRows / kOwnRows - 1].all_begin;
    ranges.all_end = first.limit;
    ranges.all_sink_end = first.sink_end;
    ranges = in_whole_steps(ranges, kTileKeys);
    return ranges.all_see(key, key + 1);
  }

  // Saves row fragment r; called by one lane of each row.
  void write(int r, SavedPlaces row_places, SavedLimits row_limits) const thread {
    threadgroup SavedPlaces& places = saved->places[row + r * 8];
    places.mask_row = row_places.mask_row;
    places.out = row_places.out;
    places.lse = row_places.lse;
    threadgroup SavedLimits& limits = saved->limits[row + r * 8];
    limits.limit = row_limits.limit;
    limits.window_begin = row_limits.window_begin;
    limits.sink_end = row_limits.sink_end;
  }

  Visibility visible(constant PrefillParams& params) const thread {
    Visibility visible;
    FATTN_UNROLL
    for (int r = 0; r < kRowFragments; r++) {
      const threadgroup SavedLimits& limits = saved->limits[row + r * 8];
      visible.limit[r] = limits.limit;
      visible.window_begin[r] = limits.window_begin;
      visible.sink_end[r] = limits.sink_end;
      visible.mask_row[r] = saved->places[row + r * 8].mask_row;
    }
    visible.mask_key_stride = params.mask.key;
    visible.mask_keys = params.kv_len;
    return visible;
  }
  // The same for the lane's first row only.
  Visibility visible_row(constant PrefillParams& params) const thread {
    const threadgroup SavedLimits& limits = saved->limits[row];
    Visibility visible;
    visible.limit[0] = limits.limit;
    visible.window_begin[0] = limits.window_begin;
    visible.sink_end[0] = limits.sink_end;
    visible.mask_row[0] = saved->places[row].mask_row;
    visible.mask_key_stride = params.mask.key;
    return visible;
  }
  // The first element of the row's result; -1 if the row does not exist.
  long out(int r) const thread { return saved->places[row + r * 8].out; }
  long lse(int r) const thread { return saved->places[row + r * 8].lse; }
};

struct TileRows {
  QueryTile tile;
  int length;          // keys of the sequence
  int first_position;  // of the sequence's first row
  long first_key;      // packed keys: the sequence's first one

  void set(QueryTile of, thread const Operands& operands, constant PrefillParams& params) thread {
    tile = of;
    first_key = 0;
    length = params.kv_len;
    first_position = params.q_offset;
    if (fc_has_seq_lens) {
      length = tile.batch < 0
                   ? 0
                   : clamp(operands.seq_lens[tile.batch * params.seq_lens_stride], 0, params.kv_len);
      first_position = length - tile.q_len;
    }
    if (fc_packed_keys) {
      const PackedKeys keys = packed_keys(operands.cu_seqlens_k, params, tile.batch);
      first_key = keys.first;
      length = keys.count;
      first_position = params.last_rows_meet ? length - tile.q_len : params.q_offset;
    }
  }

  QueryRow row(int item, constant PrefillParams& params) const thread {
    return tile.row(item, params.group_size);
  }

  // The keys that some row, and the keys that every row of [first, first + count) sees; none if the first row
  // does not exist.
  KeyRanges ranges_of(int first, int count, constant PrefillParams& params) const thread {
    const QueryRow first_row = row(first, params);
    const int last_row = tile.last_row(first + count - 1, params.group_size);
    KeyRanges ranges = rows_between(keys_of_row(params, first_position + first_row.row, length),
                                    keys_of_row(params, first_position + last_row, length));
    if (!first_row.exists) {
      ranges.end = 0;
      ranges.all_end = 0;
      ranges.all_sink_end = 0;
    }
    return in_whole_steps(ranges, kTileKeys);
  }

  // Called by one thread.
  void put_starts(constant PrefillParams& params, threadgroup SavedStarts* starts) const thread {
    const long batch = fc_paged || fc_packed_keys ? 0 : tile.batch;
    starts->key = tile.kv_head * params.key.head + batch * params.key.batch + first_key * params.key.row;
    starts->value =
        tile.kv_head * params.value.head + batch * params.value.batch + first_key * params.value.row;
    starts->blocks = max(tile.batch, 0L) * params.block_table_batch_stride;
  }

  // `ranges`: of the tile.
  KeySource source(thread const Operands& operands, constant PrefillParams& params, KeyRanges ranges,
                   threadgroup SavedStarts* starts) const thread {
    KeySource source;
    source.key.elements = operands.key;
    source.value.elements = operands.value;
    source.key.head = source.value.head = uint(tile.kv_head);
    source.key.batch = source.value.batch = uint(tile.batch);
    if (fc_scales) {
      source.key.scales = operands.key_scales;
      source.value.scales = operands.value_scales;
    }
    source.table.length = ranges.end;
    source.table.begin = ranges.begin;
    source.table.sink_end = ranges.sink_end;
    if (fc_paged) {
      source.table.blocks = operands.block_tables;
      source.table.entry_stride = params.block_table_entry_stride;
      source.table.num_blocks = params.num_blocks;
    }
    source.starts = starts;
    source.key_stride = params.key.row;
    source.value_stride = params.value.row;
    return source;
  }

  // Null if the row does not exist.
  const device Element* query_row(QueryRow at, constant PrefillParams& params,
                                  const device Element* query) const thread {
    return at.exists ? query + row_offset(at, params.query) : nullptr;
  }

  // The offset of the row in an operand with the rows of query.
  long row_offset(QueryRow at, constant Strides3& strides) const thread {
    const long from = at.head * strides.head + (tile.first_row + at.row) * strides.row;
    return fc_packed ? from : from + tile.batch * strides.batch;
  }

  // Sets the score modifiers of this lane's row of fragment r.
  void set_modifiers(int r, QueryRow at, thread const Operands& operands, constant PrefillParams& params,
                     thread ScoreModifiers& modifiers) const thread {
    set_uniform(modifiers, params);
    modifiers.position[r] = first_position + at.row;
    if (fc_alibi) {
      const long place =
          max(tile.batch, 0L) * params.alibi_slopes_batch_stride + at.head * params.alibi_slopes_stride;
      const float slope = at.exists ? float_at(operands.alibi_slopes, place, fc_slopes_kind) : 0.0f;
      modifiers.slope[r] = finite_score(slope, slope * params.slope_scale);
    }
  }

  // Saves this lane's row of fragment r; called by one lane of each row.
  void save(int r, QueryRow at, int part, constant PrefillParams& params, thread const TileState& state) const
      thread {
    const RowKeys keys = keys_of_row(params, first_position + at.row, length);
    SavedLimits limits;
    limits.limit = at.exists ? keys.end : 0;
    limits.window_begin = keys.begin;
    limits.sink_end = at.exists ? keys.sink_end : 0;
    SavedPlaces places;
    places.mask_row =
        at.exists ? tile.batch * params.mask.batch + at.head * params.mask.head + at.row * params.mask.row
                  : 0;
    places.lse = lse_of(at, part, params);
    places.out = at.exists ? out_of(at, places.lse, params) : -1;
    state.write(r, places, limits);
  }

  // The index of the row's log-sum-exp, or of its sum in a partial result. Parts follow one another.
  long lse_of(QueryRow at, int part, constant PrefillParams& params) const thread {
    const long heads = params.q_heads;
    const long row = fc_packed ? at.head * params.q_len + tile.first_row + at.row
                               : (tile.batch * heads + at.head) * params.q_len + at.row;
    return fc_split ? row + part * ((fc_packed ? 1 : params.batch) * heads * params.q_len) : row;
  }
  // The first element of the row's result. Partial results are in the order of lse.
  long out_of(QueryRow at, long lse, constant PrefillParams& params) const thread {
    if (fc_split) {
      return lse * kValueDim;
    }
    return (fc_packed ? 0 : tile.batch * params.out.batch) + at.head * params.out.head +
           (tile.first_row + at.row) * params.out.row;
  }
};

}  // namespace fattn
