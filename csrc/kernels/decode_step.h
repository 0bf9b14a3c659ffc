// One step of decode: a few keys and values, from the cache through registers into the online state.
#pragma once

#include "decode_rows.h"
#include "query.h"
#include "scales.h"

namespace fattn {

// The scales of a step, by the lane that looks after each key: where all lanes of this simdgroup find them.
inline void share_scales(thread const SharedScales& scales, ushort lane, float key_scale, float value_scale) {
  simdgroup_barrier(mem_flags::mem_threadgroup);  // those of the step before have been read
  if (lane < kTileKeys) {
    scales.put_key(lane, key_scale);
    scales.put_value(lane, value_scale);
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
}

// Adds the products of chunk c of key fragment k. Bit e of `present` says that this lane's row e is there.
// Quantised chunks become operands piece by piece; those that are operands already need no such detour,
// which costs registers.
template <bool kEdge>
inline void take_keys(thread OnlineAttention& attention, thread const SharedQuery& query,
                      thread const StoredRow (&rows)[2], int c, int k, uint present, LanePosition at) {
  if (kKvFormat == kKvFloat) {
    Operand keys[2][kKeyChunk];
#pragma clang loop unroll(full)
    for (int e = 0; e < 2; e++) {
      if (!kEdge || (present >> e) & 1) {
        read_key_chunk(rows[e].floats(), c, fc_vector_loads, at, keys[e]);
      } else {
        fill_run(keys[e], 0.0f);
      }
    }
    attention.multiply_key_fragment(query, c * kKeyChunk, k, keys[0], keys[1]);
    return;
  }
  KeyChunk chunks[2];
#pragma clang loop unroll(full)
  for (int e = 0; e < 2; e++) {
    if (!kEdge || (present >> e) & 1) {
      chunks[e].read(rows[e], at.row * kKeyChunk, c * 8 * kKeyChunk, fc_vector_loads);
    } else {
      chunks[e].clear();
    }
  }
  constexpr int kPiece = KeyChunk::kPieceElements;
#pragma clang loop unroll(full)
  for (int piece = 0; piece < kKeyChunk / kPiece; piece++) {
    Operand keys[2][kPiece];
    chunks[0].unpack(piece, keys[0]);
    chunks[1].unpack(piece, keys[1]);
    attention.multiply_key_fragment(query, c * kKeyChunk + piece * kPiece, k, keys[0], keys[1]);
  }
}

// Adds the weighted values of key fragment k; `row` is that of this lane's key, if it is present.
template <bool kEdge>
inline void take_values(thread OnlineAttention& attention, thread const StoredRow& row, int k, bool present,
                        LanePosition at) {
  constexpr bool kTests = kEdge && kSpecialElements;
  if (kKvFormat == kKvFloat) {
    Operand run[kValueDim / 4];
    if (!kEdge || present) {
      read_value(row.floats(), fc_vector_loads, at, run);
    } else {
      fill_run(run, 0.0f);
    }
    if (kTests && !fc_one_row && simd_any(isnan(special_values(run, 0.0f)))) {
      attention.multiply_special_values(k, run, at);
    } else {
      attention.multiply_values(k, run);
    }
    return;
  }
  ValueChunk chunks[kValueChunks];
#pragma clang loop unroll(full)
  for (int c = 0; c < kValueChunks; c++) {
    if (!kEdge || present) {
      chunks[c].read(row, at.pair * kValueChunk, c * 4 * kValueChunk, fc_vector_loads);
    } else {
      chunks[c].clear();
    }
  }
  constexpr int kPiece = ValueChunk::kPieceElements;
  constexpr int kPieces = kValueDim / 4 / kPiece;
  constexpr int kChunkPieces = kPieces / kValueChunks;
  if (kTests && !fc_one_row) {
    float special = 0.0f;
    Operand run[kValueDim / 4];
#pragma clang loop unroll(full)
    for (int p = 0; p < kPieces; p++) {
      Operand piece[kPiece];
      chunks[p / kChunkPieces].unpack(p % kChunkPieces, piece);
      special = special_values(piece, special);
#pragma clang loop unroll(full)
      for (int i = 0; i < kPiece; i++) {
        run[p * kPiece + i] = piece[i];
      }
    }
    if (simd_any(isnan(special))) {
      attention.multiply_special_values(k, run, at);
      return;
    }
  }
#pragma clang loop unroll(full)
  for (int p = 0; p < kPieces; p++) {
    Operand piece[kPiece];
    chunks[p / kChunkPieces].unpack(p % kChunkPieces, piece);
    attention.multiply_values(k, piece, p * kPiece / 2);
  }
}

// One step of kTileKeys keys. kEdge: some key may not exist or not be visible to some row.
template <bool kEdge>
inline void decode_step(thread OnlineAttention& attention, thread const SharedQuery& query,
                        thread const Sequence& sequence, thread const SharedScales& scales,
                        thread const StepBlocks& blocks, constant DecodeParams& params, int first_key,
                        ushort lane, LanePosition at) {
  if (kRowScales && fc_scales) {
    const int own_key = lane % kTileKeys;  // that this lane looks after
    const KeyPlace place = blocks.find_any(sequence.table, first_key, own_key);
    const bool read = !kEdge || (place.exists && sequence.ranges.hold(first_key + own_key));
    share_scales(scales, lane, read ? float(*sequence.key.scales_at(place, params.key_scales)) : 1.0f,
                 read ? float(*sequence.value.scales_at(place, params.value_scales)) : 1.0f);
  }
  uint present = 0;
  attention.clear_scores();
#pragma clang loop unroll(full)
  for (int k = 0; k < kKeyFragments; k++) {
    StoredRow rows[2];
#pragma clang loop unroll(full)
    for (int e = 0; e < 2; e++) {
      const int key = first_key + k * 8 + at.pair * 2 + e;
      const KeyPlace place = blocks.find(sequence.table, key, k);
      const bool read = place.exists && sequence.ranges.hold(key);
      rows[e] = sequence.key.row_at(place, params.key, params.key_scales);
      present |= uint(read) << (2 * k + e);
    }
#pragma clang loop unroll(full)
    for (int c = 0; c < kKeyChunks; c++) {
      take_keys<kEdge>(attention, query, rows, c, k, present >> (2 * k), at);
    }
  }
  scale_products(attention, scales, at);
  modify_scores(attention, sequence.modifiers, first_key, at);
  if (kEdge) {
    hide_scores(attention, sequence.visible, sequence.mask, first_key, present, at);
  }
  attention.weigh();
#pragma clang loop unroll(full)
  for (int k = 0; k < kKeyFragments; k++) {
    const int key = first_key + k * 8 + at.row;
    const KeyPlace place = blocks.find(sequence.table, key, k);
    const bool read = place.exists && sequence.ranges.hold(key);
    const StoredRow row = sequence.value.row_at(place, params.value, params.value_scales);
    scale_weights<kEdge>(attention, scales, k, at);
    take_values<kEdge>(attention, row, k, read, at);
  }
}

}  // namespace fattn
