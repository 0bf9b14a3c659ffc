// The keys and queries of a chunk as operands of gated_delta_scan: KeyRows reads them where they are,
// StagedKeys from threadgroup memory, with the decays of each channel.
#pragma once

#include "../common/fragment.h"
#include "chunk.h"
#include "gates.h"
#include "sequences.h"

namespace fattn {

FATTN_CONSTEXPR int kRuns = kHeadDim / kFragment;  // fragments of a state's column
// Fragments that are read at a time.
FATTN_CONSTEXPR int kRun = kRuns % 4 == 0 ? 4 : kRuns % 2 == 0 ? 2 : 1;

// What a threadgroup reads of a chunk, from its first token on. Rows beyond the end repeat the last token:
// their columns of scores and their rows of delta are 0.
struct ChunkInputs {
  const device Element* query;
  const device Element* key;
  const device Decay* decay;     // used only if each channel has one
  const device ALog* a_log;      // of the head
  const device DtBias* dt_bias;  // of its channels
  const device float* chunk;     // of the first pass
  int last;                      // row

  int query_at(int row, constant GatedDeltaParams& params) const thread {
    return min(row, last) * int(params.query.token);
  }
  int key_at(int row, constant GatedDeltaParams& params) const thread {
    return min(row, last) * int(params.key.token);
  }
};

// A lane's elements of kRun fragments.
struct RunPair {
  float first[kRun];
  float second[kRun];
};

inline void read_run(const device Element* from, thread float (&run)[kRun]) {
  if (kRun == 4 && fc_vector_loads) {
    const vec<Element, 4> four = *reinterpret_cast<const device vec<Element, 4>*>(from);
    FATTN_UNROLL
    for (int u = 0; u < kRun; u++) {
      run[u] = float(four[u]);
    }
  } else {
    FATTN_UNROLL
    for (int u = 0; u < kRun; u++) {
      run[u] = float(from[u]);
    }
  }
}

// Norms and decays are factors of the rows of products, so the keys are operands as they are. A product may
// sum over the channels in any order: column c of fragment f is channel c kRuns + f, and a lane reads runs of
// channels, also of transposed keys.
struct KeyRows {
  const device Element* query;
  const device Element* key;
  int query_offset;  // of the lane's row and first column
  int key_offset;    // likewise
  int2 update;       // of the tokens of its columns, and the channel of its row
  float decay;

  static int state_row(int f, LanePosition at) { return at.row * kRuns + f; }

  void begin(thread const ChunkInputs& inputs, constant GatedDeltaParams& params, threadgroup float*,
             LanePosition at, ushort) thread {
    const int column = 2 * at.pair;
    query = inputs.query;
    key = inputs.key;
    query_offset = inputs.query_at(at.row, params) + column * kRuns;
    key_offset = inputs.key_at(at.row, params) + column * kRuns;
    update = int2(inputs.key_at(column, params), inputs.key_at(column + 1, params)) + at.row * kRuns;
    decay = inputs.chunk[kDecayAt];
  }
  // Keys and queries [tokens, channels], from fragment f on.
  void read(int f, thread RunPair& of_key, thread RunPair& of_query) const thread {
    read_run(key + (key_offset + f), of_key.first);
    read_run(key + (key_offset + kRuns + f), of_key.second);
    read_run(query + (query_offset + f), of_query.first);
    read_run(query + (query_offset + kRuns + f), of_query.second);
  }
  // Keys [channels, tokens], and the decays of the state's rows.
  void read_update(int f, thread RunPair& of_key, thread float (&decays)[kRun]) const thread {
    read_run(key + (update.x + f), of_key.first);
    read_run(key + (update.y + f), of_key.second);
    FATTN_UNROLL
    for (int u = 0; u < kRun; u++) {
      decays[u] = decay;
    }
  }
};

// With a decay per channel: the threads of a threadgroup multiply keys and queries by the decays of their
// channels, and keep the fragments in threadgroup memory, one after another.
FATTN_CONSTEXPR int kStagedQueries = kDeltaChunk * kHeadDim;
FATTN_CONSTEXPR int kStagedUpdates = 2 * kStagedQueries;
FATTN_CONSTEXPR int kStagedDecays = 3 * kStagedQueries;
FATTN_CONSTEXPR int kStagedFloats = kChannelDecay ? kStagedDecays + kHeadDim : 1;

struct StagedKeys {
  threadgroup const float* fragments;  // from the lane's elements on
  threadgroup const float* decays;     // from the lane's row on

  static int state_row(int f, LanePosition at) { return f * kFragment + at.row; }

  void begin(thread const ChunkInputs& inputs, constant GatedDeltaParams& params, threadgroup float* staged,
             LanePosition at, ushort thread_index) thread {
    threadgroup_barrier(mem_flags::mem_threadgroup);  // the last chunk has been read
    for (int channel = thread_index; channel < kHeadDim; channel += kThreads) {
      stage(inputs, params, staged, channel);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    fragments = staged + at.row * kFragment + 2 * at.pair;
    decays = staged + kStagedDecays + at.row;
  }

  void read(int f, thread RunPair& of_key, thread RunPair& of_query) const thread {
    read_fragments(fragments + f * 64, of_key);
    read_fragments(fragments + kStagedQueries + f * 64, of_query);
  }
  void read_update(int f, thread RunPair& of_key, thread float (&of_rows)[kRun]) const thread {
    read_fragments(fragments + kStagedUpdates + f * 64, of_key);
    FATTN_UNROLL
    for (int u = 0; u < kRun; u++) {
      of_rows[u] = decays[(f + u) * kFragment];
    }
  }

 private:
  static void read_fragments(threadgroup const float* from, thread RunPair& pair) {
    FATTN_UNROLL
    for (int u = 0; u < kRun; u++) {
      pair.first[u] = from[u * 64];
      pair.second[u] = from[u * 64 + 1];
    }
  }

  // Column c of fragment f is channel 8 f + c.
  static void stage(thread const ChunkInputs& inputs, constant GatedDeltaParams& params,
                    threadgroup float* staged, int channel) {
    float keys[kDeltaChunk], decay[kDeltaChunk];
    const int of_fragment = channel / kFragment * 64, column = channel % kFragment;
    float from_start = 1.0f;
    FATTN_UNROLL
    for (int i = 0; i < kDeltaChunk; i++) {
      const float raw = float(inputs.decay[min(i, inputs.last) * int(params.decay.token) + channel]);
      decay[i] = i <= inputs.last ? decay_of(raw, inputs.a_log, inputs.dt_bias, 0, channel) : 1.0f;
      from_start *= decay[i];
      keys[i] = float(inputs.key[inputs.key_at(i, params) + channel]);
      const float query = float(inputs.query[inputs.query_at(i, params) + channel]);
      const int at = of_fragment + i * kFragment + column;
      staged[at] = keys[i] * (from_start * inputs.chunk[kKeyAt + i]);
      staged[kStagedQueries + at] = query * (from_start * inputs.chunk[kQueryAt + i]);
    }
    staged[kStagedDecays + channel] = from_start;
    float to_end = 1.0f;
    FATTN_UNROLL
    for (int i = kDeltaChunk - 1; i >= 0; i--) {
      staged[kStagedUpdates + of_fragment + column * kFragment + i] =
          keys[i] * (to_end * inputs.chunk[kUpdateAt + i]);
      to_end *= decay[i];
    }
  }
};

}  // namespace fattn
