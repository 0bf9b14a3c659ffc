// Decode for heads that exceed the registers of one simdgroup, and for values that are the first columns of
// their keys (multi-head latent attention: DeepSeek-V2, 2024).
//
// Inputs, outputs and the packing of rows are as in decode.metal. Here all simdgroups of a threadgroup work
// on the same rows and keys and divide the columns: each holds its columns of query and output in registers
// and reads only these columns of every key and value. The threadgroup loads each byte once for all its rows.
// A step:
//
//   each simdgroup   keys x query, summed over its columns                        -> threadgroup memory
//   each thread      one or two scores: sum of all columns, modifiers, visibility -> threadgroup memory
//   each simdgroup   weights of all rows; weights x values of its columns         -> registers
//
// Keys are the left factor of the first product, so a lane reads them as it reads values (tile.h), and values
// that are columns of the keys are multiplied from the same registers.
#define FATTN_COLUMN_SHARES FATTN_SIMDGROUPS

#include "wide_step.h"

using namespace fattn;

[[kernel, max_total_threads_per_threadgroup(fattn::kThreads)]] void fattn_decode_wide(
    FATTN_ATTENTION_ARGUMENTS(DecodeParams)) {
  threadgroup float shared_products[kSimdgroups * kStepScores];
  threadgroup float shared_scores[kStepScores];
  threadgroup float2 shared_scales[scale_pairs(kRowScales, kTileKeys)];

  Operands operands;
  FATTN_TAKE_ARGUMENTS(operands);
  const LanePosition at = lane_position(lane);
  const ushort thread_index = thread_in_group(simdgroup_index, lane);
  const uint3 group = group_in_grid(group_in_dispatch, slice);
  const RowBlock block = row_block(params, int(group.y));

  SharedScores shared;
  shared.products = shared_products;
  shared.scores = shared_scores;
  SharedScales scales;
  scales.pairs = shared_scales;
  QueryColumns columns;
  ResultRows results;
  results.operands = operands;
  results.params = &params;
  results.block = block;
  results.own_row = at.row;

  Worker worker = worker_at(operands.seq_lens, params.span, params.batch, params.workers, int(group.x), lane);
  int query_batch = -1;
  for (;;) {
    const ChunkIndex next =
        take_chunk<false>(worker, operands.seq_lens, params.span, params.batch, params.workers, lane);
    if (next.batch < 0) {
      return;
    }
    // Cut again: keeping the cut of the search would take registers.
    const CutSequence cut = cut_sequence(operands.seq_lens, params.span, next.batch);
    KnownSequence sequence_of_chunk;
    sequence_of_chunk.set(cut);
    const WorkItem item = sequence_of_chunk.item(next.batch, next.part, params.span);
    results.chunk = chunk_results(params, block, item);
    if (item.batch != query_batch) {
      columns.load(operands, params, block, item.batch, simdgroup_index, at);
      query_batch = item.batch;
    }
    const Sequence sequence = sequence_of(operands, params, block, item, thread_index);
    ColumnAttention attention;
    attention.clear();
    if (fc_sinks && item.part == 0) {
      FATTN_UNROLL
      for (int r = 0; r < kRowGroups; r++) {
        if (results.exists(r)) {
          attention.add_sink(r, sink_score(results.sink(r)), at.pair == 0);
        }
      }
    }

    const Visits steps = visits_of(item.ranges, item.begin, item.end, kTileKeys);
    for (int visit = 0; visit < steps.count; visit++) {
      StepKeys step;
      step.look_up(sequence.table, steps[visit] * kTileKeys, lane);
      if (is_whole_step(step, item.ranges)) {
        wide_step<true>(attention, columns, sequence, shared, scales, step, params, thread_index,
                        simdgroup_index, at);
      } else {
        wide_step<false>(attention, columns, sequence, shared, scales, step, params, thread_index,
                         simdgroup_index, at);
      }
    }
    attention.finish();
    store_rows<ValueColumns>(attention, results, results, simdgroup_index, at);
  }
}
