// The prologue and epilogue of the prefill kernels: kernel arguments to rows, keys and attention state, and
// state to results.
#pragma once

#include "mapped_steps.h"
#include "../common/results.h"

namespace fattn {

// Visibility of a step for the rows of a simdgroup.
struct StepView {
  StepFragments fragments;
  bool whole;    // every row sees every key
  uint present;  // existing keys, for hide_scores()
};

// A step that every row sees whole. Other members are unused.
inline StepView whole_sight() {
  StepView view;
  view.fragments = all_fragments();
  return view;
}

// A tile, or a part of its keys, for one of its simdgroups.
struct PrefillTile {
  Operands operands;
  constant PrefillParams* params;
  LanePosition at;
  TileRows rows;
  KeyRanges ranges;  // of the tile
  KeySource source;
  TileState state;
  TileSteps steps;
  int first_row;  // of this simdgroup
  int first_key;  // of the first step
  int part;

  // Finds this threadgroup's work; false if there is none. `row`: this simdgroup's first row in the tile.
  bool find(uint3 group, int row, threadgroup SavedTile& saved, ushort thread_index) thread {
    const GridPlace here = place_in_grid(*params, group);
    const QueryTile tile =
        fc_packed ? packed_tile(operands.cu_seqlens_q, *params, here.tile, int(here.head), at.lane)
                  : dense_tile(*params, here);
    if (fc_packed && tile.end == 0) {
      return false;
    }
    part = here.part;
    state.saved = &saved;
    state.row = ushort(row + at.row);
    rows.set(tile, operands, *params);
    if (thread_index == 0) {
      rows.put_starts(*params, &saved.starts);
    }
    first_row = tile.begin + row;
    ranges = rows.ranges_of(tile.begin, kTileRows, *params);
    first_key = next_step(ranges, -kTileKeys, kTileKeys);
    if (fc_split) {
      first_key = take_part(ranges, *params, part, kTileKeys);
      if (part > 0 && first_key >= ranges.end) {
        put_empty_part(thread_index);
        return false;
      }
    }
    source = rows.source(operands, *params, ranges, &saved.starts);
    steps.ranges = ranges;
    steps.state = state;
    steps.put_map_rows(rows, *params, thread_index);
    return true;
  }

  // Prepares this lane's row of fragment r. `saves`: this lane saves the row for all lanes that share it.
  template <typename Attention>
  void begin_row(int r, thread Attention& attention, thread ScoreModifiers& modifiers, bool saves) const
      thread {
    prepare_row(r, modifiers, saves);
    const QueryRow row = own_row(r * 8 + at.row);
    if (fc_sinks && part == 0 && row.exists) {
      attention.add_sink(r, sink_score(sink_of(row)), at.pair == 0);
    }
  }

  // The same without an attention state.
  void prepare_row(int r, thread ScoreModifiers& modifiers, bool saves) const thread {
    const QueryRow row = own_row(r * 8 + at.row);
    rows.set_modifiers(r, row, operands, *params, modifiers);
    if (saves && r == 0 && at.row == 0) {
      state.put_ranges(rows.ranges_of(first_row, kOwnRows, *params));
    }
    if (saves) {
      rows.save(r, row, part, *params, state);
    }
  }

  // A row, relative to this simdgroup's first row.
  QueryRow own_row(int row) const thread { return rows.row(first_row + row, *params); }

  // The query of a row, relative to this simdgroup's first row; null if it does not exist.
  const device Element* query_row(int row) const thread {
    return rows.query_row(own_row(row), *params, operands.query);
  }

  // The first key of the first step; ranges.end or more if there is none.
  int first_step() thread { return steps.first(first_key, *params, operands.mask_map, at.lane); }
  int step_after(int key) thread { return steps.after(key, *params, operands.mask_map, at.lane); }

  // Whether every row of the tile sees all existing keys of the step at `key`. Call before step_after(key).
  bool sees_whole(int key) const thread {
    const bool seen = fc_alternating ? state.all_see(key) : ranges.all_see(key, key + 1);
    return steps.own_cell() == kWholeColumn && seen && !has_drafts(key);
  }

  // The visibility of the step at `key`. Call before step_after(key). `exist`: see StepKeys.
  StepView view_of(int key, uint exist) const thread {
    const uint cell = steps.own_cell();
    const KeyRanges own_ranges = state.own_ranges();
    StepView view;
    view.fragments = step_fragments(own_ranges, key, cell);
    view.whole = is_whole(cell) && own_ranges.all_see(key, key + 1) && exist == kAllKeys && !has_drafts(key);
    view.present = present_keys(exist, at.pair);
    return view;
  }

  // The visibility for this lane's rows.
  Visibility visible() const thread {
    Visibility visible = state.visible(*params);
    if (fc_tree) {
      visible.first_draft = rows.first_position;
      FATTN_UNROLL
      for (int r = 0; r < kRowFragments; r++) {
        const QueryRow row = own_row(r * 8 + at.row);
        visible.drafts[r] = row.exists ? drafts_of(row) : 0;
      }
    }
    return visible;
  }

  // The row's tree mask.
  ulong drafts_of(QueryRow row) const thread {
    return ulong(operands.tree_mask[rows.tile.batch * params->tree_mask_batch_stride +
                                    row.row * params->tree_mask_row_stride]);
  }

  // The results of this lane's row of fragment r, as store_rows() uses them.
  long place(int r) const thread { return state.out(r); }
  long sum_place(int r) const thread { return state.lse(r); }
  float sink(int r) const thread { return sink_of(own_row(r * 8 + at.row)); }

  // The learned logit of a row's head.
  float sink_of(QueryRow row) const thread {
    return float_at(operands.sinks, row.head * params->sinks_stride, fc_sinks_kind);
  }

 private:
  // Whether the step at `key` has draft tokens, which a tree mask may hide.
  bool has_drafts(int key) const thread { return fc_tree && key + kTileKeys > rows.first_position; }

  // Marks this part as empty in every row of the tile, so that merge ignores its output.
  void put_empty_part(ushort thread_index) const thread {
    static_assert(kTileRows <= kThreads, "a thread has one row");
    const QueryRow row = rows.row(rows.tile.begin + thread_index, *params);
    if (thread_index < kTileRows && row.exists) {
      const RowSum nothing = row_sum_of_no_keys();
      operands.partial_sum[rows.lse_of(row, part, *params)] = nothing.of_part(log2_per_score());
    }
  }
};

}  // namespace fattn
