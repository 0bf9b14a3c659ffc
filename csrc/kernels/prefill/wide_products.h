// The products of prefill_wide. The query rows are in threadgroup memory. The simdgroups of a row group
// divide the keys of a step: each reads its own keys from the cache, and all read the products from
// threadgroup memory.
#pragma once

#include "prefill_tile.h"
#include "../common/columns.h"

namespace fattn {

// Key fragments per simdgroup. If simdgroups outnumber the fragments, several share a fragment and divide its
// columns.
FATTN_CONSTEXPR int kOwnFragments = kColumnShares < kKeyFragments ? kKeyFragments / kColumnShares : 1;
FATTN_CONSTEXPR int kSumShares = sum_shares(kColumnShares, kKeyFragments);
static_assert(kSumShares * kKeyFragments == kOwnFragments * kColumnShares, "every key has the same shares");

typedef ColumnShare<0, kHeadDim, kSumShares> KeyColumns;

// Elements of the query that a lane reads at a time: 16 bytes, two elements for each of several fragments.
FATTN_CONSTEXPR int kPieceElements = 16 / sizeof(Element);
FATTN_CONSTEXPR int kSharePieces = share_pieces(kHeadDim, kSumShares, sizeof(Element));
static_assert(kSharePieces * kPieceElements >= KeyColumns::kAll, "the pieces hold a share");
FATTN_CONSTEXPR int kFragmentPieces = kSumShares * kSharePieces;  // per eight rows
FATTN_CONSTEXPR int kGroupPieces = kRowFragments * kFragmentPieces;

// The rows of a group as right factors: the fragments are transposed.
struct GroupQuery {
  threadgroup Element* pieces;  // [row fragment][share of the columns][piece][lane]

  // Stages this lane's two rows of fragment r; null if a row does not exist. The simdgroups of the group take
  // turns.
  void stage(int r, const device Element* first, const device Element* second, ushort share, ushort lane,
             LanePosition at) const thread {
    for (int piece = share; piece < kFragmentPieces; piece += kColumnShares) {
      threadgroup Element* to = pieces + ((r * kFragmentPieces + piece) * kSimdWidth + lane) * kPieceElements;
      FATTN_UNROLL
      for (int i = 0; i < kPieceElements; i += 2) {
        const int element = piece % kSharePieces * kPieceElements + i + (at.row & 1);
        const int column = element < KeyColumns::kAll
                               ? KeyColumns::column_of(element, at.row / 2, piece / kSharePieces)
                               : -1;
        to[i] = first && column >= 0 ? first[column] : Element(0.0f);
        to[i + 1] = second && column >= 0 ? second[column] : Element(0.0f);
      }
    }
  }

  void read(int r, int piece, ushort lane, thread Operand (&pairs)[kPieceElements]) const thread {
    read_elements<kPieceElements>(
        pieces + ((r * kFragmentPieces + piece) * kSimdWidth + lane) * kPieceElements, true, pairs, 0);
  }
};

// Independent sums, so that consecutive products do not add to the same one. float32 has one row fragment and
// two sums. 16-bit dtypes have one sum per row fragment, because the number of fragments, two or one, depends
// on the rows and must not change a result.
FATTN_CONSTEXPR int kChains = kBlockedSums ? 2 : 1;
// Chunks of a key that are summed in one chain: all, or 64 columns.
FATTN_CONSTEXPR int kKeyWideChunks = KeyColumns::kWide / KeyColumns::kMax;
FATTN_CONSTEXPR int kBlockChunks = at_least_one(kBlockedSums ? 16 / KeyColumns::kMax : kKeyWideChunks);

// The products of some columns of a key fragment with all rows of the group.
struct BlockProducts {
  simdgroup_float8x8 sums[kRowFragments][kChains];

  BlockProducts() thread {}

  void clear() thread {
    FATTN_UNROLL
    for (int r = 0; r < kRowFragments; r++) {
      FATTN_UNROLL
      for (int c = 0; c < kChains; c++) {
        set_elements(sums[r][c], 0.0f, 0.0f);
      }
    }
  }

  // `run` is this lane's part of the columns that begin at query piece `piece`.
  template <int N>
  void add(thread const GroupQuery& query, int piece, thread const Operand (&run)[N], ushort lane) thread {
    FATTN_UNROLL
    for (int begin = 0; begin < N; begin += kPieceElements) {
      Operand rows[kRowFragments][kPieceElements];
      FATTN_UNROLL
      for (int r = 0; r < kRowFragments; r++) {
        query.read(r, piece + begin / kPieceElements, lane, rows[r]);
      }
      FATTN_UNROLL
      for (int i = 0; i < kPieceElements && begin + i < N; i += 2) {
        OperandFragment key;
        set_elements(key, run[begin + i], run[begin + i + 1]);
        FATTN_UNROLL
        for (int r = 0; r < kRowFragments; r++) {
          OperandFragment row;
          set_elements(row, rows[r][i], rows[r][i + 1]);
          simdgroup_multiply_accumulate(sums[r][i / 2 % kChains], key, row, sums[r][i / 2 % kChains]);
        }
      }
    }
  }

  void add_to(thread float2 (&totals)[kRowFragments]) const thread {
    FATTN_UNROLL
    for (int r = 0; r < kRowFragments; r++) {
      FATTN_UNROLL
      for (int c = 0; c < kChains; c++) {
        totals[r] += float2(sums[r][c].thread_elements()[0], sums[r][c].thread_elements()[1]);
      }
    }
  }
};

// Reads C columns of a row; zeros if it does not exist.
template <int C>
inline void read_columns(thread const StoredRow& row, int column, bool there, thread Operand (&run)[C]) {
  if (kKvFormat != kKvFloat) {
    StoredChunk<C> chunk;
    if (there) {
      chunk.read(row, column, 0, fc_vector_loads);
    } else {
      chunk.clear();
    }
    chunk.unpack_to(run, 0);
  } else if (there) {
    read_chunks<C>(row.floats() + column, 0, 0, fc_vector_loads, run);
  } else {
    fill_run(run, 0.0f);
  }
}

// Adds the products of a key, which four lanes hold as a row of the left factor, and this lane's rows 2 *
// pair and 2 * pair + 1.
inline void multiply_key(thread const GroupQuery& query, thread const StoredRow& key, bool there,
                         ushort share, LanePosition at, thread float2 (&totals)[kRowFragments]) {
  constexpr int kMax = KeyColumns::kMax;
  const int first_piece = share * kSharePieces;
  BlockProducts block;
  block.clear();
  FATTN_UNROLL
  for (int c = 0; c < kKeyWideChunks; c++) {
    if (c > 0 && c % kBlockChunks == 0) {
      block.add_to(totals);
      block.clear();
    }
    Operand run[kMax];
    read_columns(key, KeyColumns::column_of(c * kMax, at.pair, share), there, run);
    block.add(query, first_piece + c * kMax / kPieceElements, run, at.lane);
  }
  if (KeyColumns::kNarrow > 0) {
    constexpr int kChunk = KeyColumns::kNarrowChunk;
    Operand run[at_least_one(KeyColumns::kNarrow)];
    FATTN_UNROLL
    for (int i = 0; i < KeyColumns::kNarrow; i += kChunk) {
      const int column = KeyColumns::column_of(KeyColumns::kWide + i, at.pair, share);
      Operand chunk[kChunk];
      read_columns(key, max(column, 0), there && column >= 0, chunk);
      FATTN_UNROLL
      for (int e = 0; e < kChunk; e++) {
        run[i + e] = chunk[e];
      }
    }
    block.add(query, first_piece + KeyColumns::kWide / kPieceElements, run, at.lane);
  }
  block.add_to(totals);
}

// Products that the simdgroups of a group exchange in a step.
FATTN_CONSTEXPR int kGroupScores = group_products(kSumShares, kRowFragments, kTileKeys);

struct GroupScores {
  threadgroup float* products;  // [share of the columns][row fragment][key fragment][row][key]

  void write(int r, int k, ushort share, float2 of_rows, LanePosition at) const thread {
    threadgroup float* block = products + ((share * kRowFragments + r) * kKeyFragments + k) * 64;
    block[at.pair * 16 + at.row] = of_rows[0];
    block[at.pair * 16 + 8 + at.row] = of_rows[1];
  }

  // Reads the products of these key fragments as scores.
  template <typename Attention>
  void read(thread Attention& attention, StepFragments fragments, LanePosition at) const thread {
    FATTN_UNROLL
    for (int r = 0; r < kRowFragments; r++) {
      FATTN_UNROLL
      for (int k = 0; k < kKeyFragments; k++) {
        float2 sum = float2(0.0f);
        if (fragments.has(k)) {
          sum = pair(0, r, k, at);
          FATTN_UNROLL
          for (int share = 1; share < kSumShares; share++) {
            sum += pair(share, r, k, at);
          }
        }
        set_elements(attention.score[r][k], sum[0], sum[1]);
      }
    }
  }

 private:
  // The products of this lane's row and keys.
  float2 pair(int share, int r, int k, LanePosition at) const thread {
    const threadgroup float* block = products + ((share * kRowFragments + r) * kKeyFragments + k) * 64;
    return *reinterpret_cast<const threadgroup float2*>(block + at.row * 8 + at.pair * 2);
  }
};

// Computes this simdgroup's share of a step's products. kWhole: every row sees every key.
template <bool kWhole>
inline void store_products(thread const GroupScores& scores, thread const GroupQuery& query,
                           thread const PrefillTile& tile, thread const StepKeys& step,
                           StepFragments fragments, ushort share) {
  const LanePosition at = tile.at;
  const StoredOperand stored = tile.source.keys();
  FATTN_UNROLL
  for (int own = 0; own < kOwnFragments; own++) {
    const int k = share / kSumShares * kOwnFragments + own;
    if (!kWhole && !fragments.has(k)) {
      continue;
    }
    const KeyPlace place = step.find(tile.source.table, k, at.row);
    const bool there = kWhole || place.exists;
    const StoredRow row = stored.row_at(place, tile.params->key, tile.params->key_scales);
    float2 totals[kRowFragments];
    FATTN_UNROLL
    for (int r = 0; r < kRowFragments; r++) {
      totals[r] = float2(0.0f);
    }
    multiply_key(query, row, there, share % kSumShares, at, totals);
    FATTN_UNROLL
    for (int r = 0; r < kRowFragments; r++) {
      scores.write(r, k, share % kSumShares, totals[r], at);
    }
  }
}

}  // namespace fattn
