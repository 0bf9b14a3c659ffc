// The part of Metal's standard library that matrix and reduction kernels use, for programs that
// softmetal.cuda translated to CUDA C++20.
#pragma once

#include "binding.h"
#include "matrices.h"
#include "packed.h"
