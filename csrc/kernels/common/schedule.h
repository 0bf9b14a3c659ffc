// The work distribution of decode: sequences are cut into chunks of keys, and chunks are assigned to
// threadgroups.
//
// Each chunk yields one partial result. Its size depends only on the sequence's own length, so results are
// batch-invariant: a sequence has about as many chunks as would fill the GPU if it were alone. The assignment
// depends on the whole batch: every threadgroup gets about equally many keys, so a long sequence among short
// ones keeps the whole GPU busy.
//
// Chunks of up to kLargeChunk keys form a line in sequence order, and each threadgroup takes a contiguous
// run, so it seldom changes sequence. Runs of larger chunks would be unbalanced by up to a whole chunk, so
// these are dealt out one by one. A sequence with large chunks has about one per threadgroup.
#pragma once

#include "steps.h"

namespace fattn {

inline int ceil_div(int n, int size) { return (n + size - 1) / size; }
// The same for a power of 2, without a division, which is as slow as a cached load.
inline int ceil_shift(int n, int size) { return (n + size - 1) >> ctz(uint(size)); }

// The chunks of a sequence, cut at multiples of `keys` from key 0. A sequence without keys has one chunk,
// which stores the results of its rows.
struct Chunks {
  int keys;  // per chunk
  Visits visits;

  int count() const thread { return max(visits.count, 1); }
  int begin(int part) const thread { return visits[part] * keys; }
};

// Units per `keys`, a multiple of the unit.
inline int units_of(int keys, constant CausalSpan& span) { return keys >> ctz(uint(span.chunk_unit)); }

inline Chunks chunks_of(KeyRanges ranges, constant CausalSpan& span) {
  const int visible = ranges.end - ranges.begin + ranges.sink_end;
  const int units = ceil_shift(visible, span.chunk_unit);
  // A batch of sequences runs best with large chunks, a single sequence with small ones. Up to kLargeChunk
  // keys, where ending a chunk costs little, a sequence has at most few_chunks.
  const int few = min(ceil_shift(units, span.few_chunks), units_of(kLargeChunk, span));
  Chunks chunks;
  chunks.keys = max(ceil_div(units, span.max_chunks), few) * span.chunk_unit;
  chunks.keys = clamp(chunks.keys, span.min_chunk, span.largest_chunk);
  chunks.visits = visits_of(ranges, 0, ranges.end, chunks.keys);
  return chunks;
}

// One chunk of one sequence.
struct WorkItem {
  int batch;
  int length;
  int part;
  KeyRanges ranges;
  int begin;  // keys [begin, end), intersected with the ranges
  int end;
};

// Whether chunks of this size are dealt out.
inline bool are_dealt(int keys) { return keys > kLargeChunk; }

// A sequence of the batch, cut into chunks.
struct CutSequence {
  int length;
  Chunks chunks;

  bool is_dealt() const thread { return are_dealt(chunks.keys); }
  // Its length in the line of chunks; a partial chunk counts as whole.
  int units_of_runs(constant CausalSpan& span) const thread {
    return is_dealt() ? 0 : chunks.count() * units_of(chunks.keys, span);
  }
};

inline CutSequence cut_sequence(const device int* seq_lens, constant CausalSpan& span, int batch) {
  CutSequence sequence;
  sequence.length = length_of(seq_lens, span, batch);
  sequence.chunks = chunks_of(newest_rows(span, sequence.length), span);
  return sequence;
}

// The sequence whose chunks a threadgroup takes: cut once instead of for each chunk.
struct KnownSequence {
  int length;
  int keys;   // per chunk
  int count;  // of chunks; 0: not known yet

  bool is_dealt() const thread { return are_dealt(keys); }
  void set(thread const CutSequence& sequence) thread {
    length = sequence.length;
    keys = sequence.chunks.keys;
    count = sequence.chunks.count();
  }
  // Without seq_lens, all sequences have the same length.
  void forget() thread { count = fc_has_seq_lens ? 0 : count; }

  WorkItem item(int batch, int part, constant CausalSpan& span) const thread {
    WorkItem item;
    item.batch = batch;
    item.length = length;
    item.part = part;
    item.ranges = newest_rows(span, length);
    Chunks chunks;
    chunks.keys = keys;
    chunks.visits = visits_of(item.ranges, 0, item.ranges.end, keys);
    item.begin = chunks.begin(part);
    item.end = min(item.begin + keys, item.ranges.end);
    return item;
  }
};

// The chunks of a threadgroup, worker number `index`: first its run, then those dealt to it.
struct Worker {
  int index;
  int batch;
  int part;   // the next chunk; when dealing it is counted from the start of `batch`, and may lie beyond it
  int left;   // units of chunk_unit keys left in the run; the next chunk belongs to it while this is positive
  int dealt;  // the first sequence whose chunks are dealt, batch_size if there is none; -1 once dealing
  KnownSequence known;  // `batch`

  bool dealing() const thread { return dealt < 0; }
};

// The first sequence at or after `batch` whose chunks are dealt; batch_size if there is none.
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

// Sets the run of a worker in a line of `total` units. Returns the run's first unit.
inline int take_run(thread Worker& worker, int total, int workers) {
  const int size = total / workers;
  const int larger = total % workers;
  worker.left = size + int(worker.index < larger);
  return worker.index * size + min(worker.index, larger);
}

// A worker positioned at its first chunk, the first one that begins in its run. If the sequence has none,
// take_chunk continues with the next sequence.
inline Worker worker_at(const device int* seq_lens, constant CausalSpan& span, int batch_size, int workers,
                        int index, ushort lane) {
  Worker worker;
  worker.index = index;
  if (!fc_has_seq_lens || batch_size == 1) {
    // All sequences have one length: no search is needed.
    const CutSequence sequence = cut_sequence(seq_lens, span, 0);
    const int units = sequence.units_of_runs(span);
    const int chunk = units_of(sequence.chunks.keys, span);
    const int begin = take_run(worker, units * batch_size, workers);
    worker.known.set(sequence);
    worker.dealt = sequence.is_dealt() ? 0 : batch_size;
    worker.batch = begin / max(units, 1);
    worker.part = ceil_div(begin - worker.batch * units, chunk);
    worker.left -= worker.batch * units + worker.part * chunk - begin;
    return worker;
  }

  // The lanes examine 32 sequences at a time.
  CutSequence sequence;
  int total = 0;
  worker.dealt = batch_size;
  for (int first = 0; first < batch_size; first += kSimdWidth) {
    const int batch = first + int(lane);
    sequence = cut_sequence(seq_lens, span, min(batch, batch_size - 1));
    total += simd_sum(batch < batch_size ? sequence.units_of_runs(span) : 0);
    worker.dealt = min(worker.dealt, simd_min(sequence.is_dealt() ? batch : batch_size));
  }
  const int begin = take_run(worker, total, workers);
  worker.batch = batch_size;
  worker.part = 0;
  worker.known.length = 0;
  worker.known.keys = 0;
  worker.known.count = 0;
  int before = 0;
  for (int first = 0; first < batch_size && worker.batch == batch_size; first += kSimdWidth) {
    const int batch = first + int(lane);
    if (batch_size > kSimdWidth) {
      sequence = cut_sequence(seq_lens, span, min(batch, batch_size - 1));
    }
    const int units = batch < batch_size ? sequence.units_of_runs(span) : 0;
    const int through = before + simd_prefix_inclusive_sum(units);
    const int passed = simd_sum(int(through <= begin));  // sequences that end before the run begins
    if (passed < kSimdWidth) {
      const int chunk = units_of(sequence.chunks.keys, span);
      const int skipped = begin - (through - units);
      const int part = ceil_div(skipped, chunk);
      worker.batch = first + passed;
      worker.part = simd_shuffle(part, ushort(passed));
      worker.left -= simd_shuffle(part * chunk - skipped, ushort(passed));
    }
    before = simd_shuffle(through, ushort(kSimdWidth - 1));
  }
  return worker;
}

// Cuts sequence `batch` unless it is known and kKeeps is set.
template <bool kKeeps>
inline void look_up(thread KnownSequence& known, const device int* seq_lens, constant CausalSpan& span,
                    int batch) {
  if (!kKeeps || known.count == 0) {
    const CutSequence sequence = cut_sequence(seq_lens, span, batch);
    known.set(sequence);
  }
}

struct ChunkIndex {
  int batch;  // of the worker; -1: no chunk is left
  int part;
};

// Takes the next chunk of a worker. A single exit and selects save registers: a return inside the loops takes
// 40 half registers more, also during the steps. Branches take 10 more, and decode_wide with a window then
// runs 256 threads instead of 512 (float16, D = 256; Mesa's count for M1 and M2). kKeeps: the worker keeps
// its cut sequence, in registers or saved.
template <bool kKeeps>
inline ChunkIndex take_chunk(thread Worker& worker, const device int* seq_lens, constant CausalSpan& span,
                             int batch_size, int workers, ushort lane) {
  ChunkIndex taken;
  taken.batch = -1;
  taken.part = 0;
  while (taken.batch < 0 && !worker.dealing() && worker.left > 0 && worker.batch < batch_size) {
    look_up<kKeeps>(worker.known, seq_lens, span, worker.batch);
    const bool found = !worker.known.is_dealt() && worker.part < worker.known.count;
    taken.batch = found ? worker.batch : -1;
    taken.part = worker.part;
    worker.left -= found ? units_of(worker.known.keys, span) : 0;
    worker.part = found ? worker.part + 1 : 0;
    if (!found) {
      worker.batch++;
      worker.known.forget();
    }
  }
  if (taken.batch < 0 && !worker.dealing()) {
    worker.batch = worker.dealt;
    worker.part = worker.index;
    worker.dealt = -1;
    worker.known.forget();
  }
  while (taken.batch < 0 && worker.batch < batch_size) {
    look_up<kKeeps>(worker.known, seq_lens, span, worker.batch);
    if (worker.part < worker.known.count) {
      taken.batch = worker.batch;
      taken.part = worker.part;
      worker.part += workers;
    } else {
      worker.part -= worker.known.count;
      worker.known.forget();
      worker.batch = next_dealt(seq_lens, span, batch_size, worker.batch + 1, lane);
    }
  }
  return taken;
}

}  // namespace fattn
