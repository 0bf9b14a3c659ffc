// Divides the columns of a head among the lanes of decode_vector: kKeyLanes neighbouring lanes share a key,
// and the next kKeyLanes lanes have another one. Loads of a lane's columns, and sums over lanes.
//
// Scales apply to sums, not to elements. int8 and fp8: to the product of a key and to the weight of a value,
// as in scales.h. int4: a lane has columns of one group, so its part of a product is
// scale (q k) + middle (sum of q), and its part of the output adds scale w v, and middle w once.
#pragma once

#include "../common/scatter_sum.h"
#include "decode_rows.h"

namespace fattn {

// The largest number of columns per lane, which holds them of query and output in registers: 16 bytes, or
// 16 columns of a quantised row, fewer for two rows.
FATTN_CONSTEXPR int kMaxLaneColumns = kKvFormat == kKvFloat ? 16 / sizeof(Element) : 16 / kPackedRows;
// The largest number of columns per load: 16 bytes.
constexpr int max_lane_chunk() {
  const int wide = 4 * kStoredWordElements;
  return wide < kMaxLaneColumns ? wide : kMaxLaneColumns;
}
FATTN_CONSTEXPR int kMaxLaneChunk = max_lane_chunk();
constexpr int lane_chunk(int dim) { return chunk_of(dim, kMaxLaneChunk); }

// Columns per lane if `lanes` share `dim` columns: whole chunks, perhaps past the end of the head.
constexpr int columns_of_lane(int dim, int lanes) {
  return (dim / lane_chunk(dim) + lanes - 1) / lanes * lane_chunk(dim);
}

// Fewer lanes need fewer shuffles for a sum.
FATTN_CONSTEXPR int kMinKeyLanes = kKvFormat == kKvFloat ? 8 : 4;
constexpr int lanes_of_key(int dim) {
  int lanes = kMinKeyLanes;
  while (lanes < kSimdWidth && columns_of_lane(dim, lanes) > kMaxLaneColumns) {
    lanes *= 2;
  }
  return lanes;
}

FATTN_CONSTEXPR int kKeyLanes = lanes_of_key(kHeadDim > kValueDim ? kHeadDim : kValueDim);
FATTN_CONSTEXPR int kKeysAbreast = kSimdWidth / kKeyLanes;
FATTN_CONSTEXPR int kLaneKeys = kTileKeys / kKeysAbreast;  // per lane and step
static_assert(kTileKeys * kPackedRows == kSimdWidth, "a lane has one score of a step");

// The part of a lane in a simdgroup's keys, rows and scores.
struct VectorLane {
  ushort lane;
  LanePosition saved;  // for row state (decode_state.h): `pair` is 0 in one lane of each row

  ushort of_key() const thread { return lane % kKeyLanes; }  // its place among the lanes of a key
  ushort first() const thread { return lane - of_key(); }    // the first of these
  // The step's key that is this lane's key i: neighbouring lanes have neighbouring keys.
  int key(int i) const thread { return i * kKeysAbreast + lane / kKeyLanes; }
  // The key of this lane's score after scatter_sums; saved.row is the row of the score.
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
  static constant constexpr int kChunk = lane_chunk(kDim);
  static constant constexpr int kAll = columns_of_lane(kDim, kKeyLanes);
  static constant constexpr int kChunks = kAll / kChunk;
  // Chunks that every lane has.
  static constant constexpr int kWhole = kDim / kChunk / kKeyLanes;

  static bool exists(int chunk, VectorLane at) { return (chunk * kKeyLanes + at.of_key()) * kChunk < kDim; }
  // The first column of a chunk. Chunks past the end read the last chunk of the head.
  static int first(int chunk, VectorLane at) {
    const int column = (chunk * kKeyLanes + at.of_key()) * kChunk;
    return chunk < kWhole ? column : min(column, kDim - kChunk);
  }
  // The distance from the first chunk to another one.
  static int from_first(int chunk, VectorLane at) {
    const int distance = chunk * kKeyLanes * kChunk;
    return chunk < kWhole ? distance : first(chunk, at) - first(0, at);
  }
  static int column(int i, VectorLane at) {
    return (i / kChunk * kKeyLanes + at.of_key()) * kChunk + i % kChunk;
  }
};

// Decodes the numbers of an int4 chunk, codes minus 8: number * scale + middle.
FATTN_CONSTEXPR bool kGroups = scales_kind(kKvFormat) == kScalesGroup;
FATTN_CONSTEXPR int kMiddleCode = 8;
struct LaneGroup {
  float scale;
  float middle;
};

// A lane's columns of a row of K or V in the stored format. `row` points to the lane's first column.
template <int kDim>
struct FloatColumns {
  typedef LaneColumns<kDim> Columns;
  uint4 chunks[Columns::kChunks];

  void clear() thread {
    FATTN_UNROLL
    for (int c = 0; c < Columns::kChunks; c++) {
      chunks[c] = uint4(0);
    }
  }
  void read(thread const StoredRow& row, VectorLane at) thread {
    FATTN_UNROLL
    for (int c = 0; c < Columns::kChunks; c++) {
      chunks[c] = wide_chunk(row.floats() + Columns::from_first(c, at));
    }
  }
  void unpack(int chunk, thread float (&elements)[Columns::kChunk]) const thread {
    Operand run[Columns::kChunk];
    FATTN_UNROLL
    for (int w = 0; w < 4; w++) {
      fattn::unpack(chunks[chunk][w], run, w * kWordElements, Element(0.0f));
    }
    FATTN_UNROLL
    for (int e = 0; e < Columns::kChunk; e++) {
      elements[e] = float(run[e]);
    }
  }
  LaneGroup group(int) const thread { return LaneGroup(); }  // no groups
};

// The same of a quantised row.
template <int kDim>
struct QuantisedColumns {
  typedef LaneColumns<kDim> Columns;
  StoredChunk<Columns::kChunk> chunks[Columns::kChunks];

  void clear() thread {
    FATTN_UNROLL
    for (int c = 0; c < Columns::kChunks; c++) {
      chunks[c].clear();
    }
  }
  void read(thread const StoredRow& row, VectorLane at) thread {
    static_assert(!kGroups || Columns::kChunks == 1, "a lane reads a part of one group");
    FATTN_UNROLL
    for (int c = 0; c < Columns::kChunks; c++) {
      chunks[c].read(row, Columns::from_first(c, at), 0, fc_vector_loads);
    }
  }
  // Unscaled; int4: minus kMiddleCode.
  void unpack(int chunk, thread float (&numbers)[Columns::kChunk]) const thread {
    constexpr int kHalf = kStoredWordElements / 2;
    FATTN_UNROLL
    for (int first = 0; first < Columns::kChunk; first += 2 * kHalf) {
      const uint word = word_of(chunks[chunk].words, first / (2 * kHalf));
      FATTN_UNROLL
      for (int k = 0; k < kHalf; k++) {
        const half2 pair = kGroups ? int4_pair(word, k, kMiddleCode) : stored_pair(word, k);
        numbers[first + k] = float(pair[0]);
        numbers[first + k + kHalf] = float(pair[1]);
      }
    }
  }
  LaneGroup group(int chunk) const thread {
    LaneGroup group;
    group.scale = float(chunks[chunk].group[0]);
    group.middle = fma(group.scale, float(kMiddleCode), float(chunks[chunk].group[1]));
    return group;
  }
};

template <int kDim, int kFormat>
struct LaneRowOf {
  typedef QuantisedColumns<kDim> type;
};
template <int kDim>
struct LaneRowOf<kDim, kKvFloat> {
  typedef FloatColumns<kDim> type;
};

constexpr int log2_of(int n) {
  int log2 = 0;
  while (n > 1 << log2) {
    log2++;
  }
  return log2;
}

// Sums each of N numbers over kLanes lanes, whose indices differ in the bits from kStride on. Lane by lane,
// each keeps N / kLanes of the sums: in every shuffle two lanes exchange numbers, and each adds one.
template <int kLanes, int kStride, int N>
inline void scatter_sums(thread float (&numbers)[N], ushort lane) {
  static_assert(N % kLanes == 0, "every lane keeps as many");
  constexpr int kStages = log2_of(kLanes);
  FATTN_UNROLL
  for (int stage = 1; stage <= kStages; stage++) {
    scatter_sum(numbers, N >> stage, (kLanes >> stage) * kStride, lane);
  }
}

// Maximum and sum over the lanes with scores of one row.
inline float max_of_row(float x) {
  FATTN_UNROLL
  for (int bit = 1; bit < kSimdWidth; bit *= 2) {
    if (kPackedRows == 1 || bit != kLaneKeys) {
      x = fmax(x, simd_shuffle_xor(x, ushort(bit)));
    }
  }
  return x;
}
inline float sum_of_row(float x) {
  FATTN_UNROLL
  for (int bit = 1; bit < kSimdWidth; bit *= 2) {
    if (kPackedRows == 1 || bit != kLaneKeys) {
      x += simd_shuffle_xor(x, ushort(bit));
    }
  }
  return x;
}

}  // namespace fattn
