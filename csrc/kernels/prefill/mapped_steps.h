// The steps of keys that a prefill tile visits. With a mask map, these are the steps in which some row sees a
// key by position and by the map. A simdgroup multiplies only the key fragments that one of its own rows may
// see.
#pragma once

#include "prefill_rows.h"

// Whether steps look up their keys, for blocks or for row scales.
constant bool fc_looks_up = fc_paged || fattn::kKvFormat != fattn::kKvFloat;
// Whether whole steps may follow others. If not, they run in their own loop, which needs fewer registers. Of
// steps with a block mask few are not whole: where causal rows end, and where a tile spans rows of blocks.
constant bool fc_alternating = fc_window || fc_looks_up || (fc_mask_map && !fc_block_mask);

namespace fattn {

FATTN_CONSTEXPR int kNoCell = 0x7fffffff;

static_assert(kCellRows % kTileRows == 0 || kTileRows % kCellRows == 0, "tiles begin where cells do");
static_assert(kCellRows % (kRowFragments * 8) == 0, "the rows of a simdgroup are of one cell");
static_assert(kCellKeys % kTileKeys == 0, "the keys of a step are of one column");

// Bytes after look-up. All fragments of a hidden cell are hidden too. A column that is hidden from all rows
// of the tile, or whole for all, has a byte that no cell has.
FATTN_CONSTEXPR uint kHiddenCell = kCellHidden | kAllCellFragments << kCellKindBits;
FATTN_CONSTEXPR uint kWholeColumn = kCellWhole + 1;
FATTN_CONSTEXPR uint kHiddenColumn = kCellHidden;
inline bool is_whole(uint cell) { return cell == kCellWhole || cell == kWholeColumn; }

// A cell's byte after look-up. An undefined byte in a caller's map counts as mixed.
inline uint cell_of(uint byte) {
  if (fc_block_mask) {
    return byte != 0 ? uint(kCellWhole) : kHiddenCell;
  }
  const bool mixed = byte % (1 << kCellKindBits) == kCellMixed && byte < uint(kCellBytes);
  return byte == kCellHidden ? kHiddenCell : mixed || byte == kCellWhole ? byte : uint(kCellMixed);
}

struct TileSteps {
  KeyRanges ranges;  // of the tile
  uint looked_up;    // lane 0's column times kCellBytes, plus the byte of this lane's column
  ushort cell;       // of the step found last
  TileState state;

  // `rows`: of the tile. All threads call this before the first look-up.
  void put_map_rows(thread const TileRows& rows, constant PrefillParams& params, ushort thread_index) const
      thread {
    if (fc_mask_map && thread_index < kTileCells) {
      // Rows past the tile's last row count as that row.
      const int row = min(rows.tile.begin / kCellRows + thread_index, (rows.tile.end - 1) / kCellRows);
      state.saved->map_rows[thread_index] = rows.tile.batch * params.mask_map.batch +
                                            rows.tile.head * params.mask_map.head +
                                            (row >> params.map_row_shift) * params.mask_map.row;
    }
  }

  // The first key of the first step at or after `key`; ranges.end or more if there is none. This and after()
  // are uniform over the threadgroup.
  int first(int key, constant PrefillParams& params, const device uchar* mask_map, ushort lane) thread {
    if (!fc_mask_map) {
      return key;
    }
    look_up(units_in(key, kCellKeys), params, mask_map, lane);
    return seen_from(key, params, mask_map, lane);
  }

  // The first key of the step after the one at `key`.
  int after(int key, constant PrefillParams& params, const device uchar* mask_map, ushort lane) thread {
    const int next = next_step(ranges, key, kTileKeys);
    if (!fc_mask_map || units_in(next, kCellKeys) == units_in(key, kCellKeys)) {
      return next;  // in the same column of cells, if there are any
    }
    return seen_from(next, params, mask_map, lane);
  }

  // The map's byte for this simdgroup's rows in the step that first() or after() found last.
  uint own_cell() const thread { return fc_mask_map ? uint(cell) : kWholeColumn; }

 private:
  // The first step from the start of a column of cells on that is not in the gap between the ranges.
  int step_of(int column) const thread {
    return next_step(ranges, column * kCellKeys - kTileKeys, kTileKeys);
  }

  // The first step at or after `key` that the map does not hide.
  int seen_from(int key, constant PrefillParams& params, const device uchar* mask_map, ushort lane) thread {
    while (key < ranges.end) {
      const int first = int(looked_up / kCellBytes);
      const uint byte = looked_up % kCellBytes;
      const bool ahead = byte != kHiddenColumn && first + lane >= units_in(key, kCellKeys);
      const int seen = simd_min(ahead ? int(lane * kCellBytes + byte) : kNoCell);
      if (seen != kNoCell) {
        cell = ushort(seen % kCellBytes);
        return max(key, step_of(first + seen / kCellBytes));
      }
      key = max(key, step_of(first + kSimdWidth));
      if (key < ranges.end) {
        look_up(units_in(key, kCellKeys), params, mask_map, lane);
      }
    }
    return key;
  }

  // Looks up a column of cells for each lane.
  void look_up(int first, constant PrefillParams& params, const device uchar* mask_map, ushort lane) thread {
    const int column = first + lane;
    const int key = column * kCellKeys;
    uint own = kHiddenColumn;
    if (key < ranges.end && ranges.meet(key, key + kCellKeys)) {
      const long place = (column >> params.map_key_shift) * params.mask_map.key;
      bool hidden = true;
      bool whole = true;
      FATTN_UNROLL
      for (int i = 0; i < kTileCells; i++) {
        const uint byte = cell_of(mask_map[state.saved->map_rows[i] + place]);
        hidden = hidden && byte == kHiddenCell;
        whole = whole && byte == kCellWhole;
        own = i == state.row / kCellRows ? byte : own;
      }
      own = hidden ? kHiddenColumn : whole ? kWholeColumn : own;
    }
    looked_up = uint(first) * kCellBytes + own;
  }
};

// The key fragments of a step that some row of a simdgroup may see, by its ranges and by the map's byte.
inline StepFragments step_fragments(KeyRanges own, int first_key, uint cell) {
  const bool met = own.end > first_key && own.meet(first_key, first_key + kTileKeys);
  const int count = met ? (own.end - first_key + 7) / 8 : 0;
  StepFragments fragments;
  fragments.some = uint(count);
  if (fc_mask_map) {
    const uint before = uint(first_key) % kCellKeys / kTileKeys * kKeyFragments;
    const uint hidden = cell >> (kCellKindBits + before);
    fragments.some = ((1u << min(count, kKeyFragments)) - 1) & ~hidden;
  }
  return fragments;
}

}  // namespace fattn
