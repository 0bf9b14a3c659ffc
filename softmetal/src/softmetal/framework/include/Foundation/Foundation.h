// <Foundation/Foundation.h> on Linux: GNUstep's Foundation, adapted for C++ code written for Apple's.
#pragma once
#include_next <Foundation/Foundation.h>

// GNUstep's MIN, MAX, ABS, _() and __() are macros that break C++ headers; its nil is (id)0, whereas Apple's
// converts to any pointer.
#undef MIN
#undef MAX
#undef ABS
#undef _
#undef __
#undef nil
#undef Nil
#define nil nullptr
#define Nil nullptr

typedef double CFTimeInterval;

#ifdef __cplusplus
#include <condition_variable>
#include <ctime>  // with the former: torch's MPS headers get them from libc++ on Apple

#ifndef CLOCK_UPTIME_RAW
#define CLOCK_UPTIME_RAW CLOCK_MONOTONIC
inline uint64_t clock_gettime_nsec_np(clockid_t clock) {
  timespec time;
  clock_gettime(clock, &time);
  return uint64_t(time.tv_sec) * 1000000000ull + uint64_t(time.tv_nsec);
}
#endif
#endif
