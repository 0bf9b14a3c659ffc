// The steps of keys that a tile of prefill visits where there is a map of its mask: those in which some row
// sees a key, by position and by the map.
#pragma once

#include "prefill_rows.h"

namespace fattn {

FATTN_CONSTEXPR int kTileCells = (kTileRows + kCellRows - 1) / kCellRows;
FATTN_CONSTEXPR int kOwnRows = kRowFragments * 8;  // of a simdgroup, or of those that share rows

static_assert(kCellRows % kTileRows == 0 || kTileRows % kCellRows == 0, "tiles begin where cells do");
static_assert(kCellKeys % kTileKeys == 0, "a step is of one column of cells");

// What the map says of a column of cells: the CellKind of the rows that this simdgroup has, and two bits
// about those of the tile.
struct ColumnCells {
  uint bits;

  uint own() const thread { return bits & 3; }
  bool seen() const thread { return bits & 4; }   // by some row of the tile
  bool whole() const thread { return bits & 8; }  // by every row of the tile
  int column() const thread { return int(bits >> 4); }

  static ColumnCells of(int column, uint own, bool seen, bool whole) {
    ColumnCells cells;
    cells.bits = uint(column) << 4 | uint(whole) << 3 | uint(seen) << 2 | own;
    return cells;
  }
};

struct TileSteps {
  KeyRanges ranges;  // of the tile
  int own_row;       // the first that this simdgroup has
  ColumnCells mine;  // each lane has one of 32 neighbouring columns: all that a step must keep

  // The first step, by its first key. Like `after`, in all simdgroups of a tile the same; ranges.end or more
  // if there is none.
  int first(thread const TileRows& rows, constant PrefillParams& params, const device uchar* mask_map,
            ushort lane) thread {
    const int key = next_step(ranges, -kTileKeys, kTileKeys);
    if (!fc_mask_map) {
      return key;
    }
    look_up(key / kCellKeys, rows, params, mask_map, lane);
    return from(key, rows, params, mask_map, lane);
  }

  // The step after the one that begins at `key`.
  int after(int key, thread const TileRows& rows, constant PrefillParams& params,
            const device uchar* mask_map, ushort lane) thread {
    const int next = next_step(ranges, key, kTileKeys);
    const bool in_column = next / kCellKeys == key / kCellKeys;
    return !fc_mask_map || in_column ? next : from(next, rows, params, mask_map, lane);
  }

  // The cells of a step, until the one after it is asked for.
  ColumnCells at(int key) const thread {
    if (!fc_mask_map) {
      return ColumnCells::of(0, kCellWhole, true, true);
    }
    const int first_column = int(simd_shuffle(mine.bits, ushort(0)) >> 4);
    ColumnCells cells;
    cells.bits = simd_shuffle(mine.bits, ushort(key / kCellKeys - first_column));
    return cells;
  }

 private:
  // The first step at that key or behind it.
  int from(int key, thread const TileRows& rows, constant PrefillParams& params, const device uchar* mask_map,
           ushort lane) thread {
    while (key < ranges.end) {
      const bool ahead = mine.seen() && mine.column() >= key / kCellKeys;
      const uint lanes = uint(simd_vote::vote_t(simd_ballot(ahead)));
      if (lanes != 0) {
        return max(key, step_at(int(simd_shuffle(mine.bits, ushort(ctz(lanes))) >> 4)));
      }
      const int looked_up = int(simd_shuffle(mine.bits, ushort(kSimdWidth - 1)) >> 4) + 1;
      key = max(key, step_at(looked_up));
      if (key < ranges.end) {
        look_up(key / kCellKeys, rows, params, mask_map, lane);
      }
    }
    return key;
  }

  // The first step of a column that is not in the gap between the ranges.
  int step_at(int column) const thread {
    return next_step(ranges, column * kCellKeys - kTileKeys, kTileKeys);
  }

  // Looks up 32 columns.
  void look_up(int first_column, thread const TileRows& rows, constant PrefillParams& params,
               const device uchar* mask_map, ushort lane) thread {
    const int column = first_column + lane;
    const int key = column * kCellKeys;
    const QueryTile tile = rows.tile;
    bool seen = false;
    bool whole = true;
    bool own_seen = false;
    bool own_whole = true;
    if (key < ranges.end && ranges.meet(key, key + kCellKeys)) {
      const device uchar* cells = mask_map + tile.batch * params.mask_map.batch +
                                  tile.head * params.mask_map.head + column * params.mask_map.key;
#pragma clang loop unroll(full)
      for (int i = 0; i < kTileCells; i++) {
        const int row_cell = tile.begin / kCellRows + i;
        if (row_cell * kCellRows >= tile.end) {
          continue;
        }
        const uchar cell = cells[row_cell * params.mask_map.row];
        const bool own = row_cell >= own_row / kCellRows && row_cell <= (own_row + kOwnRows - 1) / kCellRows;
        seen = seen || cell != kCellHidden;
        whole = whole && cell == kCellWhole;
        own_seen = own_seen || (own && cell != kCellHidden);
        own_whole = own_whole && (!own || cell == kCellWhole);
      }
    }
    const uint kind = !own_seen ? kCellHidden : own_whole ? kCellWhole : kCellMixed;
    mine = ColumnCells::of(column, kind, seen, whole);
  }
};

}  // namespace fattn
