// Tensors -> CacheWriteProblem, with the checks that protect the caller's memory.
#include <algorithm>
#include <array>
#include <string>
#include <utility>

#include <c10/util/Exception.h>

#include "written_caches.h"

namespace fattn {
namespace {

using at::Tensor;

constexpr std::string_view kRows = "[tokens, kv_heads, head_dim]";
constexpr std::string_view kPool = "[num_blocks, block_size, kv_heads, head_dim]";

// Raises if two elements of a written tensor share memory. In the order of strides, each dimension must step
// over the extent of the smaller ones.
void check_no_overlap(const char* op, const char* name, const Tensor& tensor) {
  std::vector<std::pair<int64_t, int64_t>> dims;  // stride, size
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    if (tensor.size(dim) == 0) return;
    if (tensor.size(dim) > 1) dims.emplace_back(tensor.stride(dim), tensor.size(dim));
  }
  std::sort(dims.begin(), dims.end());
  int64_t reach = 0;
  for (const auto& [stride, size] : dims) {
    TORCH_CHECK_VALUE(
        stride > reach, op, ": ", name, " has shape ", tensor.sizes(), " and strides ", tensor.strides(),
        ", so that elements share memory; allocate separate memory for every element, without .expand()");
    reach += stride * (size - 1);
  }
}

// The range of storage elements that a tensor covers.
std::pair<int64_t, int64_t> range_of(const Tensor& tensor) {
  int64_t end = tensor.storage_offset() + (tensor.numel() > 0 ? 1 : 0);
  for (int64_t dim = 0; dim < tensor.dim() && tensor.numel() > 0; ++dim) {
    end += tensor.stride(dim) * (tensor.size(dim) - 1);
  }
  return {tensor.storage_offset() * tensor.element_size(), end * tensor.element_size()};
}

// Whether two tensors begin at one address.
bool begin_together(const Tensor& a, const Tensor& b) {
  return a.defined() && a.numel() > 0 && a.is_alias_of(b) && a.storage_offset() == b.storage_offset();
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
  const bool caches = begin_together(call.key_cache, call.value_cache);
  const bool scales = begin_together(call.key_scales, call.value_scales);
  if (!caches && !scales) return false;
  const bool in_key = is_start_of(call.value_cache, call.key_cache) && is_start_of(call.value, call.key) &&
                      (!call.key_scales.defined() || is_start_of(call.value_scales, call.key_scales));
  TORCH_CHECK_VALUE(in_key, name_of(Op::kCacheWrite),
                    ": key_cache and value_cache (or their scales) begin at the same address; ",
                    "pass separate memory for each, or value, value_cache and value_scales all as the first ",
                    "columns of their key counterparts");
  return true;
}

void check_rows(const char* op, const char* rows_name, const Tensor& rows, const char* cache_name,
                const Tensor& cache, KvFormat format) {
  check_same_size(op, "head count", rows_name, rows.size(1), cache_name, cache.size(2));
  check_head_dim(op, rows_name, rows.size(-1), cache_name, cache, format);
}

bool may_alias(const WriteOperands& call, const Tensor& tensor) {
  for (const Tensor& written : {call.key_cache, call.value_cache, call.key_scales, call.value_scales}) {
    if (tensor.defined() && written.defined() && may_share(tensor, written)) return true;
  }
  return false;
}

Strides3 pool_strides(const Tensor& pool) { return {pool.stride(0), pool.stride(2), pool.stride(1)}; }

}  // namespace

void check_written(const char* op, const char* name, const Tensor& tensor, const Tensor& first,
                   const char* first_name) {
  check_device(op, name, tensor, first, first_name);
  TORCH_CHECK_VALUE(tensor.size(-1) <= 1 || tensor.stride(-1) == 1, op, ": the last dimension of ", name,
                    " has stride ", tensor.stride(-1), " and is written in place; it must be contiguous");
  check_no_overlap(op, name, tensor);
}

bool may_share(const Tensor& a, const Tensor& b) {
  if (!a.is_alias_of(b)) return false;
  const auto [a_begin, a_end] = range_of(a);
  const auto [b_begin, b_end] = range_of(b);
  return a_begin < b_end && b_begin < a_end;
}

bool share_elements(const Tensor& a, const Tensor& b) {
  if (!a.defined() || !b.defined()) return false;
  const auto has_no_gaps = [](const Tensor& tensor) {
    const auto [begin, end] = range_of(tensor);
    return end - begin == tensor.numel() * int64_t(tensor.element_size());
  };
  return begin_together(a, b) || (may_share(a, b) && has_no_gaps(a) && has_no_gaps(b));
}

bool need_copy(const WriteOperands& call, const Tensor& rows) {
  return rows.stride(-1) != 1 || may_alias(call, rows);
}

Tensor readable(const WriteOperands& call, const Tensor& tensor) {
  return may_alias(call, tensor) ? tensor.clone() : tensor;
}

void check_slot_dtype(const char* op, const char* name, const Tensor& slots) {
  const at::ScalarType type = slots.scalar_type();
  TORCH_CHECK_TYPE(type == at::kInt || type == at::kLong, op, ": ", name, " is ", dtype_name(slots),
                   " and must be torch.int32 or torch.int64; convert it with .to(torch.int64)");
}

bool is_multiple(const Tensor& tensor) {
  constexpr int64_t kVector = 4;
  bool multiple = tensor.storage_offset() % kVector == 0;
  for (int64_t dim = 0; dim + 1 < tensor.dim(); ++dim) {
    multiple = multiple && (tensor.size(dim) <= 1 || tensor.stride(dim) % kVector == 0);
  }
  return multiple;
}

void add_written_caches(const char* op, const Arguments& arguments, WriteOperands& call,
                        CacheWriteProblem& problem) {
  const Tensor& key = call.key = arguments.tensor("key");
  const Tensor& value = call.value = arguments.tensor("value");
  const Tensor& key_cache = call.key_cache = arguments.tensor("key_cache");
  const Tensor& value_cache = call.value_cache = arguments.tensor("value_cache");
  const OptionalTensor key_scales = arguments.optional_tensor("key_scales");
  const OptionalTensor value_scales = arguments.optional_tensor("value_scales");
  check_rank(op, "key_cache", key_cache, 4, kPool);
  check_rank(op, "value_cache", value_cache, 4, kPool);
  check_float(op, "key", key);
  check_same_dtype(op, "key", key, "value", value);
  const KvFormat format = check_kv_format(op, arguments.text("kv_format"), key_cache, value_cache);
  TORCH_CHECK_TYPE(format != kKvFloat || key_cache.scalar_type() == key.scalar_type(), op, ": key is ",
                   dtype_name(key), " and key_cache ", dtype_name(key_cache),
                   "; convert the rows with .to(key_cache.dtype)");
  check_same_size(op, "num_blocks", "key_cache", key_cache.size(0), "value_cache", value_cache.size(0));
  check_same_size(op, "block_size", "key_cache", key_cache.size(1), "value_cache", value_cache.size(1));
  check_same_size(op, "head count", "key", key.size(1), "value", value.size(1));
  check_rows(op, "key", key, "key_cache", key_cache, format);
  check_rows(op, "value", value, "value_cache", value_cache, format);
  check_written(op, "key_cache", key_cache, key, "key");
  check_written(op, "value_cache", value_cache, key, "key");
  TORCH_CHECK_VALUE(key_scales.has_value() == value_scales.has_value(), op, ": ",
                    key_scales.has_value() ? "key_scales" : "value_scales",
                    " comes without the other; pass both, or neither");
  if (key_scales.has_value()) {
    check_device(op, "key_scales", *key_scales, key, "key");
    check_device(op, "value_scales", *value_scales, key, "key");
  }
  problem.has_scales = check_scales(op, "key_scales", key_scales, "key_cache", key_cache, format);
  if (problem.has_scales) {
    check_scales(op, "value_scales", value_scales, "value_cache", value_cache, format);
    check_no_overlap(op, "key_scales", *key_scales);
    check_no_overlap(op, "value_scales", *value_scales);
    problem.key.scales = pool_strides(call.key_scales = *key_scales);
    problem.value.scales = pool_strides(call.value_scales = *value_scales);
  }
  call.copy_key = need_copy(call, key);
  call.copy_value = need_copy(call, value);
  problem.format = format;
  problem.dtype = dtype_of(key.scalar_type());
  problem.kv_heads = key.size(1);
  problem.num_blocks = key_cache.size(0);
  problem.block_size = key_cache.size(1);
  problem.key.head_dim = key.size(-1);
  problem.value.head_dim = value.size(-1);
  problem.key.cache = pool_strides(key_cache);
  problem.value.cache = pool_strides(value_cache);
  problem.vector_aligned = (call.copy_key || is_multiple(key)) && (call.copy_value || is_multiple(value)) &&
                           is_multiple(key_cache) && is_multiple(value_cache);
}

CacheWriteCall describe_cache_write(const Arguments& arguments) {
  const char* op = name_of(Op::kCacheWrite);
  const Tensor &key = arguments.tensor("key"), &value = arguments.tensor("value"),
               &slot_mapping = arguments.tensor("slot_mapping");
  check_rank(op, "key", key, 3, kRows);
  check_rank(op, "value", value, 3, kRows);
  check_rank(op, "slot_mapping", slot_mapping, 1, "[tokens]");
  check_device(op, "value", value, key, "key");
  check_device(op, "slot_mapping", slot_mapping, key, "key");
  check_slot_dtype(op, "slot_mapping", slot_mapping);
  check_same_size(op, "token count", "key", key.size(0), "value", value.size(0));
  check_same_size(op, "token count", "key", key.size(0), "slot_mapping", slot_mapping.size(0));
  CacheWriteCall call;
  CacheWriteProblem& problem = call.problem;
  add_written_caches(op, arguments, call, problem);
  call.slot_mapping = readable(call, slot_mapping);
  problem.long_slots = slot_mapping.scalar_type() == at::kLong;
  problem.tokens = key.size(0);
  const auto stride = [](const Tensor& rows, bool copied, int64_t dim) {
    return copied ? c10::multiply_integers(rows.sizes().slice(dim + 1)) : rows.stride(dim);
  };
  problem.params = {.key_token_stride = stride(key, call.copy_key, 0),
                    .key_head_stride = stride(key, call.copy_key, 1),
                    .value_token_stride = stride(value, call.copy_value, 0),
                    .value_head_stride = stride(value, call.copy_value, 1),
                    .slot_stride = call.slot_mapping.stride(0)};
  problem.value_in_key = value_lies_in_key(call);
  return call;
}

Tensor rows_to_read(const Tensor& rows, bool copy) {
  return copy ? rows.clone(at::MemoryFormat::Contiguous) : rows;
}

}  // namespace fattn
