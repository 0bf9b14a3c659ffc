// Where the query rows of a simdgroup are kept: in registers, or in threadgroup memory. softmax.h takes
// fragments from either by `rows(r, f)`.
#pragma once

#include "tile.h"

namespace fattn {

// This lane's part of its row; null when the call has fewer rows.
inline void read_query_or_zeros(const device Element* row, LanePosition at,
                                thread Operand (&run)[kHeadDim / 4]) {
  if (row) {
    read_query(row, fc_vector_loads, at, run);
  } else {
    fill_run(run, 0.0f);
  }
}

struct QueryRegisters {
  OperandFragment fragments[kRowFragments][kHeadDim / 8];

  QueryRegisters() thread {}

  // `row` is this lane's row of fragment r; null when the call has fewer rows.
  void load(int r, const device Element* row, LanePosition at) thread {
    Operand run[kHeadDim / 4];
    read_query_or_zeros(row, at, run);
#pragma clang loop unroll(full)
    for (int f = 0; f < kHeadDim / 8; f++) {
      set_elements(fragments[r][f], run[query_element(f)], run[query_element(f) + kKeyChunk]);
    }
  }

  OperandFragment rows(int r, int f) const thread { return fragments[r][f]; }
};

// Two elements as the words they are stored in.
FATTN_CONSTEXPR int kPairWords = 2 * sizeof(Operand) / 4;
// Words of eight rows.
FATTN_CONSTEXPR int kQueryWords = kHeadDim / 8 * kPairWords * kSimdWidth;

// Eight query rows in threadgroup memory: a pair of elements per lane and fragment. Where registers are few
// (M1 and M2), they would take a quarter of them.
struct SharedQuery {
  // Of this lane. Volatile, or the compiler reads the pairs once and holds them in registers all the same:
  // 13 half registers more, and 512 threads for 640 in paged decode (float16, D = 64, as Mesa counts for M1
  // and M2).
  volatile threadgroup uint* pairs;

  // `row` is this lane's row; null when the call has fewer rows. By one of the simdgroups that share the
  // rows; the others may read them after a barrier.
  void stage(const device Element* row, LanePosition at) thread {
    Operand run[kHeadDim / 4];
    read_query_or_zeros(row, at, run);
#pragma clang loop unroll(full)
    for (int f = 0; f < kHeadDim / 8; f++) {
      put_pair(pairs + f * (kPairWords * kSimdWidth), run[query_element(f)],
               run[query_element(f) + kKeyChunk]);
    }
  }

  OperandFragment rows(int, int f) const thread {
    return pair_at(pairs + f * (kPairWords * kSimdWidth), Operand(0.0f));
  }

 private:
  template <typename T>
  static void put_pair(volatile threadgroup uint* pair, T first, T second) {
    *pair = as_type<uint>(vec<T, 2>(first, second));
  }
  static void put_pair(volatile threadgroup uint* pair, float first, float second) {
    pair[0] = as_type<uint>(first);
    pair[kSimdWidth] = as_type<uint>(second);
  }
  // The last argument only tells the type.
  template <typename T>
  static OperandFragment pair_at(volatile threadgroup uint* pair, T) {
    const vec<T, 2> elements = as_type<vec<T, 2>>(*pair);
    return fragment_of(elements[0], elements[1]);
  }
  static OperandFragment pair_at(volatile threadgroup uint* pair, float) {
    return fragment_of(as_type<float>(pair[0]), as_type<float>(pair[kSimdWidth]));
  }
  template <typename T>
  static OperandFragment fragment_of(T first, T second) {
    OperandFragment result;
    set_elements(result, Operand(first), Operand(second));
    return result;
  }
};

}  // namespace fattn
