// The number types that have vectors, and the sizes of matrices.
#pragma once

#define SOFTMETAL_FOR_EACH_INTEGER(APPLY) \
  APPLY(char)                             \
  APPLY(uchar)                            \
  APPLY(short)                            \
  APPLY(ushort)                           \
  APPLY(int)                              \
  APPLY(uint)                             \
  APPLY(long)                             \
  APPLY(ulong)
#define SOFTMETAL_FOR_EACH_NUMBER(APPLY) \
  SOFTMETAL_FOR_EACH_INTEGER(APPLY)      \
  APPLY(half)                            \
  APPLY(bfloat)                          \
  APPLY(float)
#define SOFTMETAL_FOR_EACH_MATRIX(APPLY, T) \
  APPLY(T, 2, 2)                            \
  APPLY(T, 2, 3)                            \
  APPLY(T, 2, 4)                            \
  APPLY(T, 3, 2)                            \
  APPLY(T, 3, 3)                            \
  APPLY(T, 3, 4)                            \
  APPLY(T, 4, 2)                            \
  APPLY(T, 4, 3)                            \
  APPLY(T, 4, 4)
