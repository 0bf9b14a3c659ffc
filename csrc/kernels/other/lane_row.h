// A row of a cache as the lanes of a simdgroup hold it, and how it is stored: unchanged, or quantised bit for
// bit as torch_fattn/reference/kv_formats.py defines.
#pragma once

#include "column_loads.h"
#include "quantise.h"

FATTN_DECLARE_CONSTANT(bool, scales)

namespace fattn {

typedef FATTN_STORED_T Stored;    // Element, char or uchar
typedef FATTN_SCALE_T Scale;      // half for int4, else float
typedef FATTN_SLOT_T SlotNumber;  // int or long

FATTN_CONSTEXPR int kHeadDim = FATTN_HEAD_DIM;
FATTN_CONSTEXPR int kValueDim = FATTN_VALUE_DIM;
FATTN_CONSTEXPR int kFormat = FATTN_KV_FORMAT;
FATTN_CONSTEXPR int kSimdgroups = FATTN_SIMDGROUPS;
FATTN_CONSTEXPR int kThreads = kSimdgroups * kSimdWidth;

// A simdgroup takes 128 columns at a time.
FATTN_CONSTEXPR int kPassColumns = kLaneColumns * kSimdWidth;
// Lanes that share an int4 group.
FATTN_CONSTEXPR int kGroupLanes = kInt4Group / kLaneColumns;

// A lane's columns of a row; 0 past the last.
template <int kDim>
struct LaneRow {
  float x[(kDim + kPassColumns - 1) / kPassColumns][kLaneColumns];

  void load(const device Element* source, ushort lane) thread {
    FATTN_UNROLL
    for (int pass = 0; pass * kPassColumns < kDim; pass++) {
      const int column = pass * kPassColumns + lane * kLaneColumns;
      if (column < kDim) {
        load_columns(source, column, fc_vector_loads, x[pass]);
      }
    }
  }
};

// Copies a row unchanged.
template <int kDim>
inline void copy_row(const device Element* source, device Stored* target, ushort lane) {
  for (int column = lane * kLaneColumns; column < kDim; column += kPassColumns) {
    if (fc_vector_loads) {
      *(device vec<Element, kLaneColumns>*)(target + column) =
          *(const device vec<Element, kLaneColumns>*)(source + column);
    } else {
      FATTN_UNROLL
      for (int e = 0; e < kLaneColumns; e++) {
        target[column + e] = Stored(source[column + e]);
      }
    }
  }
}

// The code of a number in a format with one scale per row.
inline int code_of(float q) {
  if (kFormat == kKvInt8) {
    return int(rint(q));
  }
  static_assert(kFormat == kKvFp8E4M3 || kFormat == kKvInt8 || !has_row_scales(kFormat),
                "code_of lacks this format");
  return e4m3_of(q);
}

// Writes an int8 or fp8 row with one scale, or without scales.
template <int kDim>
inline void write_scaled_row(thread LaneRow<kDim>& row, device Stored* target, device Scale* row_scale,
                             ushort lane) {
  float scale = 1.0f;
  if (fc_scales) {
    float largest = 0.0f;
    bool finite = true;
    FATTN_UNROLL
    for (int pass = 0; pass * kPassColumns < kDim; pass++) {
      FATTN_UNROLL
      for (int e = 0; e < kLaneColumns; e++) {
        largest = fmax(largest, fabs(row.x[pass][e]));
        finite = finite && isfinite(row.x[pass][e]);
      }
    }
    scale = flushed(simd_max(largest) / float(largest_code(kFormat)));
    // A NaN or an infinity makes the whole row NaN.
    scale = simd_all(finite) ? scale : NAN;
    if (lane == 0) {
      *row_scale = Scale(scale);
    }
  }
  FATTN_UNROLL
  for (int pass = 0; pass * kPassColumns < kDim; pass++) {
    const int column = pass * kPassColumns + lane * kLaneColumns;
    int codes[kLaneColumns];
    FATTN_UNROLL
    for (int e = 0; e < kLaneColumns; e++) {
      float q = row.x[pass][e];
      if (fc_scales) {
        q = scale > 0.0f ? q / scale : 0.0f;
      }
      codes[e] = code_of(q);
    }
    if (column < kDim) {
      store_columns(target, column, codes);
    }
  }
}

// Writes an int4 row with a scale and a minimum per 32 columns. The minimum is rounded down and the scale up,
// so that codes 0 to 15 cover the whole group.
template <int kDim>
inline void write_grouped_row(thread LaneRow<kDim>& row, device Stored* target, device Scale* scales,
                              ushort lane) {
  FATTN_UNROLL
  for (int pass = 0; pass * kPassColumns < kDim; pass++) {
    const int column = pass * kPassColumns + lane * kLaneColumns;
    float low = kHalfMax, high = -kHalfMax;
    ushort bad = 0;
    FATTN_UNROLL
    for (int e = 0; e < kLaneColumns; e++) {
      bad |= ushort(!isfinite(row.x[pass][e]));
      row.x[pass][e] = clamp(row.x[pass][e], -kHalfMax, kHalfMax);
      low = fmin(low, row.x[pass][e]);
      high = fmax(high, row.x[pass][e]);
    }
    FATTN_UNROLL
    for (ushort step = 1; step < kGroupLanes; step *= 2) {
      low = fmin(low, simd_shuffle_xor(low, step));
      high = fmax(high, simd_shuffle_xor(high, step));
      bad |= simd_shuffle_xor(bad, step);
    }
    const half minimum = rounded_down(low);
    const half scale = rounded_up(flushed((high - float(minimum)) / kInt4Max));
    uint codes[kLaneColumns];
    FATTN_UNROLL
    for (int e = 0; e < kLaneColumns; e++) {
      const float q = (row.x[pass][e] - float(minimum)) / float(scale);
      codes[e] = bad == 0 && float(scale) > 0.0f ? uint(rint(q)) : 0;
    }
    if (column >= kDim) {
      continue;
    }
    target[column / 2] = Stored(codes[0] | codes[1] << 4);
    target[column / 2 + 1] = Stored(codes[2] | codes[3] << 4);
    if (lane % kGroupLanes == 0) {
      device Scale* group = scales + column / kInt4Group * 2;
      group[0] = bad ? Scale(NAN) : Scale(scale);
      group[1] = bad ? Scale(NAN) : Scale(minimum);
    }
  }
}

template <int kDim>
inline void write_quantised_row(thread LaneRow<kDim>& row, device Stored* target, device Scale* scales,
                                ushort lane) {
  FATTN_UNROLL
  for (int pass = 0; pass * kPassColumns < kDim; pass++) {
    FATTN_UNROLL
    for (int e = 0; e < kLaneColumns; e++) {
      row.x[pass][e] = flushed(row.x[pass][e]);
    }
  }
  if (kFormat == kKvInt4) {
    write_grouped_row<kDim>(row, target, scales, lane);
  } else {
    static_assert(kFormat == kKvFloat || kFormat == kKvInt4 || has_row_scales(kFormat),
                  "write_quantised_row lacks this format");
    write_scaled_row<kDim>(row, target, scales, lane);
  }
}

template <int kDim>
inline void write_row(const device Element* source, device Stored* target, device Scale* scales,
                      ushort lane) {
  if (kFormat == kKvFloat) {
    copy_row<kDim>(source, target, lane);
    return;
  }
  LaneRow<kDim> row = {};
  row.load(source, lane);
  write_quantised_row<kDim>(row, target, scales, lane);
}

// The place of a slot in a pool.
struct SlotPlace {
  long block;
  long slot;
};

// GPUs have no 64-bit division: compiled, it would be most of a kernel. Few caches need this one, bit by bit.
inline SlotPlace place_of(long slot, int block_size) {
  SlotPlace place = {0, slot};
  if (slot <= 0xffffffffL) {
    place.block = long(uint(slot) / uint(block_size));
    place.slot = slot - place.block * block_size;
    return place;
  }
  long step = block_size;
  while (step <= slot) {
    step *= 2;
  }
  while (step > block_size) {
    step /= 2;
    place.block = 2 * place.block + (place.slot >= step ? 1 : 0);
    place.slot -= place.slot >= step ? step : 0;
  }
  return place;
}

inline long offset_of(SlotPlace place, int head, constant Strides3& strides) {
  return place.block * strides.batch + head * strides.head + place.slot * strides.row;
}

}  // namespace fattn
