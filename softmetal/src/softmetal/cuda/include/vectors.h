// metal::vec<T, 2..4> with Metal's sizes and alignments: a vector load is one instruction.
#pragma once

#include "../../msl/common/names.h"
#include "numbers.h"

namespace metal {

template <typename T, int N>
struct vec;

#define SOFTMETAL_ELEMENT_ACCESS                                      \
  SOFTMETAL_INLINE constexpr T& operator[](int i) { return (&x)[i]; } \
  SOFTMETAL_INLINE constexpr const T& operator[](int i) const { return (&x)[i]; }

template <typename T>
struct alignas(2 * sizeof(T)) vec<T, 2> {
  T x, y;

  vec() = default;
  template <softmetal::Scalar A>
  SOFTMETAL_INLINE constexpr vec(A s) : x(T(s)), y(T(s)) {}
  template <softmetal::Scalar A, softmetal::Scalar B>
  SOFTMETAL_INLINE constexpr vec(A a, B b) : x(T(a)), y(T(b)) {}
  template <typename U>
  SOFTMETAL_INLINE constexpr explicit vec(vec<U, 2> v) : x(T(v.x)), y(T(v.y)) {}
  SOFTMETAL_ELEMENT_ACCESS
};

template <typename T>
struct alignas(4 * sizeof(T)) vec<T, 3> {
  T x, y, z;

  vec() = default;
  template <softmetal::Scalar A>
  SOFTMETAL_INLINE constexpr vec(A s) : x(T(s)), y(T(s)), z(T(s)) {}
  template <softmetal::Scalar A, softmetal::Scalar B, softmetal::Scalar C>
  SOFTMETAL_INLINE constexpr vec(A a, B b, C c) : x(T(a)), y(T(b)), z(T(c)) {}
  template <typename U>
  SOFTMETAL_INLINE constexpr explicit vec(vec<U, 3> v) : x(T(v.x)), y(T(v.y)), z(T(v.z)) {}
  template <softmetal::Scalar C>
  SOFTMETAL_INLINE constexpr vec(vec<T, 2> v, C c) : x(v.x), y(v.y), z(T(c)) {}
  SOFTMETAL_ELEMENT_ACCESS
};

template <typename T>
struct alignas(4 * sizeof(T)) vec<T, 4> {
  T x, y, z, w;

  vec() = default;
  template <softmetal::Scalar A>
  SOFTMETAL_INLINE constexpr vec(A s) : x(T(s)), y(T(s)), z(T(s)), w(T(s)) {}
  template <softmetal::Scalar A, softmetal::Scalar B, softmetal::Scalar C, softmetal::Scalar D>
  SOFTMETAL_INLINE constexpr vec(A a, B b, C c, D d) : x(T(a)), y(T(b)), z(T(c)), w(T(d)) {}
  template <typename U>
  SOFTMETAL_INLINE constexpr explicit vec(vec<U, 4> v) : x(T(v.x)), y(T(v.y)), z(T(v.z)), w(T(v.w)) {}
  SOFTMETAL_INLINE constexpr vec(vec<T, 2> a, vec<T, 2> b) : x(a.x), y(a.y), z(b.x), w(b.y) {}
  template <softmetal::Scalar D>
  SOFTMETAL_INLINE constexpr vec(vec<T, 3> v, D d) : x(v.x), y(v.y), z(v.z), w(T(d)) {}
  SOFTMETAL_ELEMENT_ACCESS
};
#undef SOFTMETAL_ELEMENT_ACCESS

// Metal's public headers have no longer vectors, but MLX's kernels use them.
template <typename T, int N>
  requires(N > 4)
struct vec<T, N> {
  T elements[N];

  vec() = default;
  template <softmetal::Scalar A>
  SOFTMETAL_INLINE constexpr vec(A s) {
#pragma unroll
    for (T& element : elements) element = T(s);
  }
  SOFTMETAL_INLINE constexpr T& operator[](int i) { return elements[i]; }
  SOFTMETAL_INLINE constexpr const T& operator[](int i) const { return elements[i]; }
};

#define SOFTMETAL_VECTOR_OPERATOR(op)                                          \
  template <typename T, int N>                                                 \
  SOFTMETAL_INLINE constexpr vec<T, N> operator op(vec<T, N> a, vec<T, N> b) { \
    _Pragma("unroll") for (int i = 0; i < N; ++i) a[i] = T(a[i] op b[i]);      \
    return a;                                                                  \
  }                                                                            \
  template <typename T, int N, softmetal::Scalar S>                            \
  SOFTMETAL_INLINE constexpr vec<T, N> operator op(vec<T, N> a, S b) {         \
    return a op vec<T, N>(b);                                                  \
  }                                                                            \
  template <typename T, int N, softmetal::Scalar S>                            \
  SOFTMETAL_INLINE constexpr vec<T, N> operator op(S a, vec<T, N> b) {         \
    return vec<T, N>(a) op b;                                                  \
  }                                                                            \
  template <typename T, int N, typename U>                                     \
  SOFTMETAL_INLINE constexpr vec<T, N>& operator op##=(vec<T, N>& a, U b) {    \
    return a = a op b;                                                         \
  }
SOFTMETAL_VECTOR_OPERATOR(+)
SOFTMETAL_VECTOR_OPERATOR(-)
SOFTMETAL_VECTOR_OPERATOR(*)
SOFTMETAL_VECTOR_OPERATOR(/)
SOFTMETAL_VECTOR_OPERATOR(&)
SOFTMETAL_VECTOR_OPERATOR(|)
SOFTMETAL_VECTOR_OPERATOR(^)
#undef SOFTMETAL_VECTOR_OPERATOR

// Two halves are one operation.
#define SOFTMETAL_HALF2_OPERATOR(op, instruction)                              \
  SOFTMETAL_INLINE vec<half, 2> operator op(vec<half, 2> a, vec<half, 2> b) {  \
    uint result;                                                               \
    asm(instruction " %0, %1, %2;"                                             \
        : "=r"(result)                                                         \
        : "r"(__builtin_bit_cast(uint, a)), "r"(__builtin_bit_cast(uint, b))); \
    return __builtin_bit_cast(vec<half, 2>, result);                           \
  }
SOFTMETAL_HALF2_OPERATOR(+, "add.rn.f16x2")
SOFTMETAL_HALF2_OPERATOR(-, "sub.rn.f16x2")
SOFTMETAL_HALF2_OPERATOR(*, "mul.rn.f16x2")
#undef SOFTMETAL_HALF2_OPERATOR

template <typename T, int N>
SOFTMETAL_INLINE constexpr vec<T, N> operator-(vec<T, N> a) {
#pragma unroll
  for (int i = 0; i < N; ++i) a[i] = -a[i];
  return a;
}

template <typename T, int N>
SOFTMETAL_INLINE constexpr T dot(vec<T, N> a, vec<T, N> b) {
  T sum = a.x * b.x;
#pragma unroll
  for (int i = 1; i < N; ++i) sum += a[i] * b[i];
  return sum;
}

#define SOFTMETAL_VECTOR_NAMES(T) \
  typedef vec<T, 2> T##2;         \
  typedef vec<T, 3> T##3;         \
  typedef vec<T, 4> T##4;
SOFTMETAL_VECTOR_NAMES(bool)
SOFTMETAL_FOR_EACH_NUMBER(SOFTMETAL_VECTOR_NAMES)
#undef SOFTMETAL_VECTOR_NAMES

}  // namespace metal

namespace softmetal {

#ifdef SOFTMETAL_ALIGNED_RUNS  // the caller's promise (runs.py)
constexpr bool kAlignedRuns = true;
#else
constexpr bool kAlignedRuns = false;
#endif

// Loads chunks of read-only memory. Not volatile, so that the compiler merges equal loads.
template <int bytes>
struct Chunk;
template <>
struct Chunk<4> {
  uint words[1];
  SOFTMETAL_INLINE explicit Chunk(const void* address) {
    asm("ld.global.nc.u32 %0, [%1];" : "=r"(words[0]) : "l"(__cvta_generic_to_global(address)));
  }
};
template <>
struct Chunk<8> {
  uint words[2];
  SOFTMETAL_INLINE explicit Chunk(const void* address) {
    asm("ld.global.nc.v2.u32 {%0, %1}, [%2];"
        : "=r"(words[0]), "=r"(words[1])
        : "l"(__cvta_generic_to_global(address)));
  }
};
template <>
struct Chunk<16> {
  uint words[4];
  SOFTMETAL_INLINE explicit Chunk(const void* address) {
    asm("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
        : "l"(__cvta_generic_to_global(address)));
  }
};

// n neighbours that are aligned to their size, or 16 bytes, and that no thread writes, as the caller promised
// (runs.py). Each element comes from a load of its chunk.
template <int n, typename T>
struct Run {
  const T* start;

  SOFTMETAL_INLINE T operator[](int i) const {
    constexpr int run_bytes = (n & -n) * int(sizeof(T));
    constexpr int bytes = run_bytes < 16 ? run_bytes : 16;
    if constexpr (bytes < 4 || sizeof(T) > 4) {
      return start[i];
    } else {
      constexpr int elements = bytes / int(sizeof(T));
      const int at = i % elements * int(sizeof(T));
      const uint word = Chunk<bytes>(start + i / elements * elements).words[at / 4];
      if constexpr (sizeof(T) == 4) {
        return __builtin_bit_cast(T, word);
      } else if constexpr (sizeof(T) == 1) {
        return __builtin_bit_cast(T, uchar(word >> (8 * (at % 4))));
      } else {
        return __builtin_bit_cast(T, ushort(word >> (8 * (at % 4))));
      }
    }
  }
};

template <int n, typename T>
SOFTMETAL_INLINE Run<n, T> run(const T* start) {
  return {start};
}

// One load instruction: an empty asm statement that uses all words keeps the compiler from loading parts.
SOFTMETAL_INLINE uint2 load_words(const uint2* address) {
  uint2 words = *address;
  asm("" : "+r"(words.x), "+r"(words.y));
  return words;
}
SOFTMETAL_INLINE uint4 load_words(const uint4* address) {
  uint4 words = *address;
  asm("" : "+r"(words.x), "+r"(words.y), "+r"(words.z), "+r"(words.w));
  return words;
}

// The same for memory that may be written.
template <int n, typename T>
struct RunOfAny {
  const T* start;

  SOFTMETAL_INLINE T operator[](int i) const {
    constexpr int run_bytes = (n & -n) * int(sizeof(T));
    if constexpr (run_bytes >= 16) {
      return element<uint4>(i);
    } else if constexpr (run_bytes == 8) {
      return element<uint2>(i);
    } else {
      return start[i];
    }
  }

 private:
  template <typename Words>
  SOFTMETAL_INLINE T element(int i) const {
    constexpr int elements = sizeof(Words) / sizeof(T);
    const Words words = load_words(reinterpret_cast<const Words*>(start) + i / elements);
    T chunk[elements];
    __builtin_memcpy(chunk, &words, sizeof words);
    return chunk[i % elements];
  }
};

template <int n, typename T>
SOFTMETAL_INLINE RunOfAny<n, std::remove_const_t<T>> run_of_any(T* start) {
  return {start};
}
template <int n, typename T>
  requires(!std::is_pointer_v<T>)
SOFTMETAL_INLINE T& run_of_any(T& indexed) {
  return indexed;
}

}  // namespace softmetal

template <typename To, typename From>
SOFTMETAL_INLINE constexpr To as_type(From from) {
  static_assert(sizeof(To) == sizeof(From), "as_type needs two types of one size");
  return __builtin_bit_cast(To, from);
}
