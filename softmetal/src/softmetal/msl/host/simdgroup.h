// <metal_simdgroup>, <metal_compute>: barriers, reductions, prefix operations, shuffles, votes.
//
// Every operation is a rendezvous of the lanes that reach it (simt/passes/convergence.cpp): each lane stores
// its operand, and the last one computes all results.
#pragma once
#pragma clang system_header
#include "math.h"
#include "../common/line.h"

namespace softmetal {
template <class T>
SOFTMETAL_INLINE T& operand(softmetal_simdgroup* group, uint32_t lane) {
  return *(T*)group->in[lane];
}
template <class T>
SOFTMETAL_INLINE T& result(softmetal_simdgroup* group, uint32_t lane) {
  return *(T*)group->out[lane];
}
SOFTMETAL_INLINE bool is_active(const softmetal_simdgroup* group, int lane) {
  return lane >= 0 && lane < SOFTMETAL_SIMD_WIDTH && (group->active >> lane & 1);
}

template <class T>
SOFTMETAL_UNCHECKED T simd_operation(T value, int index, softmetal_simd_function function, Line line) {
  static_assert(sizeof(T) <= 16, "simdgroup operations take values of up to 16 bytes");
  softmetal_lane* lane = softmetal_current_lane();
  operand<T>(lane->simdgroup, lane->lane) = value;
  lane->simdgroup->in[lane->lane][2] = (uint64_t)(int64_t)index;
  softmetal_rendezvous(function, line.number);
  return result<T>(lane->simdgroup, lane->lane);
}

#define SOFTMETAL_COMBINE(NAME, EXPRESSION)     \
  struct NAME {                                 \
    template <class T>                          \
    SOFTMETAL_INLINE static T apply(T a, T b) { \
      return (T)(EXPRESSION);                   \
    }                                           \
  };
SOFTMETAL_COMBINE(Sum, a + b)
SOFTMETAL_COMBINE(Product, a* b)
SOFTMETAL_COMBINE(Maximum, metal::max(a, b))
SOFTMETAL_COMBINE(Minimum, metal::min(a, b))
SOFTMETAL_COMBINE(And, a& b)
SOFTMETAL_COMBINE(Or, a | b)
SOFTMETAL_COMBINE(Xor, a ^ b)
#undef SOFTMETAL_COMBINE

// The active lanes' values combined pairwise, as a butterfly of shuffles would.
template <class T, class Operation>
SOFTMETAL_UNCHECKED void reduce(softmetal_simdgroup* group) {
  ++softmetal_thread_counters()->simd_reductions;
  T values[SOFTMETAL_SIMD_WIDTH];
  int count = 0;
  for (int i = 0; i < SOFTMETAL_SIMD_WIDTH; ++i)
    if (is_active(group, i)) values[count++] = operand<T>(group, i);
  for (int stride = 1; stride < count; stride *= 2)
    for (int i = 0; i + stride < count; i += 2 * stride)
      values[i] = Operation::apply(values[i], values[i + stride]);
  for (int i = 0; i < SOFTMETAL_SIMD_WIDTH; ++i) result<T>(group, i) = values[0];
}

// In each run of `width` lanes.
template <class T, class Operation, bool inclusive, int width>
SOFTMETAL_UNCHECKED void scan(softmetal_simdgroup* group, T initial) {
  ++softmetal_thread_counters()->simd_reductions;
  T running = initial;
  for (int i = 0; i < SOFTMETAL_SIMD_WIDTH; ++i) {
    if (i % width == 0) running = initial;
    if (!is_active(group, i)) continue;
    const T next = Operation::apply(running, operand<T>(group, i));
    result<T>(group, i) = inclusive ? next : running;
    running = next;
  }
}
template <class T, bool inclusive, int width = SOFTMETAL_SIMD_WIDTH>
SOFTMETAL_UNCHECKED void scan_sum(softmetal_simdgroup* group) {
  scan<T, Sum, inclusive, width>(group, T(0));
}
template <class T, bool inclusive, int width = SOFTMETAL_SIMD_WIDTH>
SOFTMETAL_UNCHECKED void scan_product(softmetal_simdgroup* group) {
  scan<T, Product, inclusive, width>(group, T(1));
}

// The lane whose value `lane` takes; beyond the ends of the simdgroup, `lane` itself. The value of an
// inactive lane is undefined: here it is the lane's own, and recorded for the checks.
SOFTMETAL_INLINE int source_lane(softmetal_simdgroup* group, int lane, int source) {
  if (is_active(group, source)) return source;
  if (source >= 0 && source < SOFTMETAL_SIMD_WIDTH) {
    group->undefined |= 1u << lane;
    group->undefined_source = source;
  }
  return lane;
}

// Each lane takes the value of lane Source::of(lane, its index).
template <class T, class Source>
SOFTMETAL_UNCHECKED void shuffle(softmetal_simdgroup* group) {
  ++softmetal_thread_counters()->shuffles;
  for (int i = 0; i < SOFTMETAL_SIMD_WIDTH; ++i)
    if (is_active(group, i))
      result<T>(group, i) = operand<T>(group, source_lane(group, i, Source::of(i, (int)group->in[i][2])));
}
#define SOFTMETAL_SOURCE(NAME, EXPRESSION)                                     \
  struct NAME {                                                                \
    SOFTMETAL_INLINE static int of(int lane, int index) { return EXPRESSION; } \
  };
SOFTMETAL_SOURCE(Lane, (void(lane), index & 31))
SOFTMETAL_SOURCE(Xored, lane ^ index)
SOFTMETAL_SOURCE(Below, lane - index)
SOFTMETAL_SOURCE(Above, lane + index)
SOFTMETAL_SOURCE(RotatedBelow, (lane - index) & 31)
SOFTMETAL_SOURCE(RotatedAbove, (lane + index) & 31)
SOFTMETAL_SOURCE(QuadLane, (lane & ~3) | (index & 3))
SOFTMETAL_SOURCE(QuadBelow, lane % 4 >= index ? lane - index : lane)
SOFTMETAL_SOURCE(QuadAbove, lane % 4 + index < 4 ? lane + index : lane)
SOFTMETAL_SOURCE(QuadRotatedBelow, (lane & ~3) | ((lane - index) & 3))
SOFTMETAL_SOURCE(QuadRotatedAbove, (lane & ~3) | ((lane + index) & 3))
#undef SOFTMETAL_SOURCE

template <class T>
SOFTMETAL_UNCHECKED void broadcast_first(softmetal_simdgroup* group) {
  ++softmetal_thread_counters()->shuffles;
  const T first = operand<T>(group, __builtin_ctz(group->active));
  for (int i = 0; i < SOFTMETAL_SIMD_WIDTH; ++i) result<T>(group, i) = first;
}

// Shifts within each run of `modulo` lanes. If the source is outside the run, the result is the fill value of
// the lane it wraps around to.
template <class T, int direction>
SOFTMETAL_UNCHECKED void shuffle_and_fill(softmetal_simdgroup* group) {
  ++softmetal_thread_counters()->shuffles;
  for (int i = 0; i < SOFTMETAL_SIMD_WIDTH; ++i) {
    if (!is_active(group, i)) continue;
    const int delta = (int)group->in[i][2], modulo = (int)group->in[i][3], first = i / modulo * modulo;
    const int source = i - first + direction * delta;
    const bool inside = source >= 0 && source < modulo;
    const int from = source_lane(group, i, first + (source + modulo) % modulo);
    result<T>(group, i) = inside || from == i ? operand<T>(group, from) : *(T*)group->filling[from];
  }
}
template <class T, int direction>
SOFTMETAL_UNCHECKED T fill_operation(T value, T filling, int delta, int modulo, Line line) {
  static_assert(sizeof(T) <= 16, "simdgroup operations take values of up to 16 bytes");
  softmetal_lane* lane = softmetal_current_lane();
  operand<T>(lane->simdgroup, lane->lane) = value;
  *(T*)lane->simdgroup->filling[lane->lane] = filling;
  lane->simdgroup->in[lane->lane][2] = delta;
  lane->simdgroup->in[lane->lane][3] = modulo;
  softmetal_rendezvous(shuffle_and_fill<T, direction>, line.number);
  return result<T>(lane->simdgroup, lane->lane);
}

SOFTMETAL_UNCHECKED inline void ballot(softmetal_simdgroup* group) {
  ++softmetal_thread_counters()->simd_reductions;
  uint64_t votes = 0;
  for (int i = 0; i < SOFTMETAL_SIMD_WIDTH; ++i)
    if (is_active(group, i) && operand<uint64_t>(group, i)) votes |= uint64_t(1) << i;
  for (int i = 0; i < SOFTMETAL_SIMD_WIDTH; ++i) result<uint64_t>(group, i) = votes;
}
SOFTMETAL_UNCHECKED inline void active_lanes(softmetal_simdgroup* group) {
  for (int i = 0; i < SOFTMETAL_SIMD_WIDTH; ++i) result<uint64_t>(group, i) = group->active;
}
}  // namespace softmetal

namespace metal {
SOFTMETAL_INLINE void threadgroup_barrier(mem_flags flags, SOFTMETAL_LINE) {
  softmetal_threadgroup_barrier((int)flags, line.number);
}
SOFTMETAL_INLINE void simdgroup_barrier(mem_flags flags, SOFTMETAL_LINE) {
  softmetal_simdgroup_barrier((int)flags, line.number);
}

#define SOFTMETAL_SIMD(NAME, FUNCTION)                             \
  template <class T>                                               \
  SOFTMETAL_INLINE T NAME(T value, SOFTMETAL_LINE) {               \
    return softmetal::simd_operation<T>(value, 0, FUNCTION, line); \
  }
#define SOFTMETAL_REDUCTION(NAME, OPERATION) \
  SOFTMETAL_SIMD(NAME, (softmetal::reduce<T, softmetal::OPERATION>))
SOFTMETAL_REDUCTION(simd_sum, Sum)
SOFTMETAL_REDUCTION(simd_product, Product)
SOFTMETAL_REDUCTION(simd_max, Maximum)
SOFTMETAL_REDUCTION(simd_min, Minimum)
SOFTMETAL_REDUCTION(simd_and, And)
SOFTMETAL_REDUCTION(simd_or, Or)
SOFTMETAL_REDUCTION(simd_xor, Xor)
SOFTMETAL_SIMD(simd_prefix_inclusive_sum, (softmetal::scan_sum<T, true>))
SOFTMETAL_SIMD(simd_prefix_exclusive_sum, (softmetal::scan_sum<T, false>))
SOFTMETAL_SIMD(simd_prefix_inclusive_product, (softmetal::scan_product<T, true>))
SOFTMETAL_SIMD(simd_prefix_exclusive_product, (softmetal::scan_product<T, false>))
SOFTMETAL_SIMD(simd_broadcast_first, (softmetal::broadcast_first<T>))
#undef SOFTMETAL_REDUCTION
#undef SOFTMETAL_SIMD

#define SOFTMETAL_SHUFFLE(NAME, SOURCE)                                                                \
  template <class T>                                                                                   \
  SOFTMETAL_INLINE T NAME(T value, ushort index, SOFTMETAL_LINE) {                                     \
    return softmetal::simd_operation<T>(value, index, softmetal::shuffle<T, softmetal::SOURCE>, line); \
  }
SOFTMETAL_SHUFFLE(simd_shuffle, Lane)
SOFTMETAL_SHUFFLE(simd_broadcast, Lane)
SOFTMETAL_SHUFFLE(simd_shuffle_xor, Xored)
SOFTMETAL_SHUFFLE(simd_shuffle_up, Below)
SOFTMETAL_SHUFFLE(simd_shuffle_down, Above)
SOFTMETAL_SHUFFLE(simd_shuffle_rotate_up, RotatedBelow)
SOFTMETAL_SHUFFLE(simd_shuffle_rotate_down, RotatedAbove)
SOFTMETAL_SHUFFLE(quad_shuffle, QuadLane)
SOFTMETAL_SHUFFLE(quad_broadcast, QuadLane)
SOFTMETAL_SHUFFLE(quad_shuffle_xor, Xored)
SOFTMETAL_SHUFFLE(quad_shuffle_up, QuadBelow)
SOFTMETAL_SHUFFLE(quad_shuffle_down, QuadAbove)
SOFTMETAL_SHUFFLE(quad_shuffle_rotate_up, QuadRotatedBelow)
SOFTMETAL_SHUFFLE(quad_shuffle_rotate_down, QuadRotatedAbove)
#undef SOFTMETAL_SHUFFLE
#define SOFTMETAL_FILL(NAME, DIRECTION, WIDTH)                                               \
  template <class T>                                                                         \
  SOFTMETAL_INLINE T NAME(T value, T filling, ushort delta, SOFTMETAL_LINE) {                \
    return softmetal::fill_operation<T, DIRECTION>(value, filling, delta, WIDTH, line);      \
  }                                                                                          \
  template <class T>                                                                         \
  SOFTMETAL_INLINE T NAME(T value, T filling, ushort delta, ushort modulo, SOFTMETAL_LINE) { \
    return softmetal::fill_operation<T, DIRECTION>(value, filling, delta, modulo, line);     \
  }
SOFTMETAL_FILL(simd_shuffle_and_fill_up, -1, SOFTMETAL_SIMD_WIDTH)
SOFTMETAL_FILL(simd_shuffle_and_fill_down, 1, SOFTMETAL_SIMD_WIDTH)
SOFTMETAL_FILL(quad_shuffle_and_fill_up, -1, 4)
SOFTMETAL_FILL(quad_shuffle_and_fill_down, 1, 4)
#undef SOFTMETAL_FILL

struct simd_vote {
  using vote_t = ulong;
  vote_t votes;
  SOFTMETAL_INLINE explicit constexpr simd_vote(vote_t v = 0) : votes(v) {}
  SOFTMETAL_INLINE explicit constexpr operator vote_t() const { return votes; }
  SOFTMETAL_INLINE bool all() const { return votes == 0xffffffffu; }
  SOFTMETAL_INLINE bool any() const { return votes != 0; }
};
SOFTMETAL_INLINE simd_vote simd_ballot(bool vote, SOFTMETAL_LINE) {
  return simd_vote(softmetal::simd_operation<ulong>(vote, 0, softmetal::ballot, line));
}
SOFTMETAL_INLINE simd_vote simd_active_threads_mask(SOFTMETAL_LINE) {
  return simd_vote(softmetal::simd_operation<ulong>(0, 0, softmetal::active_lanes, line));
}
SOFTMETAL_INLINE bool simd_any(bool vote, SOFTMETAL_LINE) { return (ulong)simd_ballot(vote, line) != 0; }
SOFTMETAL_INLINE bool simd_all(bool vote, SOFTMETAL_LINE) { return (ulong)simd_ballot(!vote, line) == 0; }
SOFTMETAL_INLINE bool simd_is_first(SOFTMETAL_LINE) {
  return __builtin_ctzl((ulong)simd_active_threads_mask(line)) == softmetal_current_lane()->lane;
}
}  // namespace metal
