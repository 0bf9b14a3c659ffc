// The columns of a head, shared out among the lanes of decode_vector: kKeyLanes neighbouring lanes share a
// key, and the others of the simdgroup have as many more keys. How a lane reads its columns of a row, and how
// the sums of lanes become results.
#pragma once

#include "decode_rows.h"

namespace fattn {

FATTN_CONSTEXPR int kLaneChunk = 16 / sizeof(Element);  // columns that a lane reads at once

// Of `dim` columns those that a lane has if `lanes` share them: whole chunks, the last of them perhaps past
// the end of the head.
constexpr int columns_of_lane(int dim, int lanes) {
  return (dim / kLaneChunk + lanes - 1) / lanes * kLaneChunk;
}

// Fewer lanes need fewer shuffles for a sum; but a lane holds its columns of query and output in registers.
FATTN_CONSTEXPR int kMostLaneBytes = 32;  // of all rows, as they are stored
constexpr int lanes_of_key(int dim) {
  int lanes = 8;
  while (lanes < kSimdWidth &&
         kPackedRows * columns_of_lane(dim, lanes) * int(sizeof(Element)) > kMostLaneBytes) {
    lanes *= 2;
  }
  return lanes;
}

FATTN_CONSTEXPR int kKeyLanes = lanes_of_key(kHeadDim > kValueDim ? kHeadDim : kValueDim);
FATTN_CONSTEXPR int kKeysAbreast = kSimdWidth / kKeyLanes;
FATTN_CONSTEXPR int kLaneKeys = kTileKeys / kKeysAbreast;  // of a step, those that a lane has columns of
static_assert(kTileKeys * kPackedRows == kSimdWidth, "a lane has one score of a step");

// What a lane has of a simdgroup's keys, rows and scores.
struct VectorLane {
  ushort lane;
  LanePosition saved;  // for what is saved by row (decode_state.h): `pair` is 0 in one lane of each

  ushort of_key() const thread { return lane % kKeyLanes; }  // its place among the lanes of a key
  ushort first() const thread { return lane - of_key(); }    // the first of these
  // Its key number i, of the step's: lanes side by side have keys side by side.
  int key(int i) const thread { return i * kKeysAbreast + lane / kKeyLanes; }
  // The key whose score it has, as scatter_sums leaves them; the row of that score is saved.row.
  int own_key() const thread { return key(of_key() % kLaneKeys); }
  // The first lane with a score of this row.
  static ushort of_row(int row) { return row * kLaneKeys; }
};

inline VectorLane vector_lane(ushort lane) {
  VectorLane at;
  at.lane = at.saved.lane = lane;
  at.saved.row = lane % kKeyLanes / kLaneKeys;
  at.saved.pair = lane == VectorLane::of_row(at.saved.row) ? 0 : 1;
  return at;
}

// The columns of a lane, in chunks.
template <int kDim>
struct LaneColumns {
  static constant constexpr int kAll = columns_of_lane(kDim, kKeyLanes);
  static constant constexpr int kChunks = kAll / kLaneChunk;
  // The chunks that every lane has.
  static constant constexpr int kWhole = kDim / kLaneChunk / kKeyLanes;

  static bool exists(int chunk, VectorLane at) {
    return (chunk * kKeyLanes + at.of_key()) * kLaneChunk < kDim;
  }
  // The first column of a chunk; of one past the end, that of the head's last.
  static int first(int chunk, VectorLane at) {
    const int column = (chunk * kKeyLanes + at.of_key()) * kLaneChunk;
    return chunk < kWhole ? column : min(column, kDim - kLaneChunk);
  }
  static int column(int i, VectorLane at) {
    return (i / kLaneChunk * kKeyLanes + at.of_key()) * kLaneChunk + i % kLaneChunk;
  }
};

// A lane's columns of a row of K or V, as they are stored.
template <int kDim>
struct LaneRow {
  typedef LaneColumns<kDim> Columns;
  uint4 chunks[Columns::kChunks];

  void clear() thread {
#pragma clang loop unroll(full)
    for (int c = 0; c < Columns::kChunks; c++) {
      chunks[c] = uint4(0);
    }
  }
  void read(const device Element* row, VectorLane at) thread {
#pragma clang loop unroll(full)
    for (int c = 0; c < Columns::kChunks; c++) {
      chunks[c] = wide_chunk(row + Columns::first(c, at));
    }
  }
  void unpack(int chunk, thread float (&elements)[kLaneChunk]) const thread {
    Operand run[kLaneChunk];
#pragma clang loop unroll(full)
    for (int w = 0; w < 4; w++) {
      fattn::unpack(chunks[chunk][w], run, w * kWordElements, Element(0.0f));
    }
#pragma clang loop unroll(full)
    for (int e = 0; e < kLaneChunk; e++) {
      elements[e] = float(run[e]);
    }
  }
};

constexpr int log2_of(int n) {
  int log2 = 0;
  while (n > 1 << log2) {
    log2++;
  }
  return log2;
}

// Sums each of N numbers over kLanes lanes, whose numbers differ in the bits from kStride on. A lane keeps
// N / kLanes of the sums, in the order of the lanes: every shuffle exchanges numbers of two lanes, of which
// each adds up one.
template <int kLanes, int kStride, int N>
inline void scatter_sums(thread float (&numbers)[N], ushort lane) {
  static_assert(N % kLanes == 0, "every lane keeps as many");
#pragma clang loop unroll(full)
  for (int stage = 1; stage <= log2_of(kLanes); stage++) {
    const ushort distance = (kLanes >> stage) * kStride;
    const bool upper = (lane & distance) != 0;
#pragma clang loop unroll(full)
    for (int i = 0; i < N / 2; i++) {  // as many in all stages: a loop of unknown length may stay rolled
      if (i < N >> stage) {
        const float low = numbers[i];
        const float high = numbers[i + (N >> stage)];
        numbers[i] = (upper ? high : low) + simd_shuffle_xor(upper ? low : high, distance);
      }
    }
  }
}

// The largest, or the sum, of the numbers that the lanes with scores of one row have.
inline float max_of_row(float x) {
#pragma clang loop unroll(full)
  for (int bit = 1; bit < kSimdWidth; bit *= 2) {
    if (kPackedRows == 1 || bit != kLaneKeys) {
      x = fmax(x, simd_shuffle_xor(x, ushort(bit)));
    }
  }
  return x;
}
inline float sum_of_row(float x) {
#pragma clang loop unroll(full)
  for (int bit = 1; bit < kSimdWidth; bit *= 2) {
    if (kPackedRows == 1 || bit != kLaneKeys) {
      x += simd_shuffle_xor(x, ushort(bit));
    }
  }
  return x;
}

}  // namespace fattn
