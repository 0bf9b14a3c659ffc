// The state that a simdgroup of decode keeps in threadgroup memory instead of registers (saved.h): for the
// end of the chunk and the next chunk, for steps with hidden keys, and values that a step needs once.
#pragma once

#include "decode_rows.h"
#include "../common/saved.h"

namespace fattn {
// Whether packed steps reload their sequence. An int4 cache needs two more base pointers, for its scales;
// above 64 columns the step needs so many registers that this does not help.
FATTN_CONSTEXPR bool kSavedSequence = kKvFormat == kKvInt4 && kHeadDim <= 64;
}  // namespace fattn
// Whether steps reload the offsets of K and V, because a mask or a block table takes too many registers.
constant bool fc_saved_starts = fc_has_mask || fc_paged || fattn::kSavedSequence;

namespace fattn {

// The learned logit of the head of this lane's row, from the saved state of all simdgroups.
struct SavedSinks {
  const threadgroup SavedWork* saved;
  int own_row;  // see ResultRows

  float sink(int) const thread { return saved[own_row / 8].rows[own_row % 8].sink; }
};

struct DecodeState {
  threadgroup SavedWork* saved;  // of this simdgroup

  // Saves state for the end of the chunk and for the next chunk.
  void put_work(RowBlock block, ChunkIndex chunk, thread const Worker& worker, ushort lane) const thread {
    if (lane == 0) {
      save_work(block, chunk, worker);
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
  }
  // Saves a chunk of a short cache. Returns whether it exists.
  bool put_chunk(int batch, int part, thread const Operands& operands, constant DecodeParams& params,
                 ushort lane) const thread {
    const CutSequence cut = cut_sequence(operands.seq_lens, params.span, batch);
    if (lane == 0) {
      saved->worker_batch = batch;
      saved->part = part;
      saved->known_keys = cut.chunks.keys;
      saved->known_length = cut.length;
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
    return part < cut.chunks.count();
  }
  // Saves state for the steps of a sequence.
  void put_sequence(thread const Sequence& sequence, thread const WorkItem& item, PackedRow packed,
                    ChunkResults results, thread const Operands& operands, constant DecodeParams& params,
                    LanePosition at) const thread {
    if (at.lane == 0) {
      put_results(results);
      put_limits(limits_of(item, params.span));
      put_starts(sequence, item.batch * params.block_table_batch_stride);
    }
    if (at.pair == 0) {
      put_row(sequence, at);
      if (fc_alibi) {
        put_slope(slope_of(packed, item.batch, operands, params), at);
      }
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
  }

  // Called by one lane, as are the functions below that save no rows.
  void save_work(RowBlock block, ChunkIndex chunk, thread const Worker& worker) const thread {
    saved->kv_head = block.kv_head;
    saved->block_row = block.first_row;
    saved->part = chunk.part;
    saved->worker_index = worker.index;
    saved->worker_batch = worker.batch;
    saved->worker_part = worker.part;
    saved->worker_left = worker.left;
    saved->worker_dealt = worker.dealt;
    saved->known_keys = worker.known.keys;
    saved->known_count = worker.known.count;
    saved->known_length = worker.known.length;
  }
  RowBlock block() const thread {
    RowBlock block;
    block.kv_head = saved->kv_head;
    block.first_row = saved->block_row;
    return block;
  }
  int batch() const thread { return saved->worker_batch; }
  KnownSequence known() const thread {
    KnownSequence known;
    known.length = saved->known_length;
    known.keys = saved->known_keys;
    known.count = saved->known_count;
    return known;
  }
  // The chunk that was saved.
  WorkItem item(constant CausalSpan& span) const thread {
    KnownSequence sequence;
    sequence.length = saved->known_length;
    sequence.keys = saved->known_keys;
    return sequence.item(batch(), saved->part, span);
  }
  Worker worker() const thread {
    Worker worker;
    worker.index = saved->worker_index;
    worker.batch = saved->worker_batch;
    worker.part = saved->worker_part;
    worker.left = saved->worker_left;
    worker.dealt = saved->worker_dealt;
    worker.known = known();
    return worker;
  }

  void put_results(ChunkResults results) const thread {
    saved->first_row = int(results.first_row);
    saved->result_rows = results.rows;
  }
  ChunkResults results() const thread {
    ChunkResults results;
    results.first_row = uint(saved->first_row);
    results.rows = saved->result_rows;
    return results;
  }

  void put_limits(KeyLimits limits) const thread {
    saved->length = limits.length;
    saved->begin = limits.begin;
    saved->sink_end = limits.sink_end;
    saved->window_left = limits.window_left;
    saved->sink_tokens = limits.sink_tokens;
    saved->first_draft = limits.first_draft;
  }
  KeyLimits limits() const thread {
    KeyLimits limits;
    limits.length = saved->length;
    limits.begin = saved->begin;
    limits.sink_end = saved->sink_end;
    limits.window_left = saved->window_left;
    limits.sink_tokens = saved->sink_tokens;
    limits.first_draft = saved->first_draft;
    return limits;
  }

  // `block_entry`: the sequence's first entry of the block table.
  void put_starts(thread const Sequence& sequence, long block_entry) const thread {
    if (fc_saved_starts) {
      saved->starts.key = sequence.key.first;
      saved->starts.value = sequence.value.first;
      saved->starts.blocks = block_entry;
    }
    if (kSavedSequence) {
      saved->kv_head = int(sequence.key.head);  // for short caches, saved only here
    }
  }
  long first_block_entry() const thread { return fc_paged ? saved->starts.blocks : 0; }
  void take_key_start(thread Sequence& sequence) const thread {
    if (fc_saved_starts) {
      sequence.key.first = saved->starts.key;
    }
  }
  void take_value_start(thread Sequence& sequence) const thread {
    if (fc_saved_starts) {
      sequence.value.first = saved->starts.value;
    }
  }

  // The batch and head whose scales the steps read.
  void take_head(thread Sequence& sequence) const thread {
    if (kSavedSequence) {
      sequence.key.batch = sequence.value.batch = uint(saved->worker_batch);
      sequence.key.head = sequence.value.head = uint(saved->kv_head);
    }
  }

  // Called by one lane of each row: saves the parameters of its head, which do not change between chunks.
  void put_head(PackedRow packed, thread const Operands& operands, constant DecodeParams& params,
                LanePosition at) const thread {
    if (fc_sinks && packed.exists) {
      saved->rows[at.row].sink = sink_of(packed, operands, params);
    }
  }
  float sink(LanePosition at) const thread { return saved->rows[at.row].sink; }

  // Called by one lane of each row: saves the slope of its head in the chunk's sequence.
  void put_slope(float slope, LanePosition at) const thread { saved->rows[at.row].slope = slope; }

  // Called by one lane of each row: saves its visibility in the chunk's sequence.
  void put_row(thread const Sequence& sequence, LanePosition at) const thread {
    saved->rows[at.row].limit = sequence.visible.limit[0];
    if (fc_tree) {
      saved->rows[at.row].drafts = int(sequence.visible.drafts[0]);
    }
    if (fc_has_mask) {
      saved->rows[at.row].mask_row = sequence.visible.mask_row[0];
    }
  }
  Visibility visible(constant DecodeParams& params, LanePosition at) const thread {
    Visibility visible;
    visible.limit[0] = saved->rows[at.row].limit;
    if (fc_tree) {
      visible.drafts[0] = uint(saved->rows[at.row].drafts);
    }
    if (fc_has_mask) {
      visible.mask_row[0] = saved->rows[at.row].mask_row;
    }
    set_visible(visible, params, limits());
    return visible;
  }
  ScoreModifiers modifiers(thread const Sequence& sequence, constant DecodeParams& params,
                           LanePosition at) const thread {
    const float slope = fc_alibi ? saved->rows[at.row].slope : 0.0f;
    return sequence.modifiers_of(params, saved->rows[at.row].limit, slope);
  }
};

}  // namespace fattn
