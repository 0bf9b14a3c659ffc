// The columns of a head that a simdgroup multiplies, and the orders in which it reads them (tile.h).
//
// kColumnShares simdgroups divide the columns of the same owned rows. The last share may extend past the
// head, where staged and owned rows are padded with zeros and results are not stored.
#pragma once

#include "../common/columns.h"
#include "../common/results.h"

namespace fattn {

// Elements that a lane reads at a time. Eight would take 10 to 28 half registers more (Mesa's count for M1
// and M2).
FATTN_CONSTEXPR int kMaxChunk = 4;

template <int kDim>
struct HeadShare {
  static constant constexpr int kFragments = (kDim / 8 + kColumnShares - 1) / kColumnShares;
  static constant constexpr int kColumns = 8 * kFragments;
  static constant constexpr bool kEven = kColumns * kColumnShares == kDim;
  // The product over the head takes a row in chunks of kChunk fragments.
  static constant constexpr int kChunk = chunk_of(kFragments, kMaxChunk);
  static constant constexpr int kChunks = kFragments / kChunk;
  // For the other products and the results, a lane has two elements per fragment.
  static constant constexpr int kRun = 2 * kFragments;
  static constant constexpr int kRunChunk = chunk_of(kRun, kTileChunk);

  // The column of element i of a lane's run, counted from the first of the share.
  static int column_of(int i, ushort pair) { return (i / kRunChunk * 4 + pair) * kRunChunk + i % kRunChunk; }
  // Whether a column of the head exists.
  static bool has(int column) { return kEven || column < kDim; }
};

typedef HeadShare<kHeadDim> KeyShare;
typedef HeadShare<kValueDim> ValueShare;

// The owned rows of a simdgroup: its columns of kCount fragments of eight rows, as left factors.
template <int kDim, int kCount>
struct OwnedRows {
  typedef HeadShare<kDim> Share;

  OperandFragment fragments[kCount][Share::kFragments];

  OwnedRows() thread {}

  // `row`: this lane's row of fragment r, or null.
  void load(int r, const device Element* row, ushort share, LanePosition at) thread {
    FATTN_UNROLL
    for (int c = 0; c < Share::kChunks; c++) {
      const int column = share * Share::kColumns + (8 * c + 2 * at.pair) * Share::kChunk;
      Operand run[2 * Share::kChunk];
      if (row && Share::has(column)) {
        read_chunks<2 * Share::kChunk>(row + column, 0, 0, fc_vector_loads, run);
      } else {
        fill_run(run, 0.0f);
      }
      FATTN_UNROLL
      for (int i = 0; i < Share::kChunk; i++) {
        set_elements(fragments[r][c * Share::kChunk + i], run[i], run[Share::kChunk + i]);
      }
    }
  }

  // Adds the products of chunk c with eight staged rows: element (i, j) of a sum belongs to owned row i and
  // staged row j. `rows`: the first staged row, at the first column of the share.
  void multiply(const threadgroup TileElement* rows, int pitch, int c, LanePosition at,
                thread simdgroup_float8x8 (&products)[kCount]) const thread {
    const threadgroup TileElement* from = rows + (2 * at.pair * pitch + (8 * c + at.row) * Share::kChunk);
    Operand first[Share::kChunk];
    Operand second[Share::kChunk];
    read_chunks<Share::kChunk>(from, 0, 0, true, first);
    read_chunks<Share::kChunk>(from + pitch, 0, 0, true, second);
    simdgroup_float8x8 sums[kCount];
    FATTN_UNROLL
    for (int r = 0; r < kCount; r++) {
      begin_sum(sums[r], products[r]);
    }
    FATTN_UNROLL
    for (int i = 0; i < Share::kChunk; i++) {
      OperandFragment right;
      set_elements(right, first[i], second[i]);
      FATTN_UNROLL
      for (int r = 0; r < kCount; r++) {
        simdgroup_multiply_accumulate(sums[r], fragments[r][c * Share::kChunk + i], right, sums[r]);
      }
    }
    FATTN_UNROLL
    for (int r = 0; r < kCount; r++) {
      end_sum(sums[r], products[r]);
    }
  }
};

// Elements of a staged row per load.
template <int kDim>
struct RunOfShare {
  static constant constexpr int kElements = chunk_of(HeadShare<kDim>::kRun, 16);
};

// Adds the products of blocks of scores with this lane's staged row, at the first column of the share.
template <int kDim, int kCount>
inline void accumulate(thread simdgroup_float8x8 (&sums)[kCount][HeadShare<kDim>::kFragments],
                       thread const simdgroup_float8x8 (&blocks)[kCount], const threadgroup TileElement* row,
                       LanePosition at) {
  typedef HeadShare<kDim> Share;
  constexpr int kElements = RunOfShare<kDim>::kElements;
  FATTN_UNROLL
  for (int i = 0; i < Share::kRun; i += kElements) {
    Operand run[kElements];
    read_chunks<Share::kRunChunk>(row + at.pair * Share::kRunChunk, 4 * i, 4 * Share::kRunChunk, true, run);
    FATTN_UNROLL
    for (int f = 0; f < kElements / 2; f++) {
      OperandFragment right;
      set_elements(right, run[2 * f], run[2 * f + 1]);
      FATTN_UNROLL
      for (int r = 0; r < kCount; r++) {
        simdgroup_multiply_accumulate(sums[r][i / 2 + f], blocks[r], right, sums[r][i / 2 + f]);
      }
    }
  }
}

template <int kCount, int kFragments>
inline void clear_sums(thread simdgroup_float8x8 (&sums)[kCount][kFragments]) {
  FATTN_UNROLL
  for (int r = 0; r < kCount; r++) {
    FATTN_UNROLL
    for (int f = 0; f < kFragments; f++) {
      set_elements(sums[r][f], 0.0f, 0.0f);
    }
  }
}

// Stores this lane's part of row r; `row` points to its first column.
template <int kDim, int kCount>
inline void store_gradient(thread const simdgroup_float8x8 (&sums)[kCount][HeadShare<kDim>::kFragments],
                           int r, device Element* row, float scale, ushort share, LanePosition at) {
  typedef HeadShare<kDim> Share;
  FATTN_UNROLL
  for (int i = 0; i < Share::kRun; i++) {
    const int column = share * Share::kColumns + Share::column_of(i, at.pair);
    if (Share::has(column)) {
      row[column] = Element(scaled_result(sums[r][i / 2].thread_elements()[i & 1], scale));
    }
  }
}

// Zeroes the columns past the head in staged rows, once: staging does not write them.
template <int kDim>
inline void clear_padding(threadgroup TileElement* tile, int pitch, int rows, ushort thread_index) {
  constexpr int kPadding = HeadShare<kDim>::kColumns * kColumnShares - kDim;
  for (int i = thread_index; i < rows * kPadding; i += kThreads) {
    tile[i / at_least_one(kPadding) * pitch + kDim + i % at_least_one(kPadding)] = TileElement(0.0f);
  }
}

}  // namespace fattn
