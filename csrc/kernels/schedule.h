// How decode shares out its work: sequences are cut into chunks, and neighbouring chunks are given to
// threadgroups.
//
// A chunk is what one partial result stands for. Its size follows from the sequence's own length alone, so
// that no result depends on the rest of the batch: a sequence has about as many chunks as would fill the GPU
// if it were alone. Which chunks a threadgroup takes follows from the whole batch: the keys are shared out
// evenly, so that a long sequence among short ones keeps the whole GPU busy.
#pragma once

#include "steps.h"

namespace fattn {

// The chunks of a sequence, cut at multiples of their size, counted from key 0. A sequence without keys has
// one chunk all the same, in which its rows get the no-key result.
struct Chunks {
  int keys;  // of a chunk
  Visits visits;

  int count() const thread { return max(visits.count, 1); }
  int begin(int part) const thread { return visits[part] * keys; }
};

inline Chunks chunks_of(KeyRanges ranges, constant CausalSpan& span) {
  const int visible = ranges.end - ranges.begin + ranges.sink_end;
  const int units = (visible + span.chunk_unit - 1) / span.chunk_unit;
  // A batch of sequences is better off with large chunks than one sequence is; so up to the size at which
  // the end of a chunk costs little, a sequence has few.
  const int few = min((units + kFewChunks - 1) / kFewChunks, kLargeChunk / span.chunk_unit);
  Chunks chunks;
  chunks.keys = max((units + span.most_chunks - 1) / span.most_chunks, few) * span.chunk_unit;
  chunks.keys = clamp(chunks.keys, span.least_chunk, span.largest_chunk);
  chunks.visits = visits_of(ranges, 0, ranges.end, chunks.keys);
  return chunks;
}

// A threadgroup's share of the chunks of all sequences, which lie in a row: the place of its next chunk, and
// how much is left. Work is counted in units of span.chunk_unit keys; a ragged chunk counts as whole.
struct Share {
  int batch;
  int part;
  int left;  // the next chunk belongs to the share as long as this is positive
};

inline int units_of(Chunks chunks, constant CausalSpan& span) {
  return chunks.count() * (chunks.keys / span.chunk_unit);
}

// Number `index` of `shares`. The lanes look at 32 sequences at a time.
inline Share share_of(const device int* seq_lens, constant CausalSpan& span, int batch_size, int shares,
                      int index, ushort lane) {
  int total = 0;
  for (int first = 0; first < batch_size; first += kSimdWidth) {
    const int batch = first + int(lane);
    const int length = length_of(seq_lens, span, min(batch, batch_size - 1));
    const int units = units_of(chunks_of(newest_rows(span, length), span), span);
    total += simd_sum(batch < batch_size ? units : 0);
  }
  const int size = total / shares;
  const int larger = total % shares;
  const int begin = index * size + min(index, larger);

  Share share;
  share.batch = batch_size;
  share.part = 0;
  share.left = size + int(index < larger);
  int before = 0;
  for (int first = 0; first < batch_size && share.batch == batch_size; first += kSimdWidth) {
    const int batch = first + int(lane);
    const int length = length_of(seq_lens, span, min(batch, batch_size - 1));
    const Chunks chunks = chunks_of(newest_rows(span, length), span);
    const int units = batch < batch_size ? units_of(chunks, span) : 0;
    const int through = before + simd_prefix_inclusive_sum(units);
    const int passed = simd_sum(int(through <= begin));  // sequences that end before the share begins
    if (passed < kSimdWidth) {
      // The first chunk that begins in the share; after the last one follows the next sequence.
      const int chunk = chunks.keys / span.chunk_unit;
      const int skipped = begin - (through - units);
      const int part = (skipped + chunk - 1) / chunk;
      share.batch = first + passed;
      share.part = simd_shuffle(part, ushort(passed));
      share.left -= simd_shuffle(part * chunk - skipped, ushort(passed));
    }
    before = simd_shuffle(through, ushort(kSimdWidth - 1));
  }
  return share;
}

// One chunk of a share.
struct WorkItem {
  int batch;  // -1: there is none
  int length;
  int part;
  KeyRanges ranges;
  int begin;  // keys [begin, end), as far as they are in the ranges
  int end;
};

// Takes the next chunk out of the share.
inline WorkItem take_chunk(thread Share& share, const device int* seq_lens, constant CausalSpan& span,
                           int batch_size) {
  WorkItem item;
  item.batch = -1;
  while (item.batch < 0 && share.left > 0 && share.batch < batch_size) {
    item.length = length_of(seq_lens, span, share.batch);
    item.ranges = newest_rows(span, item.length);
    const Chunks chunks = chunks_of(item.ranges, span);
    if (share.part == chunks.count()) {
      share.batch++;
      share.part = 0;
      continue;
    }
    item.batch = share.batch;
    item.part = share.part;
    item.begin = chunks.begin(item.part);
    item.end = min(item.begin + chunks.keys, item.ranges.end);
    share.part++;
    share.left -= chunks.keys / span.chunk_unit;
  }
  return item;
}

}  // namespace fattn
