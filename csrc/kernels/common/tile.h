// 8x8 simdgroup matrices (fragments), loaded in 16-byte chunks.
//
// A lane holds two neighbouring elements of an 8x8 matrix (fragment.h). Q K^T sums over the head dimension,
// so any order of that dimension works if Q and K agree; and the columns of P V may be permuted if the store
// undoes it. With the orders below a lane reads whole chunks of C contiguous elements, and neighbouring lanes
// read neighbouring chunks: every load is wide and uses whole cache lines, without a transposed copy.
//
//   operand            lane reads, for all i                  elements of fragment f (c = f / C, j = f % C)
//   Q (A of Q K^T)     row r,  [(8i + 2 pair) C, +2C)         run[2cC + j], run[2cC + C + j]
//   K (B of Q K^T)     keys 2p, 2p+1, [(8i + row) C, +C)      first[j], second[j] of chunk c
//   V (B of P V)       key `row`, [(4i + pair) C, +C)         run[2f], run[2f + 1]
//   O (D of P V)       row r,  [(4i + pair) C, +C)            run[2f], run[2f + 1]
#pragma once

#include "fragment.h"
#include "keys.h"

namespace fattn {

// The four lanes of a row differ in bits 0 and 3 of the lane number.
inline float row_max_of(float x) {
  x = fmax(x, simd_shuffle_xor(x, ushort(1)));
  return fmax(x, simd_shuffle_xor(x, ushort(8)));
}

inline float row_sum_of(float x) {
  x += simd_shuffle_xor(x, ushort(1));
  return x + simd_shuffle_xor(x, ushort(8));
}

typedef simdgroup_matrix<Operand, 8, 8> OperandFragment;

// The largest power of two that divides n and is at most `most`.
constexpr int chunk_of(int n, int most) {
  int chunk = 1;
  while (2 * chunk <= most && n % (2 * chunk) == 0) {
    chunk *= 2;
  }
  return chunk;
}

FATTN_CONSTEXPR int kWordElements = 4 / sizeof(Element);
// Elements per chunk: 16 bytes if the head size allows it.
FATTN_CONSTEXPR int kWideChunk = 16 / sizeof(Element);
FATTN_CONSTEXPR int kTileChunk = 16 / sizeof(TileElement);
FATTN_CONSTEXPR int kRunChunk = FATTN_STAGED ? kTileChunk : 4 * kStoredWordElements;
FATTN_CONSTEXPR int kKeyChunk = chunk_of(kHeadDim / 8, kRunChunk);
FATTN_CONSTEXPR int kKeyChunks = kHeadDim / 8 / kKeyChunk;
FATTN_CONSTEXPR int kValueChunk = chunk_of(kValueDim / 4, kRunChunk);
FATTN_CONSTEXPR int kValueChunks = kValueDim / 4 / kValueChunk;

// A 16-byte chunk at an address that is aligned only to its elements.
inline uint4 chunk_words(const device float* from) {
  return uint4(as_type<uint>(from[0]), as_type<uint>(from[1]), as_type<uint>(from[2]),
               as_type<uint>(from[3]));
}
template <typename T>
inline uint4 chunk_words(const device T* from) {
  return uint4(as_type<uint>(vec<T, 2>(from[0], from[1])), as_type<uint>(vec<T, 2>(from[2], from[3])),
               as_type<uint>(vec<T, 2>(from[4], from[5])), as_type<uint>(vec<T, 2>(from[6], from[7])));
}

// 16 bytes of a row, as words.
inline uint4 wide_chunk(const device Element* from) {
  return fc_vector_loads ? *reinterpret_cast<const device uint4*>(from) : chunk_words(from);
}

// The column of element i of this lane's run of a V or O row.
inline int value_column(int i, ushort pair) {
  return (i / kValueChunk * 4 + pair) * kValueChunk + i % kValueChunk;
}

template <int kWords>
struct WordVector {
  static_assert(kWords >= 2 && kWords <= 4, "Metal's vectors have two to four elements");
  typedef vec<uint, kWords> type;
};
template <>
struct WordVector<1> {
  typedef uint type;
};
inline uint word_of(uint words, int) { return words; }
template <typename T>
inline void set_word(thread T& words, int, uint word) {
  words = T(word);
}
template <int N>
inline void set_word(thread vec<uint, N>& words, int i, uint word) {
  words[i] = word;
}
template <int N>
inline uint word_of(vec<uint, N> words, int i) {
  return words[i];
}

// Unpacks the elements of one word; the last argument selects their type. A bfloat is the upper half of a
// float.
template <int N>
inline void unpack(uint word, thread float (&run)[N], int at, bfloat) {
  run[at] = as_type<float>(word << 16);
  run[at + 1] = as_type<float>(word & 0xffff0000);
}
template <int N>
inline void unpack(uint word, thread Operand (&run)[N], int at, float) {
  run[at] = Operand(as_type<float>(word));
}
template <int N, typename T>
inline void unpack(uint word, thread Operand (&run)[N], int at, T) {
  const vec<T, 2> elements = as_type<vec<T, 2>>(word);
  run[at] = Operand(elements[0]);
  run[at + 1] = Operand(elements[1]);
}

// Reads kElements neighbouring elements, at most 16 bytes, to run[at] and on. `aligned`: rows start on
// 16-byte boundaries. It is a compile-time constant in every call.
#define FATTN_DEFINE_READ_ELEMENTS(SPACE)                                                         \
  template <int kElements, typename T, int N>                                                     \
  inline void read_elements(const SPACE T* from, bool aligned, thread Operand(&run)[N], int at) { \
    constexpr int kWords = kElements * sizeof(T) / 4;                                             \
    typedef typename WordVector<kWords == 0 ? 1 : kWords>::type Words;                            \
    if (aligned && kWords > 0) {                                                                  \
      const Words words = *reinterpret_cast<const SPACE Words*>(from);                            \
      FATTN_UNROLL                                                                                \
      for (int w = 0; w < kWords; w++) {                                                          \
        unpack(word_of(words, w), run, at + w * (4 / int(sizeof(T))), T(0.0f));                   \
      }                                                                                           \
    } else {                                                                                      \
      FATTN_UNROLL                                                                                \
      for (int e = 0; e < kElements; e++) {                                                       \
        run[at + e] = Operand(from[e]);                                                           \
      }                                                                                           \
    }                                                                                             \
  }
FATTN_DEFINE_READ_ELEMENTS(device)
FATTN_DEFINE_READ_ELEMENTS(threadgroup)
#undef FATTN_DEFINE_READ_ELEMENTS

// Reads N elements of a row in chunks of C: chunk i starts at column first + i * stride.
template <int C, typename Pointer, int N>
inline void read_chunks(Pointer row, int first, int stride, bool aligned, thread Operand (&run)[N]) {
  constexpr int kSize = sizeof(*row);
  constexpr int kElements = C * kSize < 4 ? 1 : C * kSize < 16 ? C : 16 / kSize;
  FATTN_UNROLL
  for (int i = 0; i < N; i += kElements) {
    read_elements<kElements>(row + first + i / C * stride + i % C, aligned, run, i);
  }
}

// The first element of fragment f of Q in this lane's run; the second is one chunk later.
inline int query_element(int f) { return f / kKeyChunk * (2 * kKeyChunk) + f % kKeyChunk; }

// Reads this lane's part of a row of Q; N elements of its part of a row of K, within a chunk, from element i
// of D / 8 on; the first N elements of its part of a row of V.
template <typename Pointer>
inline void read_query(Pointer row, bool aligned, LanePosition at, thread Operand (&run)[kHeadDim / 4]) {
  read_chunks<2 * kKeyChunk>(row, at.pair * (2 * kKeyChunk), 8 * kKeyChunk, aligned, run);
}
template <typename Pointer, int N>
inline void read_key(Pointer row, int i, bool aligned, LanePosition at, thread Operand (&run)[N]) {
  const int column = i / kKeyChunk * 8 * kKeyChunk + i % kKeyChunk;  // constant after unrolling
  read_chunks<N>(row + at.row * kKeyChunk, column, 0, aligned, run);
}
template <typename Pointer, int N>
inline void read_value(Pointer row, bool aligned, LanePosition at, thread Operand (&run)[N]) {
  read_chunks<kValueChunk>(row, at.pair * kValueChunk, 4 * kValueChunk, aligned, run);
}

template <int N>
inline void fill_run(thread Operand (&run)[N], float value) {
  FATTN_UNROLL
  for (int i = 0; i < N; i++) {
    run[i] = Operand(value);
  }
}

template <int kBytes>
struct WordsOf {
  static_assert(kBytes >= 8 && kBytes <= 16, "Metal's vectors have two to four elements");
  typedef vec<uint, kBytes / 4> type;
};
template <>
struct WordsOf<4> {
  typedef uint type;
};
template <>
struct WordsOf<2> {
  typedef ushort type;
};
template <>
struct WordsOf<1> {
  typedef uchar type;
};

// C neighbouring elements of a row of a quantised cache, in the stored format. They are decoded in pieces to
// save registers.
template <int C>
struct StoredChunk {
  static constant constexpr int kPieceElements = C < kStoredWordElements ? C : kStoredWordElements;
  static constant constexpr int kPieceBytes = kPieceElements * 4 / kStoredWordElements;
  typedef typename WordsOf<C * 4 / kStoredWordElements>::type Words;

  Words words;
  half2 group;

  void clear() thread {
    words = Words(0);
    group = half2(0.0f);
  }
  void read(StoredRow row, int lane_column, int column, bool aligned) thread {
    const device uchar* from = reinterpret_cast<const device uchar*>(row.elements) +
                               lane_column * 4 / kStoredWordElements + column * 4 / kStoredWordElements;
    group = row.group_of(lane_column + column, aligned);
    if (aligned) {
      words = *reinterpret_cast<const device Words*>(from);
      return;
    }
    FATTN_UNROLL
    for (int w = 0; w < C / kPieceElements; w++) {
      uint word = 0;
      FATTN_UNROLL
      for (int b = 0; b < kPieceBytes; b++) {
        word |= uint(from[w * 4 + b]) << (8 * b);
      }
      set_word(words, w, word);
    }
  }
  void unpack(int piece, thread Operand (&run)[kPieceElements]) const thread {
    unpack_stored(word_of(words, piece), group, run);
  }
  // Decodes all of them to run[at] and on.
  template <int N>
  void unpack_to(thread Operand (&run)[N], int at) const thread {
    FATTN_UNROLL
    for (int piece = 0; piece < C / kPieceElements; piece++) {
      Operand elements[kPieceElements];
      unpack(piece, elements);
      FATTN_UNROLL
      for (int i = 0; i < kPieceElements; i++) {
        run[at + piece * kPieceElements + i] = elements[i];
      }
    }
  }
};
typedef StoredChunk<kKeyChunk> KeyChunk;
typedef StoredChunk<kValueChunk> ValueChunk;

}  // namespace fattn
