// Single-precision functions, twice: namespace precise and namespace fast, by tables 8.1 and 8.2 of the Metal
// Shading Language specification ("Numerical compliance").
//
// Fast functions read and write subnormal numbers as zero. Functions that the specification defines by
// formulas use these formulas: fast tanh of a large number is NaN, and so is fast pow of a negative one.
// compile.py chooses the error of the results: SOFTMETAL_WORST_MATH is 0 for the host's most accurate
// results, 1 for the largest error that the tables permit, up or down depending on the bits of the argument.
#pragma once
#pragma clang system_header
#include "integer.h"

extern "C" {
float exp10f(float);
double exp10(double);
}
// 1 where the hardware's functions are fast math themselves (agx/include): it is not emulated.
#ifndef SOFTMETAL_HARDWARE_MATH
#define SOFTMETAL_HARDWARE_MATH 0
#endif

namespace softmetal {
SOFTMETAL_INLINE float flushed(float x) {
  return !SOFTMETAL_HARDWARE_MATH && __builtin_fabsf(x) < 0x1p-126f ? __builtin_copysignf(0.0f, x) : x;
}
SOFTMETAL_INLINE float rounds_up(float argument) {
  const uint bits = __builtin_bit_cast(uint, argument) * 0x9E3779B1u;
  return bits >> 31;
}
// Returns the float furthest from `exact` within `distance` of it. Zeros, infinities and NaN are unchanged.
SOFTMETAL_INLINE float off_by_distance(double exact, double distance, float argument) {
  if (exact == 0.0 || !__builtin_isfinite((float)exact)) return (float)exact;
  const bool up = rounds_up(argument);
  const double target = up ? exact + distance : exact - distance;
  float result = (float)target;
  if (up ? result > target : result < target)
    result = __builtin_nextafterf(result, up ? -__builtin_inff() : __builtin_inff());
  return (up ? result >= exact : result <= exact) ? result : (float)exact;
}
SOFTMETAL_INLINE float off_by_ulps(double exact, double ulps, float argument) {
  if (exact == 0.0 || !__builtin_isfinite((float)exact)) return (float)exact;
  const int exponent = __builtin_ilogb(exact);
  return off_by_distance(exact, __builtin_ldexp(ulps, (exponent < -126 ? -126 : exponent) - 23), argument);
}

// A half result with one ulp of error; the tables of half have no fast column.
SOFTMETAL_INLINE half half_result(float exact) {
#if SOFTMETAL_WORST_MATH
  const ushort bits = __builtin_bit_cast(ushort, (half)exact);
  const bool has_neighbours = (bits & 0x7fffu) > 0x0400u && (bits & 0x7fffu) < 0x7bffu;
  const float nearest = (float)(half)exact;
  // The neighbour on the other side of the exact value is less than one ulp from it.
  const bool away = __builtin_fabsf(nearest) > __builtin_fabsf(exact);
  return has_neighbours && exact != nearest ? __builtin_bit_cast(half, ushort(away ? bits - 1 : bits + 1))
                                            : (half)exact;
#else
  return (half)exact;
#endif
}

#if SOFTMETAL_WORST_MATH
#define SOFTMETAL_RESULT(FLOAT, DOUBLE, ULPS) off_by_ulps(DOUBLE, ULPS, x)
#define SOFTMETAL_RESULT_WITHIN(FLOAT, DOUBLE, DISTANCE) off_by_distance(DOUBLE, DISTANCE, x)
#else
#define SOFTMETAL_RESULT(FLOAT, DOUBLE, ULPS) (FLOAT)
#define SOFTMETAL_RESULT_WITHIN(FLOAT, DOUBLE, DISTANCE) (FLOAT)
#endif

constexpr double kPi = 3.14159265358979323846;

namespace precise {
#define SOFTMETAL_PRECISE(NAME, FLOAT, DOUBLE, ULPS) \
  SOFTMETAL_INLINE float NAME(float x) { return SOFTMETAL_RESULT(FLOAT(x), DOUBLE((double)x), ULPS); }
SOFTMETAL_PRECISE(acos, __builtin_acosf, __builtin_acos, 4)
SOFTMETAL_PRECISE(acosh, __builtin_acoshf, __builtin_acosh, 4)
SOFTMETAL_PRECISE(asin, __builtin_asinf, __builtin_asin, 4)
SOFTMETAL_PRECISE(asinh, __builtin_asinhf, __builtin_asinh, 4)
SOFTMETAL_PRECISE(atan, __builtin_atanf, __builtin_atan, 5)
SOFTMETAL_PRECISE(atanh, __builtin_atanhf, __builtin_atanh, 5)
SOFTMETAL_PRECISE(cos, __builtin_cosf, __builtin_cos, 4)
SOFTMETAL_PRECISE(cosh, __builtin_coshf, __builtin_cosh, 4)
SOFTMETAL_PRECISE(exp, __builtin_expf, __builtin_exp, 4)
SOFTMETAL_PRECISE(exp2, __builtin_exp2f, __builtin_exp2, 4)
SOFTMETAL_PRECISE(exp10, ::exp10f, ::exp10, 4)
SOFTMETAL_PRECISE(log, __builtin_logf, __builtin_log, 4)
SOFTMETAL_PRECISE(log2, __builtin_log2f, __builtin_log2, 4)
SOFTMETAL_PRECISE(log10, __builtin_log10f, __builtin_log10, 4)
SOFTMETAL_PRECISE(sin, __builtin_sinf, __builtin_sin, 4)
SOFTMETAL_PRECISE(sinh, __builtin_sinhf, __builtin_sinh, 4)
SOFTMETAL_PRECISE(tan, __builtin_tanf, __builtin_tan, 6)
SOFTMETAL_PRECISE(tanh, __builtin_tanhf, __builtin_tanh, 5)
#undef SOFTMETAL_PRECISE
// Reduces in double: x mod 2 is exact, and so are multiples of 1/2.
SOFTMETAL_INLINE double reduced(float x) { return x - 2.0 * __builtin_rint(x * 0.5); }
SOFTMETAL_INLINE double sinpi_of(float x) {
  const double r = reduced(x);
  return r == __builtin_rint(r) ? __builtin_copysign(0.0, x) : __builtin_sin(kPi * r);
}
SOFTMETAL_INLINE double cospi_of(float x) {
  const double r = __builtin_fabs(reduced(x));
  return r == 0.5 ? 0.0 : __builtin_cos(kPi * r);
}
SOFTMETAL_INLINE float sinpi(float x) { return SOFTMETAL_RESULT((float)sinpi_of(x), sinpi_of(x), 4); }
SOFTMETAL_INLINE float cospi(float x) { return SOFTMETAL_RESULT((float)cospi_of(x), cospi_of(x), 4); }
SOFTMETAL_INLINE float tanpi(float x) {
  const double exact = sinpi_of(x) / cospi_of(x);
  return SOFTMETAL_RESULT((float)exact, exact, 6);
}
SOFTMETAL_INLINE float sqrt(float x) { return __builtin_sqrtf(x); }
SOFTMETAL_INLINE float rsqrt(float x) { return (float)(1.0 / __builtin_sqrt((double)x)); }
SOFTMETAL_INLINE float divide(float x, float y) { return x / y; }
SOFTMETAL_INLINE float pow(float x, float y) {
  return SOFTMETAL_RESULT(__builtin_powf(x, y), __builtin_pow((double)x, (double)y), 16);
}
// pow for x >= 0, as exp2(y * log2(x)): 0 to the 0 and infinity to the 0 are undefined.
SOFTMETAL_INLINE float powr(float x, float y) {
  const bool undefined = x < 0.0f || (y == 0.0f && (x == 0.0f || __builtin_isinf(x))) ||
                         (x == 1.0f && __builtin_isinf(y)) || __builtin_isnan(x) || __builtin_isnan(y);
  return undefined ? __builtin_nanf("") : pow(__builtin_fabsf(x), y);
}
SOFTMETAL_INLINE float atan2(float y, float x) {
  return SOFTMETAL_RESULT(__builtin_atan2f(y, x), __builtin_atan2((double)y, (double)x), 6);
}
}  // namespace precise

namespace fast {
#define SOFTMETAL_FAST(NAME, FLOAT, DOUBLE, ULPS)                        \
  SOFTMETAL_INLINE float NAME(float x) {                                 \
    x = flushed(x);                                                      \
    return flushed(SOFTMETAL_RESULT(FLOAT(x), DOUBLE((double)x), ULPS)); \
  }
SOFTMETAL_FAST(exp, __builtin_expf, __builtin_exp, 3 + __builtin_floor(2.0 * __builtin_fabs(x)))
SOFTMETAL_FAST(exp2, __builtin_exp2f, __builtin_exp2, 3 + __builtin_floor(2.0 * __builtin_fabs(x)))
SOFTMETAL_FAST(acos, __builtin_acosf, __builtin_acos, 5)
SOFTMETAL_FAST(asin, __builtin_asinf, __builtin_asin, 5)
SOFTMETAL_FAST(atan, __builtin_atanf, __builtin_atan, 5)
SOFTMETAL_FAST(rsqrt, precise::rsqrt, 1.0 / __builtin_sqrt, 2)
#undef SOFTMETAL_FAST
// Around 1 the bound is absolute: near the zero of the logarithm no digit needs to be correct.
#define SOFTMETAL_FAST_LOG(NAME, FLOAT, DOUBLE, DISTANCE, ULPS)                                \
  SOFTMETAL_INLINE float NAME(float x) {                                                       \
    x = flushed(x);                                                                            \
    if (x >= 0.5f && x <= 2.0f) return SOFTMETAL_RESULT_WITHIN(FLOAT(x), DOUBLE(x), DISTANCE); \
    return SOFTMETAL_RESULT(FLOAT(x), DOUBLE(x), ULPS);                                        \
  }
SOFTMETAL_FAST_LOG(log, __builtin_logf, __builtin_log, 0x1p-21, 3)
SOFTMETAL_FAST_LOG(log2, __builtin_log2f, __builtin_log2, 0x1p-22, 2)
#undef SOFTMETAL_FAST_LOG
// Outside one period the specification only says "larger"; here the error grows with the argument.
#define SOFTMETAL_FAST_PERIODIC(NAME, FLOAT, DOUBLE, PERIOD)                        \
  SOFTMETAL_INLINE float NAME(float x) {                                            \
    x = flushed(x);                                                                 \
    const double growth = __builtin_fmax(1.0, __builtin_fabs(x) / (PERIOD));        \
    (void)growth;                                                                   \
    return flushed(SOFTMETAL_RESULT_WITHIN(FLOAT(x), DOUBLE(x), 0x1p-13 * growth)); \
  }
SOFTMETAL_FAST_PERIODIC(sin, __builtin_sinf, __builtin_sin, kPi)
SOFTMETAL_FAST_PERIODIC(cos, __builtin_cosf, __builtin_cos, kPi)
SOFTMETAL_FAST_PERIODIC(sinpi, precise::sinpi, precise::sinpi_of, 1.0)
SOFTMETAL_FAST_PERIODIC(cospi, precise::cospi, precise::cospi_of, 1.0)
#undef SOFTMETAL_FAST_PERIODIC
SOFTMETAL_INLINE float divide(float y, float x) {
  y = flushed(y), x = flushed(x);
  // Past 2^126 the reciprocal of the divisor is subnormal.
  if (!SOFTMETAL_HARDWARE_MATH && __builtin_fabsf(x) > 0x1p126f && !__builtin_isinf(x))
    return y * __builtin_copysignf(0.0f, x);
  return flushed(SOFTMETAL_RESULT(y / x, (double)y / (double)x, y == 1.0f ? 1.0 : 2.5));
}
SOFTMETAL_INLINE float sqrt(float x) {
  x = flushed(x);
  return x == 0.0f || (__builtin_isinf(x) && x > 0) ? x : x * rsqrt(x);
}
SOFTMETAL_INLINE float exp10(float x) { return exp2(x * 3.32192809488736234787f); }
SOFTMETAL_INLINE float log10(float x) { return log2(x) * 0.30102999566398119521f; }
SOFTMETAL_INLINE float pow(float x, float y) { return exp2(y * log2(x)); }
SOFTMETAL_INLINE float powr(float x, float y) { return exp2(y * log2(x)); }
SOFTMETAL_INLINE float tan(float x) { return sin(x) * divide(1.0f, cos(x)); }
SOFTMETAL_INLINE float tanpi(float x) { return tan(x * (float)kPi); }
SOFTMETAL_INLINE float sinh(float x) { return 0.5f * (exp(x) - exp(-x)); }
SOFTMETAL_INLINE float cosh(float x) { return 0.5f * (exp(x) + exp(-x)); }
SOFTMETAL_INLINE float tanh(float x) {
  const float t = exp(2.0f * x);
  return divide(t - 1.0f, t + 1.0f);
}
SOFTMETAL_INLINE float asinh(float x) { return log(x + sqrt(x * x + 1.0f)); }
SOFTMETAL_INLINE float acosh(float x) { return log(x + sqrt(x * x - 1.0f)); }
SOFTMETAL_INLINE float atanh(float x) { return 0.5f * log(divide(1.0f + x, 1.0f - x)); }
SOFTMETAL_INLINE float atan2(float y, float x) {
  y = flushed(y), x = flushed(x);
  if (x > 0.0f) return atan(divide(y, x));
  if (x < 0.0f) return atan(divide(y, x)) + __builtin_copysignf((float)kPi, y);
  return y == 0.0f ? 0.0f : __builtin_copysignf((float)(kPi / 2), y);
}
}  // namespace fast
#undef SOFTMETAL_RESULT
#undef SOFTMETAL_RESULT_WITHIN
}  // namespace softmetal
