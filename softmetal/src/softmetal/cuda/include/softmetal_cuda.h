// Metal's standard library for a program that softmetal.cuda translated to CUDA C++20: what attention,
// softmax and matrix kernels use of it.
#pragma once

#include "binding.h"
#include "matrices.h"
#include "packed.h"
