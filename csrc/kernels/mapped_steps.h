// The steps of keys that a tile of prefill visits. With a map of the mask they are those in which some row
// sees a key by position and by the map.
#pragma once

#include "prefill_rows.h"

namespace fattn {

FATTN_CONSTEXPR int kTileCells = (kTileRows + kCellRows - 1) / kCellRows;
// Columns of cells that a simdgroup looks up at a time, a cell in each lane.
FATTN_CONSTEXPR int kColumns = kSimdWidth / kTileCells;
FATTN_CONSTEXPR int kNoColumn = 0x7fffffff;

static_assert(kCellRows % kTileRows == 0 || kTileRows % kCellRows == 0, "tiles begin where cells do");
static_assert(kSimdWidth % kTileCells == 0, "there are as many columns of each row of cells");
static_assert(kCellRows % (kRowFragments * 8) == 0, "the rows of a simdgroup are of one cell");
static_assert(kCellKeys % kTileKeys == 0, "the keys of a step are of one column");

struct TileSteps {
  KeyRanges ranges;  // of the tile
  ushort own_cell;   // which of the tile's rows of cells this simdgroup's rows are of
  uint looked_up;    // the cell of lane row * kColumns + i: its column times 4, and its CellKind

  void set(KeyRanges of_tile, thread const TileRows& rows, int own_row) thread {
    ranges = of_tile;
    own_cell = ushort((own_row - rows.tile.begin) / kCellRows);
  }

  // The first step from the one that begins at `key` on, by its first key. Like `after`, the same in all
  // simdgroups; ranges.end or more if there is none.
  int first(int key, thread const TileRows& rows, constant PrefillParams& params,
            const device uchar* mask_map, ushort lane) thread {
    if (!fc_mask_map) {
      return key;
    }
    look_up(key / kCellKeys, rows, params, mask_map, lane);
    return seen_from(key, rows, params, mask_map, lane);
  }

  // The step after the one that begins at `key`.
  int after(int key, thread const TileRows& rows, constant PrefillParams& params,
            const device uchar* mask_map, ushort lane) thread {
    const int next = next_step(ranges, key, kTileKeys);
    return fc_mask_map ? seen_from(next, rows, params, mask_map, lane) : next;
  }

  // What the map says of this simdgroup's rows in a step, until the one after it is asked for.
  uint own_kind(int key) const thread {
    if (!fc_mask_map) {
      return kCellWhole;
    }
    return simd_shuffle(looked_up, ushort(own_cell * kColumns + key / kCellKeys - first_column())) & 3;
  }

  // Whether it leaves the step whole to all rows of the tile.
  bool leaves_whole(int key) const thread {
    return !fc_mask_map || simd_all(looked_up / 4 != uint(key / kCellKeys) || (looked_up & 3) == kCellWhole);
  }

 private:
  int first_column() const thread { return int(simd_shuffle(looked_up, ushort(0)) / 4); }

  // The first step of a column of cells that is not in the gap between the ranges.
  int step_of(int column) const thread {
    return next_step(ranges, column * kCellKeys - kTileKeys, kTileKeys);
  }

  // The first step at that key or behind it.
  int seen_from(int key, thread const TileRows& rows, constant PrefillParams& params,
                const device uchar* mask_map, ushort lane) thread {
    while (key < ranges.end) {
      const int column = int(looked_up / 4);
      const bool ahead = (looked_up & 3) != kCellHidden && column >= key / kCellKeys;
      const int seen = simd_min(ahead ? column : kNoColumn);
      if (seen != kNoColumn) {
        return max(key, step_of(seen));
      }
      key = max(key, step_of(first_column() + kColumns));
      if (key < ranges.end) {
        look_up(key / kCellKeys, rows, params, mask_map, lane);
      }
    }
    return key;
  }

  void look_up(int first, thread const TileRows& rows, constant PrefillParams& params,
               const device uchar* mask_map, ushort lane) thread {
    const int column = first + lane % kColumns;
    const int key = column * kCellKeys;
    uint kind = kCellHidden;
    if (key < ranges.end && ranges.meet(key, key + kCellKeys)) {
      // Where the tile has no rows any more, the last ones stand for them.
      const int row = min(rows.tile.begin / kCellRows + lane / kColumns, (rows.tile.end - 1) / kCellRows);
      kind = mask_map[rows.tile.batch * params.mask_map.batch + rows.tile.head * params.mask_map.head +
                      row * params.mask_map.row + column * params.mask_map.key];
    }
    looked_up = uint(column) * 4 + min(kind, 3u);
  }
};

}  // namespace fattn
