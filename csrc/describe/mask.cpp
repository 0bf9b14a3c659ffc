// Adds attn_mask and its map, or a block mask, to a Call, and describes the op that makes a map.
#include <algorithm>
#include <array>
#include <bit>
#include <optional>
#include <vector>

#include <c10/util/Exception.h>

#include "options.h"
#include "tensor_checks.h"
#include "../plan/supported.h"

namespace fattn {
namespace {

using at::Tensor;

DType mask_dtype(const char* op, const Tensor& mask) {
  const DType dtype = dtype_of(mask.scalar_type());
  TORCH_CHECK_TYPE(
      dtype == DType::kBool || is_float(dtype), op, ": attn_mask is ", dtype_name(mask),
      " and must be torch.bool (True = attend), torch.float32, torch.float16 or torch.bfloat16 (added)");
  return dtype;
}

// Strides over the sizes `target`, 0 where the mask is broadcast; none if it does not broadcast.
std::optional<Strides4> broadcast_strides(const Tensor& mask, const std::array<int64_t, 4>& target) {
  if (mask.dim() > 4) return std::nullopt;
  std::array<int64_t, 4> strides{};
  for (int64_t dim = 0; dim < mask.dim(); ++dim) {
    const int64_t target_dim = dim + 4 - mask.dim();
    if (mask.size(dim) == 1) continue;
    if (mask.size(dim) != target[target_dim]) return std::nullopt;
    strides[target_dim] = mask.stride(dim);
  }
  return Strides4{strides[0], strides[1], strides[2], strides[3]};
}

int64_t cells_of(int64_t length, int64_t cell) { return (length + cell - 1) / cell; }

// Whether the keys of a row are aligned pairs whose index in the mask fits in 32 bits.
bool has_aligned_pairs(const Tensor& mask, const Strides4& strides) {
  const int64_t steps = mask.storage_offset() | strides.batch | strides.head | strides.row;
  int64_t elements = 1;
  for (int64_t dim = 0; dim < mask.dim(); ++dim) elements += (mask.size(dim) - 1) * mask.stride(dim);
  return strides.key == 1 && mask.size(-1) % 2 == 0 && steps % 2 == 0 && elements >> 33 == 0;
}

// Rows and keys of a block. They are checked without block_mask, too.
std::array<int64_t, 2> block_sizes(const Call& call, const Arguments& arguments) {
  const char* name = name_of(call.problem.op);
  const std::vector<int64_t> sizes = arguments["block_size"].toIntVector();
  TORCH_CHECK_VALUE(sizes.size() == 2, name, ": block_size has ", sizes.size(),
                    " numbers; pass the rows and the keys of a block");
  for (const int64_t size : sizes) {
    TORCH_CHECK_VALUE(size >= kMinMaskBlock && size <= kMaxMaskBlock && std::has_single_bit(uint64_t(size)),
                      name, ": block_size has ", size, ", which is not a power of two from ", kMinMaskBlock,
                      " to ", kMaxMaskBlock, "; use blocks of 64 or 128");
  }
  return {sizes[0], sizes[1]};
}

}  // namespace

void add_mask(Call& call, const Arguments& arguments) {
  const OptionalTensor attn_mask = arguments.optional_tensor("attn_mask");
  if (!attn_mask.has_value()) return;
  const Tensor& mask = *attn_mask;
  Problem& problem = call.problem;
  const char* name = name_of(problem.op);
  check_device(name, "attn_mask", mask, call.query);
  const DType dtype = mask_dtype(name, mask);

  const std::array<int64_t, 4> target = {problem.batch, problem.q_heads, problem.q_len, problem.kv_len};
  const auto strides = broadcast_strides(mask, target);
  TORCH_CHECK_VALUE(
      strides.has_value(), name, ": attn_mask has shape ", mask.sizes(),
      " and must be broadcastable to [batch, heads, q_len, kv_len] = ", at::IntArrayRef(target));
  problem.mask_dtype = dtype;
  problem.mask = *strides;
  problem.mask_pairs = has_aligned_pairs(mask, *strides);
  call.attn_mask = mask;
}

void add_mask_map(Call& call, const Arguments& arguments) {
  const OptionalTensor mask_map = arguments.optional_tensor("mask_map");
  if (!mask_map.has_value()) return;
  const Tensor& map = *mask_map;
  Problem& problem = call.problem;
  const char* name = name_of(problem.op);
  TORCH_CHECK_VALUE(call.attn_mask.defined(), name,
                    ": mask_map is given without attn_mask; pass the mask that it is the map of, too");
  check_device(name, "mask_map", map, call.query);
  TORCH_CHECK_TYPE(map.scalar_type() == at::kByte, name, ": mask_map is ", dtype_name(map),
                   " and must be torch.uint8; make it with torch_fattn.mask_map(attn_mask)");
  const std::array<int64_t, 4> target = {problem.batch, problem.q_heads, cells_of(problem.q_len, kCellRows),
                                         cells_of(problem.kv_len, kCellKeys)};
  const auto strides = broadcast_strides(map, target);
  TORCH_CHECK_VALUE(map.dim() == 4 && strides.has_value(), name, ": mask_map has shape ", map.sizes(),
                    " and must be broadcastable to [batch, heads, q_len / 16, kv_len / 32], rounded up = ",
                    at::IntArrayRef(target), "; make it with torch_fattn.mask_map(attn_mask)");
  problem.has_mask_map = true;
  problem.mask_map = *strides;
  call.mask_map = map;
}

void add_block_mask(Call& call, const Arguments& arguments) {
  const std::array<int64_t, 2> sizes = block_sizes(call, arguments);
  const OptionalTensor block_mask = arguments.optional_tensor("block_mask");
  if (!block_mask.has_value()) return;
  const Tensor& mask = *block_mask;
  Problem& problem = call.problem;
  const char* name = name_of(problem.op);
  TORCH_CHECK_VALUE(!call.attn_mask.defined(), name,
                    ": block_mask came with attn_mask; leave it out and hide its blocks in attn_mask");
  TORCH_CHECK_VALUE(!arguments.optional_tensor("mask_map").has_value(), name,
                    ": block_mask came with mask_map, which describes an attn_mask; leave mask_map out");
  check_device(name, "block_mask", mask, call.query);
  TORCH_CHECK_TYPE(mask.scalar_type() == at::kBool || mask.scalar_type() == at::kByte, name,
                   ": block_mask is ", dtype_name(mask),
                   " and must be torch.bool or torch.uint8 (not 0 = attend); convert it with .bool()");
  problem.block_rows = sizes[0];
  problem.block_keys = sizes[1];
  const std::array<int64_t, 4> target = {problem.batch, problem.q_heads,
                                         cells_of(problem.q_len, problem.block_rows),
                                         cells_of(problem.kv_len, problem.block_keys)};
  const auto strides = broadcast_strides(mask, target);
  TORCH_CHECK_VALUE(
      mask.dim() == 4 && strides.has_value() && mask.size(2) == target[2] && mask.size(3) == target[3], name,
      ": block_mask has shape ", mask.sizes(),
      " and must be [batch or 1, query heads or 1, q_len / block_size[0], kv_len / block_size[1]], rounded "
      "up = ",
      at::IntArrayRef(target), "; expand a dimension in which all blocks are alike");
  problem.has_mask_map = true;
  problem.mask_map = *strides;
  call.mask_map = mask;
}

MaskMapCall describe_mask_map(const Arguments& arguments) {
  return describe_map_of(arguments.tensor("attn_mask"));
}

MaskMapCall describe_map_of(const Tensor& attn_mask) {
  const char* name = name_of(Op::kMaskMap);
  TORCH_CHECK_TYPE(attn_mask.defined(), name, ": attn_mask is None; pass a tensor");
  const DType dtype = mask_dtype(name, attn_mask);
  TORCH_CHECK_VALUE(attn_mask.dim() <= 4, name, ": attn_mask has ", attn_mask.dim(),
                    " dimensions and must have at most 4, [batch, heads, q_len, kv_len]");
  std::array<int64_t, 4> sizes = {1, 1, 1, 1};
  std::array<int64_t, 4> strides{};
  for (int64_t dim = 0; dim < attn_mask.dim(); ++dim) {
    const int64_t target_dim = dim + 4 - attn_mask.dim();
    sizes[target_dim] = attn_mask.size(dim);
    strides[target_dim] = attn_mask.stride(dim);
  }
  MaskMapCall call{.problem = {.dtype = dtype}, .mask = attn_mask};
  call.problem.batch = sizes[0];
  call.problem.heads = sizes[1];
  call.problem.rows = sizes[2];
  call.problem.keys = sizes[3];
  call.problem.mask = {strides[0], strides[1], strides[2], strides[3]};
  return call;
}

std::array<int64_t, 4> map_sizes(const MaskMapProblem& p) {
  return {p.batch, p.heads, cells_of(p.rows, kCellRows), cells_of(p.keys, kCellKeys)};
}

}  // namespace fattn
