// How decode shares out its work: sequences are cut into chunks, and chunks are given to threadgroups.
//
// A chunk is what one partial result stands for. Its size follows from the sequence's own length alone, so
// that no result depends on the rest of the batch: a sequence has about as many chunks as would fill the GPU
// if it were alone. Which chunks a threadgroup takes follows from the whole batch: the keys are shared out
// evenly, so that a long sequence among short ones keeps the whole GPU busy.
//
// Chunks up to kLargeChunk lie in a row that is cut into runs, so that a threadgroup seldom changes sequence.
// Larger ones would not fit such runs (one more than its share makes a threadgroup late by all of it): they
// are dealt out one by one. A sequence that has them has about one for each threadgroup.
#pragma once

#include "steps.h"

namespace fattn {

inline int ceil_div(int n, int size) { return (n + size - 1) / size; }

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
  const int units = ceil_div(visible, span.chunk_unit);
  // A batch of sequences is better off with large chunks than one sequence is; so up to the size at which
  // the end of a chunk costs little, a sequence has few.
  const int few = min(ceil_div(units, kFewChunks), kLargeChunk / span.chunk_unit);
  Chunks chunks;
  chunks.keys = max(ceil_div(units, span.most_chunks), few) * span.chunk_unit;
  chunks.keys = clamp(chunks.keys, span.least_chunk, span.largest_chunk);
  chunks.visits = visits_of(ranges, 0, ranges.end, chunks.keys);
  return chunks;
}

// One chunk.
struct WorkItem {
  int batch;
  int length;
  int part;
  KeyRanges ranges;
  int begin;  // keys [begin, end), as far as they are in the ranges
  int end;
};

// A sequence of a batch.
struct CutSequence {
  int batch;
  int length;
  KeyRanges ranges;
  Chunks chunks;

  bool is_dealt() const thread { return chunks.keys > kLargeChunk; }
  // What it adds to the row that runs are cut from. A ragged chunk counts as whole.
  int units_of_runs(constant CausalSpan& span) const thread {
    return is_dealt() ? 0 : chunks.count() * (chunks.keys / span.chunk_unit);
  }
  WorkItem item(int part) const thread {
    WorkItem item;
    item.batch = batch;
    item.length = length;
    item.part = part;
    item.ranges = ranges;
    item.begin = chunks.begin(part);
    item.end = min(item.begin + chunks.keys, ranges.end);
    return item;
  }
};

inline CutSequence cut_sequence(const device int* seq_lens, constant CausalSpan& span, int batch) {
  CutSequence sequence;
  sequence.batch = batch;
  sequence.length = length_of(seq_lens, span, batch);
  sequence.ranges = newest_rows(span, sequence.length);
  sequence.chunks = chunks_of(sequence.ranges, span);
  return sequence;
}

// A threadgroup's share of the chunks of all sequences, number `index` of all shares: first its run, then
// what it is dealt.
struct Share {
  int index;
  int batch;
  int part;     // run: of the sequence, the next; dealt: the next, counted from the sequence's first
  int left;     // run: units of span.chunk_unit keys; the next chunk belongs to it while this is positive
  int dealing;  // 0 or 1
};

// The share before its first chunk. The lanes look at 32 sequences at a time.
inline Share share_of(const device int* seq_lens, constant CausalSpan& span, int batch_size, int shares,
                      int index, ushort lane) {
  int total = 0;
  for (int first = 0; first < batch_size; first += kSimdWidth) {
    const int batch = first + int(lane);
    const CutSequence cut = cut_sequence(seq_lens, span, min(batch, batch_size - 1));
    const int units = cut.units_of_runs(span);
    total += simd_sum(batch < batch_size ? units : 0);
  }
  const int size = total / shares;
  const int larger = total % shares;
  const int begin = index * size + min(index, larger);

  Share share;
  share.index = index;
  share.batch = batch_size;
  share.part = 0;
  share.left = size + int(index < larger);
  share.dealing = 0;
  int before = 0;
  for (int first = 0; first < batch_size && share.batch == batch_size; first += kSimdWidth) {
    const int batch = first + int(lane);
    const CutSequence sequence = cut_sequence(seq_lens, span, min(batch, batch_size - 1));
    const int units = batch < batch_size ? sequence.units_of_runs(span) : 0;
    const int through = before + simd_prefix_inclusive_sum(units);
    const int passed = simd_sum(int(through <= begin));  // sequences that end before the run begins
    if (passed < kSimdWidth) {
      // The first chunk that begins in the run; after the last one follows the next sequence.
      const int chunk = sequence.chunks.keys / span.chunk_unit;
      const int skipped = begin - (through - units);
      const int part = ceil_div(skipped, chunk);
      share.batch = first + passed;
      share.part = simd_shuffle(part, ushort(passed));
      share.left -= simd_shuffle(part * chunk - skipped, ushort(passed));
    }
    before = simd_shuffle(through, ushort(kSimdWidth - 1));
  }
  return share;
}

// The first sequence from `batch` on whose chunks are dealt; batch_size if there is none.
inline int next_dealt(const device int* seq_lens, constant CausalSpan& span, int batch_size, int batch,
                      ushort lane) {
  int next = batch_size;
  for (int first = batch; first < batch_size && next == batch_size; first += kSimdWidth) {
    const int own = first + int(lane);
    const CutSequence cut = cut_sequence(seq_lens, span, min(own, batch_size - 1));
    const bool dealt = cut.is_dealt();
    const uint found = uint(simd_vote::vote_t(simd_ballot(dealt && own < batch_size)));
    next = found != 0 ? first + int(ctz(found)) : next;
  }
  return next;
}

struct ChunkIndex {
  int batch;  // -1: there is none
  int part;
};

// Takes the next chunk out of a share. With one way out: to return from the loops takes 40 half registers
// more, which stay taken in the steps. And by selection: branches take 10, and in decode_wide with a window
// 256 threads for 512 (float16, D = 256, as Mesa counts for M1 and M2).
inline ChunkIndex take_chunk(thread Share& share, const device int* seq_lens, constant CausalSpan& span,
                             int batch_size, int shares, ushort lane) {
  ChunkIndex taken;
  taken.batch = -1;
  taken.part = 0;
  while (taken.batch < 0 && share.dealing == 0 && share.left > 0 && share.batch < batch_size) {
    const CutSequence sequence = cut_sequence(seq_lens, span, share.batch);
    const bool found = !sequence.is_dealt() && share.part < sequence.chunks.count();
    taken.batch = found ? share.batch : -1;
    taken.part = share.part;
    share.left -= found ? sequence.chunks.keys / span.chunk_unit : 0;
    share.part = found ? share.part + 1 : 0;
    share.batch += found ? 0 : 1;
  }
  if (taken.batch < 0 && share.dealing == 0) {
    share.dealing = 1;
    share.batch = next_dealt(seq_lens, span, batch_size, 0, lane);
    share.part = share.index;
  }
  while (taken.batch < 0 && share.batch < batch_size) {
    const CutSequence sequence = cut_sequence(seq_lens, span, share.batch);
    if (share.part < sequence.chunks.count()) {
      taken.batch = share.batch;
      taken.part = share.part;
      share.part += shares;
    } else {
      share.part -= sequence.chunks.count();
      share.batch = next_dealt(seq_lens, span, batch_size, share.batch + 1, lane);
    }
  }
  return taken;
}

}  // namespace fattn
