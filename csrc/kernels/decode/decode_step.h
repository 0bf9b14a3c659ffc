// One step of decode: reads a few keys and values through registers and updates the online softmax.
#pragma once

#include "decode_state.h"
#include "../common/query.h"
#include "../common/scales.h"

namespace fattn {

// Shares the scales of a step with all lanes of the simdgroup; each lane passes the scales of its key.
inline void put_scales(thread const SharedScales& scales, ushort lane, float key_scale, float value_scale) {
  simdgroup_barrier(mem_flags::mem_threadgroup);  // the previous scales have been read
  if (lane < kTileKeys) {
    scales.put_key(lane, key_scale);
    scales.put_value(lane, value_scale);
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
}

// Finds the two rows of K of which this lane reads a part for key fragment k. Bit e of the result: row e
// exists.
template <bool kWhole>
inline uint key_rows(thread const Sequence& sequence, thread const StepKeys& step,
                     constant DecodeParams& params, int k, LanePosition at, thread StoredRow (&rows)[2]) {
  uint present = 0;
  FATTN_UNROLL
  for (int e = 0; e < 2; e++) {
    const KeyPlace place = step.find(sequence.table, k, at.pair * 2 + e);
    present |= uint(kWhole || place.exists) << e;
    rows[e] = sequence.key.row_at(place, params.key, params.key_scales);
  }
  return present;
}

// Finds the row of V of which this lane reads a part, and returns whether it exists.
template <bool kWhole>
inline bool value_row(thread const Sequence& sequence, thread const StepKeys& step,
                      constant DecodeParams& params, int k, LanePosition at, thread StoredRow& row) {
  const KeyPlace place = step.find(sequence.table, k, at.row);
  row = sequence.value.row_at(place, params.value, params.value_scales);
  return kWhole || place.exists;
}

// A lane's part of a step over a quantised cache. It has a half or a quarter of the bytes of other caches, so
// all of it is loaded before use, to keep as many bytes in flight.
struct QuantisedStep {
  KeyChunk keys[kKeyFragments][kKeyChunks][2];
  ValueChunk values[kKeyFragments][kValueChunks];
  float key_scale;  // of this lane's key, if any
  float value_scale;

  // Bits 2k + e of the result: row e of key fragment k exists.
  template <bool kWhole>
  uint read(thread const Sequence& sequence, thread const StepKeys& step, constant DecodeParams& params,
            ushort lane, LanePosition at) thread {
    if (kRowScales && fc_scales) {
      const KeyPlace place = step.find_own(sequence.table, lane);
      const bool read = lane < kTileKeys && (kWhole || place.exists);
      key_scale = sequence.key.row_scale(place, params.key_scales, read);
      value_scale = sequence.value.row_scale(place, params.value_scales, read);
    }
    uint present = 0;
    FATTN_UNROLL
    for (int k = 0; k < kKeyFragments; k++) {
      StoredRow rows[2];
      const uint both = key_rows<kWhole>(sequence, step, params, k, at, rows);
      present |= both << (2 * k);
      FATTN_UNROLL
      for (int c = 0; c < kKeyChunks; c++) {
        FATTN_UNROLL
        for (int e = 0; e < 2; e++) {
          if (kWhole || (both >> e) & 1) {
            keys[k][c][e].read(rows[e], at.row * kKeyChunk, c * 8 * kKeyChunk, fc_vector_loads);
          } else {
            keys[k][c][e].clear();
          }
        }
      }
    }
    FATTN_UNROLL
    for (int k = 0; k < kKeyFragments; k++) {
      StoredRow row;
      const bool there = value_row<kWhole>(sequence, step, params, k, at, row);
      FATTN_UNROLL
      for (int c = 0; c < kValueChunks; c++) {
        if (kWhole || there) {
          values[k][c].read(row, at.pair * kValueChunk, c * 4 * kValueChunk, fc_vector_loads);
        } else {
          values[k][c].clear();
        }
      }
    }
    return present;
  }

  // Decodes elements in pieces to save registers.
  void multiply_keys(thread OnlineAttention& attention, thread const SharedQuery& query, int k) const thread {
    constexpr int kPiece = KeyChunk::kPieceElements;
    FATTN_UNROLL
    for (int c = 0; c < kKeyChunks; c++) {
      FATTN_UNROLL
      for (int piece = 0; piece < kKeyChunk / kPiece; piece++) {
        Operand pieces[2][kPiece];
        keys[k][c][0].unpack(piece, pieces[0]);
        keys[k][c][1].unpack(piece, pieces[1]);
        attention.multiply_key_fragment(query, c * kKeyChunk + piece * kPiece, k, pieces[0], pieces[1]);
      }
    }
  }

  template <bool kWhole>
  void multiply_values(thread OnlineAttention& attention, int k, bool seen) thread {
    constexpr int kPiece = ValueChunk::kPieceElements;
    constexpr int kPieces = kValueDim / 4 / kPiece;
    constexpr int kChunkPieces = kPieces / kValueChunks;
    if (!kWhole && !seen) {
      FATTN_UNROLL
      for (int c = 0; c < kValueChunks; c++) {
        values[k][c].clear();
      }
    }
    FATTN_UNROLL
    for (int p = 0; p < kPieces; p++) {
      Operand piece[kPiece];
      values[k][p / kChunkPieces].unpack(p % kChunkPieces, piece);
      attention.multiply_values(k, piece, p * kPiece / 2);
    }
  }
};

// Adds the products with key fragment k of a cache that is not quantised. Keys that may not exist are widened
// by the load, which takes registers, so they are read half a chunk at a time.
template <bool kWhole>
inline void multiply_keys(thread OnlineAttention& attention, thread const SharedQuery& query,
                          thread const StoredRow (&rows)[2], int k, uint present, LanePosition at) {
  constexpr int kPiece =
      !kWhole && sizeof(Element) < sizeof(Operand) && kKeyChunk > 1 ? kKeyChunk / 2 : kKeyChunk;
  FATTN_UNROLL
  for (int i = 0; i < kHeadDim / 8; i += kPiece) {
    Operand keys[2][kPiece];
    FATTN_UNROLL
    for (int e = 0; e < 2; e++) {
      if (kWhole || (present >> e) & 1) {
        read_key(rows[e].floats(), i, fc_vector_loads, at, keys[e]);
      } else {
        fill_run(keys[e], 0.0f);
      }
    }
    attention.multiply_key_fragment(query, i, k, keys[0], keys[1]);
  }
}

// Adds the weighted values of key fragment k of a cache that is not quantised: elements kFrom to kTo of this
// lane's run.
template <bool kWhole, int kFrom, int kTo>
inline void multiply_value_run(thread OnlineAttention& attention, thread const StoredRow& row, int k,
                               bool present, LanePosition at) {
  Operand run[kTo - kFrom];
  if (kWhole || present) {
    read_value(row.floats() + 4 * kFrom, fc_vector_loads, at, run);
  } else {
    fill_run(run, 0.0f);
  }
  attention.multiply_values(k, run, kFrom / 2);
}

// Takes a run of more than 64 bytes of operands in two parts of whole chunks, to save registers.
template <bool kWhole>
inline void multiply_values(thread OnlineAttention& attention, thread const StoredRow& row, int k,
                            bool present, LanePosition at) {
  constexpr int kRun = kValueDim / 4;
  constexpr int kParts = kRun * sizeof(Operand) > 64 ? 2 : 1;
  constexpr int kFirst = (kValueChunks + kParts - 1) / kParts * kValueChunk;
  multiply_value_run<kWhole, 0, kFirst>(attention, row, k, present, at);
  if (kFirst < kRun) {
    constexpr int kSecond = kFirst < kRun ? kFirst : 0;  // in range even without a second part
    multiply_value_run<kWhole, kSecond, kRun>(attention, row, k, present, at);
  }
}

// One step of kTileKeys keys. !kWhole: some key may not exist, or some row may not see it.
template <bool kWhole>
inline void decode_step(thread OnlineAttention& attention, thread const SharedQuery& query,
                        thread Sequence& sequence, thread const SharedScales& scales,
                        thread const StepKeys& step, thread const DecodeState& state,
                        constant DecodeParams& params, ushort lane, LanePosition at) {
  QuantisedStep stored;
  uint present = 0;
  state.take_key_start(sequence);
  if (kKvFormat != kKvFloat) {
    state.take_value_start(sequence);
    state.take_head(sequence);
    present = stored.read<kWhole>(sequence, step, params, lane, at);
  }
  if (kRowScales && fc_scales) {
    put_scales(scales, lane, stored.key_scale, stored.value_scale);
  }
  attention.clear_scores();
  FATTN_UNROLL
  for (int k = 0; k < kKeyFragments; k++) {
    if (kKvFormat == kKvFloat) {
      StoredRow rows[2];
      const uint both = key_rows<kWhole>(sequence, step, params, k, at, rows);
      present |= both << (2 * k);
      multiply_keys<kWhole>(attention, query, rows, k, both, at);
    } else {
      stored.multiply_keys(attention, query, k);
    }
  }
  scale_products(attention, scales, at);
  const ScoreModifiers modifiers = state.modifiers(sequence, params, at);
  modify_scores(attention, modifiers, step.first_key, at);
  if (!kWhole) {
    const Visibility visible = state.visible(params, at);
    hide_scores(attention, visible, sequence.mask, step.first_key, present, at);
  }
  const SeenKeys seen = kWhole ? all_seen() : attention.seen_keys(at);
  attention.to_weights();
  if (kKvFormat == kKvFloat) {
    state.take_value_start(sequence);
  }
  FATTN_UNROLL
  for (int k = 0; k < kKeyFragments; k++) {
    scale_weights(attention, scales, k, seen, at);
    if (kKvFormat == kKvFloat) {
      StoredRow row;
      const bool there = value_row<kWhole>(sequence, step, params, k, at, row);
      multiply_values<kWhole>(attention, row, k, there && seen.value(k), at);
    } else {
      stored.multiply_values<kWhole>(attention, k, seen.value(k));
    }
  }
}

}  // namespace fattn
