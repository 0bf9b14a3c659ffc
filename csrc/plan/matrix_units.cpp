// Which calls can use matrix units.
#include "matrix_units.h"

#include <algorithm>
#include <iterator>

#include "supported.h"

namespace fattn {
namespace {

// Operands with larger row strides have failed on an M5 Max (published, llama.cpp issue 27064). A row stride
// of 0 appears in no public code.
bool have_rows_apart(const Strides3& one, const Strides3& other) {
  constexpr int64_t kLimit = 65536;
  return one.row > 0 && one.row < kLimit && other.row > 0 && other.row < kLimit;
}
// Fewest rows that share keys in a dense call: the rows of a product. Packed calls have no limit: it would
// depend on the other sequences of the batch.
constexpr int64_t kMinUnitsRows = 16;
// The same for decode, whose simdgroup kernels multiply 8 rows. Below about 20 rows an M5 is bound by memory
// (published rates); on an NVIDIA H100, 16 took 1.4 to 1.6 times as long on matrix units, 32 took 0.8
// times as long. Latent heads, with values that are columns of the keys, have about twice the products per
// byte.
constexpr int64_t kMinDecodeRows = 24;
constexpr int64_t kMaxUnitsTree = 32;  // rows, a bit each in SavedTensorRow

}  // namespace

const char* name_of(UnitsState state) {
  static constexpr const char* kNames[] = {"off", "untested", "threadgroup", "registers"};
  return kNames[static_cast<size_t>(state)];
}

std::vector<UnitsSize> all_units_sizes() {
  std::vector<UnitsSize> all;
  for (const bool is_backward : {false, true}) {
    for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
      for (const uint16_t dim : kUnitsDims) {
        if (!is_backward || dim <= kMaxBackwardHeadDim) all.push_back({dtype, dim, is_backward});
      }
    }
  }
  return all;
}

const char* call_of(UnitsSize size) { return size.is_backward ? "backward" : "prefill"; }

std::string name_of(UnitsSize size) {
  return std::string(call_of(size)) + " " + name_of(size.dtype) + " " + std::to_string(size.dim);
}

uint16_t padded_dim(int64_t dim) {
  const auto* found =
      std::find_if(kUnitsDims.begin(), kUnitsDims.end(), [&](uint16_t size) { return dim <= size; });
  return found == kUnitsDims.end() ? 0 : *found;
}

bool UnitsStates::any() const {
  return std::any_of(states_.begin(), states_.end(),
                     [](UnitsState state) { return state != UnitsState::kOff; });
}

size_t UnitsStates::index(UnitsSize size) {
  const auto* dim = std::find(kUnitsDims.begin(), kUnitsDims.end(), size.dim);
  const size_t kind = (size.dtype == DType::kBFloat16 ? 1 : 0) + (size.is_backward ? 2 : 0);
  return kind * kUnitsDims.size() + size_t(std::distance(kUnitsDims.begin(), dim));
}

const char* why_no_units(DType dtype, int64_t head_dim, int64_t value_dim) {
  if (dtype != DType::kFloat16 && dtype != DType::kBFloat16) return "they are for float16 and bfloat16";
  if (head_dim == kLatentKeyDim && value_dim == kLatentValueDim) return nullptr;
  if (head_dim != value_dim) return "they are for values as wide as keys, or of 512 columns beside 576";
  const uint16_t dim = padded_dim(head_dim);
  const bool is_padded = std::find(kPaddedDims.begin(), kPaddedDims.end(), head_dim) != kPaddedDims.end();
  if (dim == kLatentKeyDim || (dim != head_dim && !is_padded))
    return "they are for heads of 64, 72, 80, 96, 128, 192, 256, and of 576 with values of 512";
  return nullptr;
}

const char* why_no_units(const Problem& p) {
  if (const char* reason = why_no_units(p.dtype, p.head_dim, p.value_dim)) return reason;
  if (is_backward(p.op) && p.head_dim > kMaxBackwardHeadDim) return "such heads have no gradients";
  if (is_backward(p.op) && !p.has_out_remainder) return "out came without its remainder";
  if (p.kv_format != kKvFloat) return "they are for caches that are not quantised";
  if (p.options.tree_mask && p.q_len > kMaxUnitsTree) return "they are for trees of up to 32 rows";
  if (!p.vector_aligned) return "the rows of query, key and value do not start on 16-byte boundaries";
  if (!have_rows_apart(p.key, p.value)) return "rows of key or value are not 1 to 65,535 elements apart";
  // The pass over keys reads rows of the query as a prefill reads keys.
  if (is_backward(p.op) && !have_rows_apart(p.query, p.grad_out))
    return "rows of query or of the gradient of out are not 1 to 65,535 elements apart";
  // Under the mask of a prefill, and in a backward, a tile has rows of one head.
  const bool is_masked = p.mask_dtype != DType::kOther || p.has_mask_map;
  const bool has_pairs = is_decode(p.op) || !(is_masked || is_backward(p.op));
  const bool packs_heads = has_pairs && p.kv_heads > 0;
  const int64_t heads = packs_heads ? p.q_heads / p.kv_heads : 1;
  if (is_decode(p.op) && p.head_dim != kLatentKeyDim && p.q_len * heads < kMinDecodeRows)
    return "fewer than 24 rows of a decode share keys";
  if (!p.packed && p.q_len * heads < kMinUnitsRows) return "fewer than 16 rows share keys";
  return nullptr;
}

std::optional<UnitsSize> units_size(DType dtype, int64_t head_dim, int64_t value_dim) {
  if (why_no_units(dtype, head_dim, value_dim) != nullptr) return std::nullopt;
  return UnitsSize{dtype, padded_dim(head_dim)};
}

std::optional<UnitsSize> units_size(const Problem& p) {
  if (why_no_units(p) != nullptr) return std::nullopt;
  auto size = units_size(p.dtype, p.head_dim, p.value_dim);
  size->is_backward = is_backward(p.op);
  return size;
}

UnitsState units_state(const Problem& p, const UnitsStates& states) {
  const auto size = units_size(p);
  if (!size) return UnitsState::kOff;
  return size->is_latent() ? std::min(states.of(*size), UnitsState::kThreadgroup) : states.of(*size);
}

const char* units_note(const Problem& p, const UnitsStates& states) {
  if (!states.any()) return "";
  if (const char* reason = why_no_units(p)) return reason;
  switch (units_state(p, states)) {
    case UnitsState::kOff:
      return "off for this dtype and head size";
    case UnitsState::kUntested:
      return is_step(p) ? "not tested yet on this GPU; the next prefill or warmup does it"
                        : "not tested yet on this GPU";
    case UnitsState::kThreadgroup:
      return "used; scores pass through threadgroup memory";
    case UnitsState::kRegisters:
      return "used; scores stay in registers";
  }
}

bool is_step(const Problem& p) {
  const bool is_packed_step = p.packed && max_sequence_rows(p) == 1;
  // Steps over a shared prefix make partial results of it.
  return (is_packed_step || is_decode(p.op) || p.part) && !is_backward(p.op);
}

}  // namespace fattn
