// Checks of tensors: rank, device, sizes, dtypes. Each error is one sentence.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include <c10/util/Exception.h>

#include "calls.h"
#include "../plan/kv_format.h"

namespace fattn {

DType dtype_of(at::ScalarType type);
at::ScalarType scalar_type_of(DType dtype);  // floating dtypes only
std::string dtype_name(const at::Tensor& tensor);

void check_rank(const char* op, const char* name, const at::Tensor& tensor, int64_t rank,
                std::string_view shape);
// `first` is the op's first tensor; the others must be on its device.
void check_device(const char* op, const char* name, const at::Tensor& tensor, const at::Tensor& first,
                  const char* first_name = "query");
void check_same_size(const char* op, const char* what, const char* left_name, int64_t left,
                     const char* right_name, int64_t right);
// The head size of query or new keys must be that of the cache, which may be quantised.
void check_head_dim(const char* op, const char* rows_name, int64_t head_dim, const char* cache_name,
                    const at::Tensor& cache, KvFormat format);
void check_float(const char* op, const char* name, const at::Tensor& tensor);
// Advises to convert the right one.
void check_same_dtype(const char* op, const char* left_name, const at::Tensor& left, const char* right_name,
                      const at::Tensor& right);
// A tensor of factors is in the dtype of the rows or in float32.
void check_factor_dtype(const char* op, const char* name, const at::Tensor& factor, const at::Tensor& rows,
                        const char* rows_name = "query");
void check_int32(const char* op, const char* name, const at::Tensor& tensor);

// The index of a name among those of an argument.
template <size_t count>
int choice_of(const char* op, const char* what, std::string_view given, const char* const (&names)[count]) {
  std::string choices;
  for (size_t i = 0; i < count; ++i) {
    if (given == names[i]) return static_cast<int>(i);
    choices += (i == 0 ? "\"" : i + 1 < count ? "\", \"" : "\" or \"") + std::string(names[i]);
  }
  TORCH_CHECK_VALUE(false, op, ": ", what, " \"", given, "\" is not known; pass ", choices, "\"");
}

// Returns the format of a pair of caches; raises if kv_format does not match their dtypes.
KvFormat check_kv_format(const char* op, std::string_view kv_format, const at::Tensor& key_cache,
                         const at::Tensor& value_cache, const char* key_name = "key_cache",
                         const char* value_name = "value_cache");
// Whether a cache [.., columns] has scales. Checks their dtype and shape: float32 [..], or for int4 float16
// [.., head_dim / 32, 2] with the last two dimensions contiguous.
bool check_scales(const char* op, const char* name, const OptionalTensor& scales, const char* cache_name,
                  const at::Tensor& cache, KvFormat format);

}  // namespace fattn
