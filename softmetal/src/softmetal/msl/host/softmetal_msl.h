// The header of every translated program: MSL's types and standard library on the host.
//
// Namespace metal contains only names that Apple's namespace has; namespace softmetal contains the rest.
#pragma once
#pragma clang system_header
#include "types.h"
#include "traits.h"
#include "vectors.h"
#include "braces.h"
#include "casts.h"
#include "integer.h"
#include "math.h"
#include "relational.h"
#include "scalar_first.h"
#include "geometric.h"
#include "matrix.h"
#include "pack.h"
#include "texture.h"
#include "stages.h"
#include "../common/uniform.h"
#include "simdgroup.h"
#include "quad.h"
#include "simdgroup_matrix.h"
#include "atomics.h"
#include "fence.h"
#include "logging.h"
#include "binding.h"
#include "internals.h"
#include "tensor_reductions.h"
