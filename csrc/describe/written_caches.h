// The checks of caches that an op writes, shared by cache_write and rotary_write.
#pragma once

#include "tensor_checks.h"

namespace fattn {

// A pair of caches, and their scales; undefined without scales.
struct WrittenCaches {
  KvFormat format;
  at::Tensor key_cache;
  at::Tensor value_cache;
  at::Tensor key_scales{};
  at::Tensor value_scales{};

  // Whether rows must be copied before the caches are written: they alias one, or their columns are apart.
  bool need_copy(const at::Tensor& rows) const;
  // Another operand, which may be undefined, or a copy if it aliases one of them.
  at::Tensor readable(const at::Tensor& tensor) const;

 private:
  bool may_alias(const at::Tensor& tensor) const;
};

// Checks everything that protects the caller's memory. Dimension 1 of key and value counts heads.
WrittenCaches check_written_caches(const char* op, const Arguments& arguments);
// Adds their format, sizes and strides to a problem.
void add_caches(CacheWriteProblem& problem, const WrittenCaches& caches);
void check_slot_dtype(const char* op, const char* name, const at::Tensor& slots);

// Whether two tensors, which may be undefined, have elements in common. Tensors with gaps may interleave, and
// count only if they begin together.
bool share_elements(const at::Tensor& a, const at::Tensor& b);
// Whether four columns of every row can be read or written with one access.
bool is_multiple(const at::Tensor& tensor);

}  // namespace fattn
