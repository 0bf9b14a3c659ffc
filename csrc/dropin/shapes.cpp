#include "shapes.h"

#include <ATen/ops/constant_pad_nd.h>

#include "../plan/supported.h"

namespace fattn {
namespace {

using at::Tensor;
using c10::SymInt;

// The size to which torch broadcasts both sizes, if any.
std::optional<SymInt> broadcast(const SymInt& a, const SymInt& b) {
  if (a == b || b == 1) return a;
  if (a == 1) return b;
  return std::nullopt;
}

bool is_broadcast(const Tensor& tensor, const SymInt& batch, const SymInt& heads) {
  return size_of(tensor, 0) != batch || size_of(tensor, 1) != heads;
}

}  // namespace

SymInt size_of(const Tensor& tensor, int64_t dim) {
  const int64_t own = dim + tensor.dim() - kSdpaRank;
  return own < 0 ? SymInt(1) : tensor.sym_size(own);
}

std::optional<Sizes> sizes_of(const SdpaCall& call) {
  const auto &q = call.query, &k = call.key, &v = call.value;
  if (size_of(q, 3) != size_of(k, 3) || size_of(k, 2) != size_of(v, 2)) return std::nullopt;
  auto batch = broadcast(size_of(q, 0), size_of(k, 0));
  if (batch) batch = broadcast(*batch, size_of(v, 0));
  if (!batch) return std::nullopt;
  if (call.enable_gqa) {
    if (q.dim() < 3) return std::nullopt;
    const SymInt heads = size_of(k, 1);
    if (heads != size_of(v, 1) || heads == 0 || size_of(q, 1) % heads != 0) return std::nullopt;
    return Sizes{*batch, size_of(q, 1), heads};
  }
  const auto kv_heads = broadcast(size_of(k, 1), size_of(v, 1));
  const auto q_heads = kv_heads ? broadcast(size_of(q, 1), *kv_heads) : std::nullopt;
  if (!q_heads) return std::nullopt;
  return Sizes{*batch, *q_heads, *kv_heads};
}

bool broadcasts_nothing(const SdpaCall& call, const Sizes& sizes) {
  const bool broadcast = is_broadcast(call.query, sizes.batch, sizes.q_heads) ||
                         is_broadcast(call.key, sizes.batch, sizes.kv_heads) ||
                         is_broadcast(call.value, sizes.batch, sizes.kv_heads);
  return broadcast &&
         (size_of(call.query, 2) == 0 || size_of(call.key, 2) == 0 || sizes.batch == 0 || sizes.q_heads == 0);
}

bool mask_fits(const SdpaCall& call, const Sizes& sizes) {
  if (!call.attn_mask) return true;
  const Tensor& mask = *call.attn_mask;
  if (mask.dim() > call.query.dim()) return false;
  const SymInt scores[kSdpaRank] = {sizes.batch, sizes.q_heads, size_of(call.query, 2), size_of(call.key, 2)};
  for (int64_t i = 1; i <= mask.dim(); ++i) {
    const SymInt mine = mask.sym_size(-i);
    if (mine != 1 && mine != scores[kSdpaRank - i]) return false;
  }
  return true;
}

Tensor operand_of(const Tensor& given, const SymInt& batch, const SymInt& heads) {
  Tensor tensor = given;
  while (tensor.dim() < kSdpaRank) tensor = tensor.unsqueeze(0);
  const SymInt excess = tensor.sym_size(3) % kHeadDimMultiple;
  if (excess != 0)
    tensor = at::constant_pad_nd_symint(tensor, {SymInt(0), SymInt(kHeadDimMultiple) - excess});
  if (!is_broadcast(tensor, batch, heads)) return tensor;
  return tensor.expand_symint({batch, heads, tensor.sym_size(2), tensor.sym_size(3)});
}

Tensor result_of(Tensor out, const SdpaCall& call) {
  const SymInt value_dim = size_of(call.value, 3);
  if (out.sym_size(3) != value_dim) out = out.slice_symint(3, 0, value_dim).clone();  // in the same order
  while (out.dim() > call.query.dim()) out = out.squeeze(0);
  return out;
}

}  // namespace fattn
