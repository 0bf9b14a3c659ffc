// The query rows of a simdgroup, in registers or in threadgroup memory. softmax.h reads fragments of either
// through `rows(r, f)`.
#pragma once

#include "tile.h"

namespace fattn {

// Reads this lane's part of its row; zeros if `row` is null, because the call has fewer rows.
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

  // `row`: this lane's row of fragment r, or null.
  void load(int r, const device Element* row, LanePosition at) thread {
    Operand run[kHeadDim / 4];
    read_query_or_zeros(row, at, run);
    FATTN_UNROLL
    for (int f = 0; f < kHeadDim / 8; f++) {
      set_elements(fragments[r][f], run[query_element(f)], run[query_element(f) + kKeyChunk]);
    }
  }

  OperandFragment rows(int r, int f) const thread { return fragments[r][f]; }
};

// 32-bit words of two elements.
FATTN_CONSTEXPR int kPairWords = 2 * sizeof(Operand) / 4;
// 32-bit words of eight rows.
FATTN_CONSTEXPR int kQueryWords = kHeadDim / 8 * kPairWords * kSimdWidth;

// Eight query rows in threadgroup memory: a pair of elements per lane and fragment. In registers they would
// take a quarter of M1's and M2's.
struct SharedQuery {
  // This lane's pairs. `volatile` keeps the compiler from caching them in registers: that saves 13 half
  // registers, so paged decode runs 640 threads instead of 512 (float16, D = 64; Mesa's count for M1 and M2).
  volatile threadgroup uint* pairs;

  // `row`: this lane's row, or null. One of the simdgroups that share the rows calls this; the others may
  // read after a barrier.
  void stage(const device Element* row, LanePosition at) thread {
    Operand run[kHeadDim / 4];
    read_query_or_zeros(row, at, run);
    FATTN_UNROLL
    for (int f = 0; f < kHeadDim / 8; f++) {
      write_pair(pairs + f * (kPairWords * kSimdWidth), run[query_element(f)],
                 run[query_element(f) + kKeyChunk]);
    }
  }

  OperandFragment rows(int, int f) const thread {
    return pair_at(pairs + f * (kPairWords * kSimdWidth), Operand(0.0f));
  }

 private:
  template <typename T>
  static void write_pair(volatile threadgroup uint* pair, T first, T second) {
    *pair = as_type<uint>(vec<T, 2>(first, second));
  }
  static void write_pair(volatile threadgroup uint* pair, float first, float second) {
    pair[0] = as_type<uint>(first);
    pair[kSimdWidth] = as_type<uint>(second);
  }
  // The last argument selects the overload by its type.
  template <typename T>
  static OperandFragment pair_at(volatile threadgroup uint* pair, T) {
    const uint word = *pair;  // as_type takes no volatile memory
    const vec<T, 2> elements = as_type<vec<T, 2>>(word);
    return fragment_of(elements[0], elements[1]);
  }
  static OperandFragment pair_at(volatile threadgroup uint* pair, float) {
    const uint first = pair[0], second = pair[kSimdWidth];
    return fragment_of(as_type<float>(first), as_type<float>(second));
  }
  template <typename T>
  static OperandFragment fragment_of(T first, T second) {
    OperandFragment result;
    set_elements(result, Operand(first), Operand(second));
    return result;
  }
};

}  // namespace fattn
