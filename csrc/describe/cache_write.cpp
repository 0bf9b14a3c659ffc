// Tensors -> CacheWriteProblem, with the checks that protect the caller's memory.
#include <algorithm>
#include <array>
#include <string>
#include <utility>

#include <c10/util/Exception.h>

#include "tensor_checks.h"

namespace fattn {
namespace {

using at::Tensor;

constexpr std::string_view kRows = "[tokens, kv_heads, head_dim]";
constexpr std::string_view kPool = "[num_blocks, block_size, kv_heads, head_dim]";
constexpr int64_t kVector = 4;  // columns per load and store

const char* const kOp = name_of(Op::kCacheWrite);

// Raises if two elements of a written tensor share memory. In the order of strides, each dimension must step
// over the extent of the smaller ones.
void check_no_overlap(const char* name, const Tensor& tensor) {
  std::vector<std::pair<int64_t, int64_t>> dims;  // stride, size
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    if (tensor.size(dim) == 0) return;
    if (tensor.size(dim) > 1) dims.emplace_back(tensor.stride(dim), tensor.size(dim));
  }
  std::sort(dims.begin(), dims.end());
  int64_t reach = 0;
  for (const auto& [stride, size] : dims) {
    TORCH_CHECK_VALUE(
        stride > reach, kOp, ": ", name, " has shape ", tensor.sizes(), " and strides ", tensor.strides(),
        ", so that elements share memory; allocate separate memory for every element, without .expand()");
    reach += stride * (size - 1);
  }
}

void check_written(const char* name, const Tensor& tensor, const Tensor& key) {
  check_device(kOp, name, tensor, key, "key");
  TORCH_CHECK_VALUE(tensor.size(-1) <= 1 || tensor.stride(-1) == 1, kOp, ": the last dimension of ", name,
                    " has stride ", tensor.stride(-1), " and is written in place; it must be contiguous");
  check_no_overlap(name, tensor);
}

// The range of storage elements that a tensor covers.
std::pair<int64_t, int64_t> range_of(const Tensor& tensor) {
  int64_t end = tensor.storage_offset() + (tensor.numel() > 0 ? 1 : 0);
  for (int64_t dim = 0; dim < tensor.dim() && tensor.numel() > 0; ++dim) {
    end += tensor.stride(dim) * (tensor.size(dim) - 1);
  }
  return {tensor.storage_offset() * tensor.element_size(), end * tensor.element_size()};
}

bool may_share(const Tensor& a, const Tensor& b) {
  if (!a.is_alias_of(b)) return false;
  const auto [a_begin, a_end] = range_of(a);
  const auto [b_begin, b_end] = range_of(b);
  return a_begin < b_end && b_begin < a_end;
}

// Whether b is the first columns of a: the same memory by the same strides.
bool is_start_of(const Tensor& b, const Tensor& a) {
  if (!b.is_alias_of(a) || b.storage_offset() != a.storage_offset() || b.scalar_type() != a.scalar_type()) {
    return false;
  }
  for (int64_t dim = 0; dim < a.dim(); ++dim) {
    if (b.size(dim) > a.size(dim) || (b.size(dim) > 1 && b.stride(dim) != a.stride(dim))) return false;
  }
  return true;
}

// Whether the value is stored in the key, as in multi-head latent attention. Other pairs of caches that begin
// at one address would overwrite each other.
bool value_lies_in_key(const CacheWriteCall& call) {
  const auto begin_together = [](const Tensor& a, const Tensor& b) {
    return a.defined() && a.numel() > 0 && a.is_alias_of(b) && a.storage_offset() == b.storage_offset();
  };
  const bool caches = begin_together(call.key_cache, call.value_cache);
  const bool scales = begin_together(call.key_scales, call.value_scales);
  if (!caches && !scales) return false;
  const bool in_key = is_start_of(call.value_cache, call.key_cache) && is_start_of(call.value, call.key) &&
                      (!call.key_scales.defined() || is_start_of(call.value_scales, call.key_scales));
  TORCH_CHECK_VALUE(in_key, kOp, ": key_cache and value_cache (or their scales) begin at the same address; ",
                    "pass separate memory for each, or value, value_cache and value_scales all as the first ",
                    "columns of their key counterparts");
  return true;
}

void check_rows(const char* rows_name, const Tensor& rows, const char* cache_name, const Tensor& cache,
                KvFormat format) {
  check_same_size(kOp, "head count", rows_name, rows.size(1), cache_name, cache.size(2));
  check_head_dim(kOp, rows_name, rows.size(2), cache_name, cache, format);
}

Strides3 pool_strides(const Tensor& pool) { return {pool.stride(0), pool.stride(2), pool.stride(1)}; }

// The layout of rows after rows_to_read().
CacheSide side_of(const Tensor& rows, bool copied, const Tensor& cache, const Tensor& scales) {
  CacheSide side;
  side.head_dim = rows.size(2);
  side.token_stride = copied ? rows.size(1) * rows.size(2) : rows.stride(0);
  side.head_stride = copied ? rows.size(2) : rows.stride(1);
  side.cache = pool_strides(cache);
  if (scales.defined()) side.scales = pool_strides(scales);
  return side;
}

bool is_multiple(const Tensor& tensor, int64_t vector) {
  bool multiple = tensor.storage_offset() % vector == 0;
  for (int64_t dim = 0; dim + 1 < tensor.dim(); ++dim) {
    multiple = multiple && (tensor.size(dim) <= 1 || tensor.stride(dim) % vector == 0);
  }
  return multiple;
}

}  // namespace

CacheWriteCall describe_cache_write(const Tensor& key, const Tensor& value, const Tensor& key_cache,
                                    const Tensor& value_cache, const Tensor& slot_mapping,
                                    const OptionalTensor& key_scales, const OptionalTensor& value_scales,
                                    std::string_view kv_format) {
  check_rank(kOp, "key", key, 3, kRows);
  check_rank(kOp, "value", value, 3, kRows);
  check_rank(kOp, "key_cache", key_cache, 4, kPool);
  check_rank(kOp, "value_cache", value_cache, 4, kPool);
  check_rank(kOp, "slot_mapping", slot_mapping, 1, "[tokens]");
  check_device(kOp, "value", value, key, "key");
  check_device(kOp, "slot_mapping", slot_mapping, key, "key");
  const DType dtype = dtype_of(key.scalar_type());
  check_float(kOp, "key", key);
  TORCH_CHECK_TYPE(value.scalar_type() == key.scalar_type(), kOp, ": key is ", dtype_name(key), " and value ",
                   dtype_name(value), "; convert value with .to(key.dtype)");
  const KvFormat format = check_kv_format(kOp, kv_format, key_cache, value_cache);
  TORCH_CHECK_TYPE(format != kKvFloat || key_cache.scalar_type() == key.scalar_type(), kOp, ": key is ",
                   dtype_name(key), " and key_cache ", dtype_name(key_cache),
                   "; convert the rows with .to(key_cache.dtype)");
  const at::ScalarType slot_type = slot_mapping.scalar_type();
  TORCH_CHECK_TYPE(slot_type == at::kInt || slot_type == at::kLong, kOp, ": slot_mapping is ",
                   dtype_name(slot_mapping),
                   " and must be torch.int32 or torch.int64; convert it with .to(torch.int64)");
  check_same_size(kOp, "token count", "key", key.size(0), "value", value.size(0));
  check_same_size(kOp, "token count", "key", key.size(0), "slot_mapping", slot_mapping.size(0));
  check_same_size(kOp, "num_blocks", "key_cache", key_cache.size(0), "value_cache", value_cache.size(0));
  check_same_size(kOp, "block_size", "key_cache", key_cache.size(1), "value_cache", value_cache.size(1));
  check_rows("key", key, "key_cache", key_cache, format);
  check_rows("value", value, "value_cache", value_cache, format);
  check_written("key_cache", key_cache, key);
  check_written("value_cache", value_cache, key);

  CacheWriteCall call{.key = key,
                      .value = value,
                      .key_cache = key_cache,
                      .value_cache = value_cache,
                      .slot_mapping = slot_mapping};
  TORCH_CHECK_VALUE(key_scales.has_value() == value_scales.has_value(), kOp, ": ",
                    key_scales.has_value() ? "key_scales" : "value_scales",
                    " comes without the other; pass both, or neither");
  if (key_scales.has_value()) {
    check_device(kOp, "key_scales", *key_scales, key, "key");
    check_device(kOp, "value_scales", *value_scales, key, "key");
  }
  if (check_scales(kOp, "key_scales", key_scales, "key_cache", key_cache, format)) {
    check_scales(kOp, "value_scales", value_scales, "value_cache", value_cache, format);
    check_no_overlap("key_scales", *key_scales);
    check_no_overlap("value_scales", *value_scales);
    call.key_scales = *key_scales;
    call.value_scales = *value_scales;
  }
  const auto needs_copy = [&](const Tensor& rows) {
    return rows.stride(-1) != 1 || may_share(rows, key_cache) || may_share(rows, value_cache);
  };
  call.copy_key = needs_copy(key);
  call.copy_value = needs_copy(value);

  CacheWriteProblem& problem = call.problem;
  problem.dtype = dtype;
  problem.format = format;
  problem.has_scales = call.key_scales.defined();
  problem.long_slots = slot_type == at::kLong;
  problem.slot_stride = slot_mapping.stride(0);
  problem.tokens = key.size(0);
  problem.kv_heads = key.size(1);
  problem.num_blocks = key_cache.size(0);
  problem.block_size = key_cache.size(1);
  problem.key = side_of(key, call.copy_key, key_cache, call.key_scales);
  problem.value = side_of(value, call.copy_value, value_cache, call.value_scales);
  problem.value_in_key = value_lies_in_key(call);
  problem.vector_aligned = (call.copy_key || is_multiple(key, kVector)) &&
                           (call.copy_value || is_multiple(value, kVector)) &&
                           is_multiple(key_cache, kVector) && is_multiple(value_cache, kVector);
  return call;
}

Tensor rows_to_read(const Tensor& rows, bool copy) {
  return copy ? rows.clone(at::MemoryFormat::Contiguous) : rows;
}

}  // namespace fattn
