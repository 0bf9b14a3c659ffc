// The line of a call, for messages.
#pragma once

// Default arguments fill it in; its type keeps callers from passing it.
#define SOFTMETAL_LINE ::softmetal::Line line = ::softmetal::Line(__builtin_LINE())

namespace softmetal {
struct Line {
  int number;
  SOFTMETAL_INLINE explicit constexpr Line(int n) : number(n) {}
};
}  // namespace softmetal
