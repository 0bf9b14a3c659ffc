// The query rows of a tile of prefill: which keys they see, and where their operands and results are. The
// same for the kernel whose simdgroups have rows and for the one whose simdgroups share rows.
#pragma once

#include "packed.h"
#include "scores.h"
#include "steps.h"

namespace fattn {

// The keys that a tile reads.
struct KeySource {
  StoredOperand key;  // dense: of the sequence and head; of a pool, of the head
  StoredOperand value;
  KeyTable table;
};

struct ResultPlace {
  long out;  // first element of the row
  long lse;

  // The same in the results of a part of the keys; those of the parts lie one after the other.
  ResultPlace of_part(int part, constant PrefillParams& params) const thread {
    const long rows = long(fc_packed ? 1 : params.batch) * params.q_heads * params.q_len;  // of the call
    ResultPlace place;
    place.lse = fc_split ? lse + part * rows : lse;
    place.out = fc_split ? out + part * rows * kValueDim : out;
    return place;
  }
};

struct TileRows {
  QueryTile tile;
  int length;          // keys of the sequence
  int first_position;  // of its first row
  long first_key;      // packed keys: of the sequence, among those of all

  void set(QueryTile of, constant PrefillParams& params, const device int* seq_lens,
           const device int* cu_seqlens_k) thread {
    tile = of;
    first_key = 0;
    length = params.kv_len;
    first_position = params.q_offset;
    if (fc_has_seq_lens) {
      length = tile.batch < 0 ? 0 : clamp(seq_lens[tile.batch * params.seq_lens_stride], 0, params.kv_len);
      first_position = length - tile.q_len;
    }
    if (fc_packed_keys) {
      const PackedKeys keys = packed_keys(cu_seqlens_k, params, tile.batch);
      first_key = keys.first;
      length = keys.count;
      first_position = params.last_rows_meet ? length - tile.q_len : params.q_offset;
    }
  }

  QueryRow row(int item, constant PrefillParams& params) const thread {
    return tile.row(item, params.group_size);
  }

  // The keys that some and all of the rows [first, first + count) see; none if the first does not exist.
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

  // `end`: no row of the tile sees that key or one behind it.
  KeySource source(constant PrefillParams& params, const device Stored* key, const device Stored* value,
                   const device Scale* key_scales, const device Scale* value_scales,
                   const device int* block_tables, int end) const thread {
    KeySource source;
    source.key.elements = key + tile.kv_head * params.key.head;
    source.value.elements = value + tile.kv_head * params.value.head;
    source.key.first = source.value.first = 0;
    source.key.head = source.value.head = uint(tile.kv_head);
    if (fc_scales) {
      source.key.scales = key_scales;
      source.value.scales = value_scales;
    }
    source.table.length = end;
    if (fc_paged) {
      source.table.blocks = block_tables + max(tile.batch, 0L) * params.block_table_batch_stride;
      source.table.entry_stride = params.block_table_entry_stride;
      source.table.num_blocks = params.num_blocks;
    } else if (fc_packed_keys) {
      source.key.elements += first_key * params.key.row;
      source.value.elements += first_key * params.value.row;
    } else {
      source.key.elements += tile.batch * params.key.batch;
      source.value.elements += tile.batch * params.value.batch;
    }
    return source;
  }

  // Null for a row that does not exist.
  const device Element* query_row(QueryRow at, constant PrefillParams& params,
                                  const device Element* query) const thread {
    if (!at.exists) {
      return nullptr;
    }
    const device Element* from =
        query + at.head * params.query.head + (tile.first_row + at.row) * params.query.row;
    return fc_packed ? from : from + tile.batch * params.query.batch;
  }

  // What row fragment r of this lane may see, and what becomes of its products.
  void set_row(int r, QueryRow at, constant PrefillParams& params, const device float* alibi_slopes,
               thread Visibility& visible, thread ScoreModifiers& modifiers) const thread {
    const int position = first_position + at.row;
    const RowKeys keys = keys_of_row(params, position, length);
    visible.limit[r] = at.exists ? keys.end : 0;
    visible.window_begin[r] = keys.begin;
    visible.sink_end[r] = at.exists ? keys.sink_end : 0;
    visible.mask_row[r] =
        tile.batch * params.mask.batch + at.head * params.mask.head + at.row * params.mask.row;
    visible.mask_key_stride = params.mask.key;
    modifiers.scale = params.score_scale;
    modifiers.softcap = params.softcap;
    modifiers.position[r] = position;
    if (fc_alibi) {
      modifiers.slope[r] =
          at.exists ? alibi_slopes[at.head * params.alibi_slopes_stride] * params.slope_scale : 0.0f;
    }
  }

  ResultPlace result_of(QueryRow at, constant PrefillParams& params) const thread {
    ResultPlace place;
    place.lse = (tile.batch * long(params.q_heads) + at.head) * params.q_len + at.row;
    place.out = place.lse * kValueDim;
    if (fc_packed) {
      place.lse = long(at.head) * params.q_len + tile.first_row + at.row;
      place.out = (long(tile.first_row + at.row) * params.q_heads + at.head) * kValueDim;
    }
    return place;
  }
};

inline void put_result(device Element* out, device float* partial_out, long place, float result) {
  if (fc_split) {
    partial_out[place] = result;
  } else {
    out[place] = Element(result);
  }
}

// Says of each row of the tile that this part of its keys, which has none, was not seen. The merge then does
// not look at what the part has for results.
inline void put_empty_part(thread const TileRows& rows, constant PrefillParams& params, int part,
                           device float* lse, ushort thread_index) {
  for (int i = thread_index; i < kTileRows; i += kThreads) {
    const QueryRow row = rows.row(rows.tile.begin + i, params);
    if (row.exists) {
      lse[rows.result_of(row, params).of_part(part, params).lse] = -INFINITY;
    }
  }
}

// The learned logit of a row's head, in score units.
inline float sink_of(QueryRow at, constant PrefillParams& params, const device float* sinks) {
  return sinks[at.head * params.sinks_stride] * (fc_additive_mask ? 1.0f : M_LOG2E_F);
}

}  // namespace fattn
