// Divides the columns of a head among simdgroups that share rows: the columns that a lane holds, and how it
// reads them from a row of the cache.
#pragma once

#include "tile.h"

namespace fattn {

// Divides columns [kFrom, kTo) of a head into kShares shares with equally many fragments of eight columns. As
// many fragments as possible are read in 16-byte chunks, the rest in narrower ones. The last shares may
// extend past kTo.
template <int kFrom, int kTo, int kShares = kColumnShares>
struct ColumnShare {
  static constant constexpr int kColumns = kTo - kFrom;
  // Elements per chunk, at most 16 bytes. It divides kFrom and kTo, so the chunks of an aligned row are
  // aligned.
  static constant constexpr int kMax = chunk_of(kFrom, chunk_of(kTo, 4 * kStoredWordElements));
  static constant constexpr int kWideFragments = kMax / 2;  // one chunk in each of the four lanes of a row
  // Elements per lane, two for each fragment: in the widest chunks, in narrower ones, and in total.
  static constant constexpr int kWide = kColumns / 8 / (kShares * kWideFragments) * kWideFragments * 2;
  static constant constexpr int kNarrow = (kColumns / 8 - kShares * kWide / 2 + kShares - 1) / kShares * 2;
  static constant constexpr int kAll = kWide + kNarrow;
  static constant constexpr int kFragments = kAll / 2;
  static constant constexpr int kNarrowChunk = chunk_of(kNarrow, kMax);
  static constant constexpr bool kEven = 4 * kShares * kAll == kColumns;

  // The column of element i of a lane's run; -1 past the end.
  static int column_of(int i, ushort pair, ushort share) {
    if (i < kWide) {
      return kFrom + share * 4 * kWide + (i / kMax * 4 + pair) * kMax + i % kMax;
    }
    const int n = i - kWide;
    const int column = kFrom + kShares * 4 * kWide + share * 4 * kNarrow +
                       (n / kNarrowChunk * 4 + pair) * kNarrowChunk + n % kNarrowChunk;
    return kEven || column < kTo ? column : -1;
  }
};

// A valid length for an array that may be empty.
constexpr int at_least_one(int n) { return n > 0 ? n : 1; }

// This lane's part of a row of K or V, as operands; zeros past the end.
template <int kFrom, int kTo>
struct FloatRun {
  typedef ColumnShare<kFrom, kTo> Columns;
  static constant constexpr int kElements = at_least_one(Columns::kAll);

  Operand elements[kElements];

  void clear() thread { fill_run(elements, 0.0f); }
  void read(thread const StoredRow& row, ushort simdgroup, LanePosition at) thread {
    FATTN_UNROLL
    for (int i = 0; i < Columns::kWide; i += Columns::kMax) {
      read_elements<Columns::kMax>(row.floats() + Columns::column_of(i, at.pair, simdgroup), fc_vector_loads,
                                   elements, i);
    }
    FATTN_UNROLL
    for (int i = Columns::kWide; i < Columns::kAll; i += Columns::kNarrowChunk) {
      const int column = Columns::column_of(i, at.pair, simdgroup);
      if (column >= 0) {
        read_elements<Columns::kNarrowChunk>(row.floats() + column, fc_vector_loads, elements, i);
      } else {
        FATTN_UNROLL
        for (int e = 0; e < Columns::kNarrowChunk; e++) {
          elements[i + e] = Operand(0.0f);
        }
      }
    }
  }
  void unpack(thread Operand (&run)[kElements]) const thread {
    FATTN_UNROLL
    for (int i = 0; i < Columns::kAll; i++) {
      run[i] = elements[i];
    }
  }
};

// The same part of a quantised row, in the stored format, which takes fewer registers than operands.
template <int kFrom, int kTo>
struct StoredRun {
  typedef ColumnShare<kFrom, kTo> Columns;
  static constant constexpr int kElements = at_least_one(Columns::kAll);
  static constant constexpr int kWideChunks = Columns::kWide / Columns::kMax;
  static constant constexpr int kNarrowChunks = Columns::kNarrow / Columns::kNarrowChunk;

  StoredChunk<Columns::kMax> wide[at_least_one(kWideChunks)];
  StoredChunk<Columns::kNarrowChunk> narrow[at_least_one(kNarrowChunks)];

  void clear() thread {
    FATTN_UNROLL
    for (int c = 0; c < kWideChunks; c++) {
      wide[c].clear();
    }
    FATTN_UNROLL
    for (int c = 0; c < kNarrowChunks; c++) {
      narrow[c].clear();
    }
  }
  void read(thread const StoredRow& row, ushort simdgroup, LanePosition at) thread {
    FATTN_UNROLL
    for (int c = 0; c < kWideChunks; c++) {
      wide[c].read(row, Columns::column_of(c * Columns::kMax, at.pair, simdgroup), 0, fc_vector_loads);
    }
    FATTN_UNROLL
    for (int c = 0; c < kNarrowChunks; c++) {
      const int column = Columns::column_of(Columns::kWide + c * Columns::kNarrowChunk, at.pair, simdgroup);
      if (column >= 0) {
        narrow[c].read(row, column, 0, fc_vector_loads);
      } else {
        narrow[c].clear();
      }
    }
  }
  void unpack(thread Operand (&run)[kElements]) const thread {
    FATTN_UNROLL
    for (int c = 0; c < kWideChunks; c++) {
      wide[c].unpack_to(run, c * Columns::kMax);
    }
    FATTN_UNROLL
    for (int c = 0; c < kNarrowChunks; c++) {
      narrow[c].unpack_to(run, Columns::kWide + c * Columns::kNarrowChunk);
    }
  }
};

template <int kFrom, int kTo, int kFormat>
struct RunOf {
  typedef StoredRun<kFrom, kTo> type;
};
template <int kFrom, int kTo>
struct RunOf<kFrom, kTo, kKvFloat> {
  typedef FloatRun<kFrom, kTo> type;
};

}  // namespace fattn
