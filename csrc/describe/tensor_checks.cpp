#include "tensor_checks.h"

#include <variant>

#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

namespace fattn {

using at::Tensor;

DType dtype_of(at::ScalarType type) {
  switch (type) {
    case at::kFloat:
      return DType::kFloat32;
    case at::kHalf:
      return DType::kFloat16;
    case at::kBFloat16:
      return DType::kBFloat16;
    case at::kBool:
      return DType::kBool;
    case at::kChar:
      return DType::kInt8;
    case at::kByte:
      return DType::kUInt8;
    default:
      return DType::kOther;
  }
}

at::ScalarType scalar_type_of(DType dtype) {
  if (dtype == DType::kFloat16) return at::kHalf;
  return dtype == DType::kBFloat16 ? at::kBFloat16 : at::kFloat;
}

std::string dtype_name(const Tensor& tensor) {
  return "torch." + std::string(c10::getDtypeNames(tensor.scalar_type()).first);
}

void check_rank(const char* op, const char* name, const Tensor& tensor, int64_t rank,
                std::string_view shape) {
  TORCH_CHECK_TYPE(tensor.defined(), op, ": ", name, " is None; pass a tensor of shape ", shape);
  TORCH_CHECK_VALUE(tensor.dim() == rank, op, ": ", name, " has ", tensor.dim(),
                    " dimensions; its shape must be ", shape);
}

void check_device(const char* op, const char* name, const Tensor& tensor, const Tensor& first,
                  const char* first_name) {
  // Advises to move the tensor on the CPU to the GPU.
  const bool is_far = first.is_cpu() && !tensor.is_meta();
  TORCH_CHECK_VALUE(tensor.device() == first.device(), op, ": ", name, " is on ", tensor.device(), " and ",
                    first_name, " on ", first.device(), "; move ", is_far ? first_name : name, " with .to(",
                    is_far ? name : first_name, ".device)");
}

void check_same_size(const char* op, const char* what, const char* left_name, int64_t left,
                     const char* right_name, int64_t right) {
  if (left == right) return;
  std::string advice = "they must be equal";
  // The batch is the outermost dimension of every operand that has one.
  if (what == std::string_view("batch size") && (left == 1 || right == 1)) {
    advice += std::string(": .expand() ") + (left == 1 ? left_name : right_name) + " to " +
              std::to_string(left == 1 ? right : left) + " sequences";
  }
  TORCH_CHECK_VALUE(false, op, ": ", left_name, " has ", what, " ", left, " and ", right_name, " has ", right,
                    "; ", advice);
}

void check_head_dim(const char* op, const char* rows_name, int64_t head_dim, const char* cache_name,
                    const Tensor& cache, KvFormat format) {
  const int64_t stored = cache.size(-1), columns = head_dim_of(format, stored);
  if (columns == stored) return check_same_size(op, "head_dim", rows_name, head_dim, cache_name, columns);
  TORCH_CHECK_VALUE(head_dim == columns, op, ": ", rows_name, " has head_dim ", head_dim, " and ", cache_name,
                    " has ", stored, " bytes (", columns, " columns of ", name_of(format),
                    "); they must be equal");
}

void check_float(const char* op, const char* name, const Tensor& tensor) {
  const at::ScalarType type = tensor.scalar_type();
  TORCH_CHECK_TYPE(is_float(dtype_of(type)), op, ": ", name, " is ", dtype_name(tensor),
                   " and must be torch.float32, torch.float16 or torch.bfloat16",
                   at::isFloatingType(type) ? "; convert it with .float()" : "");
}

void check_same_dtype(const char* op, const char* left_name, const Tensor& left, const char* right_name,
                      const Tensor& right) {
  TORCH_CHECK_TYPE(left.scalar_type() == right.scalar_type(), op, ": ", left_name, " is ", dtype_name(left),
                   " and ", right_name, " ", dtype_name(right), "; convert ", right_name, " with .to(",
                   left_name, ".dtype)");
}

void check_factor_dtype(const char* op, const char* name, const Tensor& factor, const Tensor& rows,
                        const char* rows_name) {
  TORCH_CHECK_TYPE(factor.scalar_type() == rows.scalar_type() || factor.scalar_type() == at::kFloat, op, ": ",
                   name, " is ", dtype_name(factor), " and ", rows_name, " ", dtype_name(rows), "; convert ",
                   name, " with .to(", rows_name, ".dtype), or with .float()");
}

void check_int32(const char* op, const char* name, const Tensor& tensor) {
  TORCH_CHECK_TYPE(tensor.scalar_type() == at::kInt, op, ": ", name, " is ", dtype_name(tensor),
                   " and must be torch.int32; convert it with .to(torch.int32)");
}

KvFormat check_kv_format(const char* op, std::string_view kv_format, const Tensor& key_cache,
                         const Tensor& value_cache, const char* key_name, const char* value_name) {
  TORCH_CHECK_TYPE(key_cache.scalar_type() == value_cache.scalar_type(), op, ": ", key_name, " is ",
                   dtype_name(key_cache), " and ", value_name, " ", dtype_name(value_cache),
                   "; both must have the same dtype");
  const auto format = kv_format_of(op, kv_format, dtype_of(key_cache.scalar_type()));
  if (const Refusal* refusal = std::get_if<Refusal>(&format)) raise(*refusal);
  return std::get<KvFormat>(format);
}

bool check_scales(const char* op, const char* name, const OptionalTensor& scales, const char* cache_name,
                  const Tensor& cache, KvFormat format) {
  if (!scales.has_value()) {
    TORCH_CHECK_VALUE(!needs_scales(format), op, ": an ", name_of(format), " cache needs scales; pass ",
                      name);
    return false;
  }
  TORCH_CHECK_VALUE(takes_scales(format), op, ": ", name, " does not apply to a cache of ", dtype_name(cache),
                    "; leave it out");
  check_device(op, name, *scales, cache, cache_name);
  const at::ScalarType dtype = scale_dtype(format) == DType::kFloat16 ? at::kHalf : at::kFloat;
  TORCH_CHECK_TYPE(scales->scalar_type() == dtype, op, ": ", name, " is ", dtype_name(*scales),
                   " and must be torch.", name_of(scale_dtype(format)), " for an ", name_of(format),
                   " cache");
  const int64_t head_dim = head_dim_of(format, cache.size(-1));
  // Before the check of the scales' shape, whose error counts the groups of a head.
  if (const auto refusal = check_format_dim(op, cache_name, format, head_dim)) raise(*refusal);
  std::vector<int64_t> shape = cache.sizes().slice(0, cache.dim() - 1).vec();
  const bool grouped = scales_kind(format) == kScalesGroup;
  if (grouped) shape.insert(shape.end(), {head_dim / kInt4Group, 2});
  TORCH_CHECK_VALUE(scales->sizes() == at::IntArrayRef(shape), op, ": ", name, " has shape ", scales->sizes(),
                    " and must be ", at::IntArrayRef(shape), " for a ", cache_name, " of shape ",
                    cache.sizes());
  if (grouped) {
    TORCH_CHECK_VALUE(scales->stride(-1) == 1 && (scales->size(-2) <= 1 || scales->stride(-2) == 2), op, ": ",
                      name, " has strides ", scales->strides(),
                      " and its last two dimensions must be contiguous");
  }
  return true;
}

}  // namespace fattn
