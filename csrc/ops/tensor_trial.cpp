#include "tensor_trial.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include "../describe/tensor_checks.h"
#include "launch.h"
#include "tensor_problems.h"

namespace fattn {
namespace {

using at::Tensor;

constexpr int64_t kGuardBytes = 4096;
constexpr int64_t kRowGap = 16;  // elements between the rows of an operand
// The sequence before the long one of a packed call.
constexpr int64_t kShortRows = 3, kShortKeys = 20;
// Under a mask no row sees this key, and this row sees none.
constexpr int64_t kHiddenKey = 40, kBlindRow = 2;

template <typename T>
void store(uint8_t* to, T value) {
  std::memcpy(to, &value, sizeof value);
}
template <typename T>
double load(const uint8_t* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return double(value);
}

// Cells of the mask: every third is hidden, every third has holes.
int64_t kind_of_cell(int64_t row, int64_t key) { return (row / kCellRows + key / kCellKeys) % 3; }
bool is_hidden(int64_t row, int64_t key) {
  const int64_t kind = kind_of_cell(row, key);
  return key == kHiddenKey || row == kBlindRow || kind == 2 || (kind == 1 && (row * 7 + key * 5) % 11 == 0);
}

}  // namespace

Place Memory::add(at::ScalarType type, std::vector<int64_t> sizes, std::vector<int64_t> strides) {
  Place place{type, std::move(sizes), std::move(strides), int64_t(bytes_.size()) + kGuardBytes};
  bytes_.resize(size_t(place.byte + (place.bytes() + 255) / 256 * 256 + kGuardBytes), 0xff);
  return place;
}

void Memory::set(const Place& place, int64_t element, double value) {
  uint8_t* to = bytes_.data() + place.byte + element * int64_t(c10::elementSize(place.type));
  switch (place.type) {
    case at::kHalf:
      return store(to, c10::Half(float(value)));
    case at::kBFloat16:
      return store(to, c10::BFloat16(float(value)));
    case at::kFloat:
      return store(to, float(value));
    case at::kInt:
      return store(to, int32_t(value));
    default:  // bool, bytes
      return store(to, uint8_t(value));
  }
}

double Memory::get(const Place& place, int64_t element) const {
  const uint8_t* from = bytes_.data() + place.byte + element * int64_t(c10::elementSize(place.type));
  if (place.type == at::kFloat) return load<float>(from);
  return place.type == at::kHalf ? load<c10::Half>(from) : load<c10::BFloat16>(from);
}

bool Memory::is_guarded(const Place& place) const {
  const auto is_kept = [&](int64_t begin, int64_t end) {
    return std::all_of(bytes_.begin() + begin, bytes_.begin() + end, [](uint8_t b) { return b == 0xff; });
  };
  const int64_t end = place.byte + place.bytes();
  return is_kept(place.byte - kGuardBytes, place.byte) && is_kept(end, end + kGuardBytes);
}

void Memory::upload() {
  device_ = at::empty({int64_t(bytes_.size())}, at::device(at::kMPS).dtype(at::kByte));
  device_.copy_(at::from_blob(bytes_.data(), {int64_t(bytes_.size())}, at::kByte));
}

void Memory::download() { at::from_blob(bytes_.data(), {int64_t(bytes_.size())}, at::kByte).copy_(device_); }

Tensor Memory::on_device(const Place& place) const {
  const int64_t offset = place.byte / int64_t(c10::elementSize(place.type));
  return device_.view(place.type).as_strided(place.sizes, place.strides, offset);
}

Trial::Trial(const Problem& problem) : problem_(problem), type_(scalar_type_of(problem.dtype)) {
  Problem& p = problem_;
  p.batch = p.packed ? 2 : 1;
  sequences_ = {{p.q_len, p.kv_len}};
  if (p.packed) {
    sequences_ = {{kShortRows, kShortKeys}, {p.q_len, p.kv_len}};
    p.max_seqlen_q = p.q_len;
    p.q_len += kShortRows;
  }
  query_ = operand(p.q_heads, p.q_len);
  p.query = {query_.strides[0], query_.strides[1], query_.strides[2]};
  add_keys();
  add_sequences();
  add_options();
  add_mask();
  tested_ = results();
  expected_ = results();
  // Scores have a standard deviation of 1 to 10: some rows have one dominant key.
  fill_rows(query_, std::vector<bool>(size_t(p.q_len), true), 3.0f);
  fill_rows(key_, seen_rows(), 3.0f);
  fill_rows(value_, seen_rows(), 0.0f);
  memory_.upload();
}

void Trial::add_keys() {
  Problem& p = problem_;
  if (p.block_size > 0) {
    int64_t needed = 1;  // a block that no sequence has
    for (const Sequence& sequence : sequences_) needed += (sequence.keys + p.block_size - 1) / p.block_size;
    p.num_blocks = needed;
    p.max_blocks = (p.kv_len + p.block_size - 1) / p.block_size;
    p.kv_len = p.max_blocks * p.block_size;
  }
  key_ = operand(p.kv_heads, stored_rows());
  value_ = operand(p.kv_heads, stored_rows());
  p.key = p.value = {key_.strides[0], key_.strides[1], key_.strides[2]};
  if (p.block_size > 0) p.key.batch = p.value.batch = p.block_size * p.key.row;
  if (p.packed_keys) {
    p.kv_rows = stored_rows();
    p.max_seqlen_k = p.kv_len;
    p.q_offset = 0;
  }
}

int64_t Trial::stored_rows() const {
  if (problem_.block_size > 0) return problem_.num_blocks * problem_.block_size;
  return problem_.packed_keys ? kShortKeys + problem_.kv_len : problem_.kv_len;
}

// Lengths and starts of the sequences; their blocks follow one another backwards.
void Trial::add_sequences() {
  Problem& p = problem_;
  if (p.packed) put_sequences(starts_ = memory_.add(at::kInt, p.batch + 1), /*of_keys=*/false);
  if (p.packed_keys) put_sequences(key_starts_ = memory_.add(at::kInt, p.batch + 1), /*of_keys=*/true);
  p.cu_seqlens_stride = p.cu_seqlens_k_stride = 1;
  if (p.block_size == 0) return;
  lengths_ = memory_.add(at::kInt, p.batch);
  blocks_ = memory_.add(at::kInt, p.batch * p.max_blocks);
  p.seq_lens_stride = p.block_table_entry_stride = 1;
  p.block_table_batch_stride = p.max_blocks;
  int64_t block = p.num_blocks;
  for (int64_t i = 0; i < p.batch; ++i) {
    const int64_t keys = sequences_[size_t(i)].keys;
    memory_.set(lengths_, i, double(keys));
    for (int64_t j = 0; j < p.max_blocks; ++j) {
      memory_.set(blocks_, i * p.max_blocks + j, j * p.block_size < keys ? double(--block) : -1.0);
    }
  }
}

void Trial::put_sequences(const Place& starts, bool of_keys) {
  int64_t start = 0;
  memory_.set(starts, 0, 0.0);
  for (size_t i = 0; i < sequences_.size(); ++i) {
    start += of_keys ? sequences_[i].keys : sequences_[i].rows;
    memory_.set(starts, int64_t(i) + 1, double(start));
  }
}

void Trial::add_options() {
  const auto add_numbers = [&](NumberTensor& option, double most) {
    if (!option.given) return Place{};
    const Place place = memory_.add(scalar_type_of(dtype_of(option.kind)), problem_.q_heads);
    for (int64_t head = 0; head < problem_.q_heads; ++head) {
      memory_.set(place, head, most * (0.5 + double(head)) / double(problem_.q_heads));
    }
    option.of_sequences = false;
    option.stride = 1;
    option.batch_stride = 0;
    return place;
  };
  sinks_ = add_numbers(problem_.options.sinks, 2.0);
  slopes_ = add_numbers(problem_.options.alibi_slopes, 0.2);
}

// A mask with hidden cells and, if the problem has one, its map.
void Trial::add_mask() {
  Problem& p = problem_;
  if (p.mask_dtype == DType::kOther) return;
  // Pairs of keys begin at even elements.
  const int64_t row_stride = p.kv_len + (p.mask_pairs == (p.kv_len % 2 == 0) ? 2 : 1);
  p.mask = {0, 0, row_stride, 1};
  const bool is_bool = p.mask_dtype == DType::kBool;
  const at::ScalarType type = is_bool ? at::kBool : scalar_type_of(p.mask_dtype);
  mask_ = memory_.add(type, {1, 1, p.q_len, p.kv_len}, {0, 0, row_stride, 1});
  for (int64_t row = 0; row < p.q_len; ++row) {
    for (int64_t key = 0; key < p.kv_len; ++key) {
      const double shown = is_bool ? 1.0 : double(numbers_.next()), hidden = is_bool ? 0.0 : -INFINITY;
      memory_.set(mask_, row * row_stride + key, is_hidden(row, key) ? hidden : shown);
    }
  }
  if (!p.has_mask_map) return;
  const int64_t rows = (p.q_len + kCellRows - 1) / kCellRows, keys = (p.kv_len + kCellKeys - 1) / kCellKeys;
  p.mask_map = {0, 0, keys, 1};
  mask_map_ = memory_.add(at::kByte, rows * keys);
  for (int64_t cell = 0; cell < rows * keys; ++cell) {
    const int64_t kind = kind_of_cell(cell / keys * kCellRows, cell % keys * kCellKeys);
    memory_.set(mask_map_, cell, kind == 2 ? double(kCellHidden) : double(kCellMixed));
  }
}

Call Trial::call() const {
  Call call{.problem = problem_,
            .query = memory_.on_device(query_),
            .key = memory_.on_device(key_),
            .value = memory_.on_device(value_)};
  const auto set = [&](Tensor& operand, const Place& place) {
    if (!place.sizes.empty()) operand = memory_.on_device(place);
  };
  set(call.attn_mask, mask_);
  set(call.mask_map, mask_map_);
  set(call.sinks, sinks_);
  set(call.alibi_slopes, slopes_);
  set(call.cu_seqlens_q, starts_);
  set(call.cu_seqlens_k, key_starts_);
  set(call.seq_lens, lengths_);
  set(call.block_tables, blocks_);
  return call;
}

void Trial::run(const Call& call, const Plan& tested, const Plan& expected) {
  launch_into(call, tested, memory_.on_device(tested_.out), memory_.on_device(tested_.lse));
  launch_into(call, expected, memory_.on_device(expected_.out), memory_.on_device(expected_.lse));
  memory_.download();
}

std::string Trial::fault() const {
  if (!memory_.is_guarded(tested_.out) || !memory_.is_guarded(tested_.lse))
    return "it wrote beyond its results";
  std::string wrong = difference("out", tested_.out, expected_.out, most_out_error(problem_.dtype));
  return wrong.empty() ? difference("lse", tested_.lse, expected_.lse, kMostLseError) : wrong;
}

Place Trial::operand(int64_t heads, int64_t rows) {
  const int64_t dim = problem_.head_dim, row = dim + kRowGap, head = rows * row + kRowGap;
  return memory_.add(type_, {1, heads, rows, dim}, {heads * head, head, row, 1});
}

Trial::Results Trial::results() {
  const int64_t rows = problem_.q_heads * problem_.q_len;
  return {memory_.add(type_, rows * problem_.value_dim), memory_.add(at::kFloat, rows)};
}

// The stored rows of keys that some query row sees.
std::vector<bool> Trial::seen_rows() const {
  const Problem& p = problem_;
  std::vector<bool> seen(size_t(stored_rows()), p.packed_keys);
  if (!p.packed) {
    const int64_t end = p.is_causal ? std::min(p.kv_len, p.q_len + p.q_offset) : p.kv_len;
    std::fill_n(seen.begin(), end, true);
    if (p.mask_dtype != DType::kOther) seen[kHiddenKey] = false;
  }
  int64_t block = p.num_blocks;
  for (const Sequence& sequence : sequences_) {
    for (int64_t key = 0; p.block_size > 0 && key < sequence.keys; ++key) {
      if (key % p.block_size == 0) --block;
      seen[size_t(block * p.block_size + key % p.block_size)] = true;
    }
  }
  return seen;
}

// `spread`: numbers of head h are up to spread + h; 0: up to 1.
void Trial::fill_rows(const Place& place, const std::vector<bool>& rows, float spread) {
  for (int64_t head = 0; head < place.sizes[1]; ++head) {
    const float most = spread == 0.0f ? 1.0f : spread + float(head);
    for (int64_t row = 0; row < place.sizes[2]; ++row) {
      for (int64_t column = 0; rows[size_t(row)] && column < place.sizes[3]; ++column) {
        memory_.set(place, head * place.strides[1] + row * place.strides[2] + column, most * numbers_.next());
      }
    }
  }
}

std::string Trial::difference(const char* name, const Place& tested, const Place& expected,
                              double most) const {
  double largest = 0.0;
  for (int64_t i = 0; i < tested.span(); ++i) {
    const double mine = memory_.get(tested, i), true_value = memory_.get(expected, i);
    if (mine == true_value) continue;  // of lse also -inf
    const double error = std::abs(mine - true_value);
    if (!(error <= most)) largest = std::isnan(error) ? INFINITY : std::max(largest, error);
  }
  if (largest == 0.0) return "";
  char text[128];
  std::snprintf(text, sizeof text, "its %s differs by %.2g from that of the simdgroup kernels (at most %.2g)",
                name, largest, most);
  return text;
}

}  // namespace fattn
