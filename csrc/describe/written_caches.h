// The caches that cache_write and rotary_write write, and checks of written tensors.
#pragma once

#include "tensor_checks.h"

namespace fattn {

// Adds key and value, in which dimension 1 counts heads, their caches and scales. Checks everything that
// protects the caller's memory.
void add_written_caches(const char* op, const Arguments& arguments, WriteOperands& call,
                        CacheWriteProblem& problem);
void check_slot_dtype(const char* op, const char* name, const at::Tensor& slots);

// Whether rows must be copied before the caches are written: they alias one, or their columns are apart.
bool need_copy(const WriteOperands& call, const at::Tensor& rows);
// Another operand, which may be undefined, or a copy if it aliases a cache.
at::Tensor readable(const WriteOperands& call, const at::Tensor& tensor);

// Checks a tensor that is written in place: each element has its own memory, and columns are adjacent.
void check_written(const char* op, const char* name, const at::Tensor& tensor, const at::Tensor& first,
                   const char* first_name);
// Whether the memory ranges of two tensors meet.
bool may_share(const at::Tensor& a, const at::Tensor& b);

// Whether two tensors, which may be undefined, have elements in common. Tensors with gaps may interleave, and
// count only if they begin together.
bool share_elements(const at::Tensor& a, const at::Tensor& b);
// Whether four columns of every row can be read or written with one access.
bool is_multiple(const at::Tensor& tensor);

}  // namespace fattn
