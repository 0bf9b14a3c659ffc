#include "tensor_trial.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "../describe/tensor_checks.h"
#include "launch.h"
#include "tensor_problems.h"

namespace fattn {
namespace {

using at::Tensor;

constexpr int64_t kRowGap = 16;  // elements between the rows of an operand
// The sequence before the long one of a packed call.
constexpr int64_t kShortRows = 3, kShortKeys = 20;
// Under a mask no row sees this key, and this row sees none.
constexpr int64_t kHiddenKey = 40, kBlindRow = 2;
// Keys that the cache of a decode has room for.
constexpr int64_t kRoom = 9;

// Cells of the mask: every third is hidden, every third has holes and hides half of its keys, the first and
// the second half in turn.
int64_t kind_of_cell(int64_t row, int64_t key) { return (row / kCellRows + key / kCellKeys) % 3; }
bool is_in_hidden_half(int64_t row, int64_t key) {
  return key % kCellKeys / (kCellKeys / 2) == row / kCellRows % 2;
}
bool is_hidden(int64_t row, int64_t key) {
  const int64_t kind = kind_of_cell(row, key);
  const bool is_hole = is_in_hidden_half(row, key) || (row * 7 + key * 5) % 11 == 0;
  return key == kHiddenKey || row == kBlindRow || kind == 2 || (kind == 1 && is_hole);
}
// The byte of a map for the cell of this row and key, its first ones.
int64_t cell_byte(int64_t row, int64_t key) {
  const int64_t kind = kind_of_cell(row, key);
  if (kind == 2) return kCellHidden;
  int64_t hidden = 0;
  for (int64_t fragment = 0; kind == 1 && fragment < kCellFragments; ++fragment) {
    if (is_in_hidden_half(row, fragment * kFragment)) hidden |= int64_t{1} << fragment;
  }
  return kCellMixed | hidden << kCellKindBits;
}

}  // namespace

Trial::Trial(const Problem& problem) : problem_(problem), type_(scalar_type_of(problem.dtype)) {
  Problem& p = problem_;
  p.batch = p.packed ? 2 : 1;
  sequences_ = {{p.q_len, p.kv_len - (p.has_seq_lens ? kRoom : 0)}};
  if (p.packed) {
    sequences_ = {{kShortRows, kShortKeys}, {p.q_len, p.kv_len}};
    p.max_seqlen_q = p.q_len;
    p.q_len += kShortRows;
  }
  if (p.packed_keys) {
    p.max_seqlen_k = p.kv_len;
    p.kv_len += kShortKeys;
    p.q_offset = 0;
  }
  query_ = operand(p.q_heads, p.q_len, p.head_dim);
  p.query = {query_.strides[0], query_.strides[1], query_.strides[2]};
  add_keys();
  add_sequences();
  add_options();
  add_tree();
  add_mask();
  if (is_backward(p.op)) add_backward();
  add_results();
  // Scores have a standard deviation of 1 to 10: some rows have one dominant key.
  fill_rows(query_, seeing_rows(), 3.0f);
  fill_rows(key_, seen_rows(), 3.0f);
  fill_rows(value_, seen_rows(), 0.0f);
  memory_.upload();
}

void Trial::add_backward() {
  Problem& p = problem_;
  const int64_t rows = p.q_heads * p.q_len;
  grad_out_ = operand(p.q_heads, p.q_len, p.value_dim);
  p.grad_out = {grad_out_.strides[0], grad_out_.strides[1], grad_out_.strides[2]};
  fill_rows(grad_out_, seeing_rows(), 0.0f);
  forward_out_ = memory_.add(type_, rows * p.value_dim);
  lse_ = memory_.add(at::kFloat, rows);
  if (!p.has_grad_lse) return;
  grad_lse_ = memory_.add(at::kFloat, rows);
  for (int64_t row = 0; row < rows; ++row) memory_.set(grad_lse_, row, numbers_.next());
}

void Trial::add_result(const char* name, at::ScalarType type, int64_t size, double most) {
  results_.push_back({name, memory_.add(type, size), memory_.add(type, size), most});
}

// In the order of the operator's results; those of absent options have no element.
void Trial::add_results() {
  const Problem& p = problem_;
  const double most = most_out_error(p.dtype);
  const int64_t rows = p.q_heads * p.q_len, keys = p.kv_heads * stored_rows();
  if (!is_backward(p.op)) {
    add_result("out", type_, rows * p.value_dim, most);
    add_result("lse", at::kFloat, rows, kMostLseError);
    return;
  }
  const auto add_numbers = [&](const char* name, const NumberTensor& option) {
    add_result(name, scalar_type_of(dtype_of(option.kind)), option.given ? p.q_heads : 0, most);
  };
  add_result("grad_query", type_, rows * p.head_dim, most);
  add_result("grad_key", type_, keys * p.head_dim, most);
  add_result("grad_value", type_, keys * p.value_dim, most);
  add_numbers("grad_sinks", p.options.sinks);
  add_numbers("grad_alibi_slopes", p.options.alibi_slopes);
}

void Trial::add_keys() {
  Problem& p = problem_;
  if (p.block_size > 0) {
    int64_t needed = 1;  // a block that no sequence has
    for (const Sequence& sequence : sequences_) needed += (sequence.keys + p.block_size - 1) / p.block_size;
    // A large block, such as the whole capacity of a cache, has memory for its first keys alone.
    rows_per_block_ = std::min(p.block_size, p.kv_len + kRoom);
    p.num_blocks = needed;
    p.max_blocks = (p.kv_len + p.block_size - 1) / p.block_size;
    p.kv_len = p.max_blocks * p.block_size;
  }
  key_ = operand(p.kv_heads, stored_rows(), p.head_dim);
  value_ = operand(p.kv_heads, stored_rows(), p.value_dim);
  p.key = {key_.strides[0], key_.strides[1], key_.strides[2]};
  p.value = {value_.strides[0], value_.strides[1], value_.strides[2]};
  if (p.block_size > 0) {
    p.key.batch = rows_per_block_ * p.key.row;
    p.value.batch = rows_per_block_ * p.value.row;
  }
}

int64_t Trial::stored_rows() const {
  return problem_.block_size > 0 ? problem_.num_blocks * rows_per_block_ : problem_.kv_len;
}

// The first block of the short sequence, with the first key of a step: its keys do not exist.
bool Trial::is_missing(size_t sequence, int64_t block) const { return sequence == 0 && block == 0; }

// Lengths and starts of the sequences; their blocks follow one another backwards.
void Trial::add_sequences() {
  Problem& p = problem_;
  if (p.packed) put_sequences(starts_ = memory_.add(at::kInt, p.batch + 1), /*of_keys=*/false);
  if (p.packed_keys) put_sequences(key_starts_ = memory_.add(at::kInt, p.batch + 1), /*of_keys=*/true);
  p.cu_seqlens_stride = p.cu_seqlens_k_stride = 1;
  if (p.has_seq_lens) {
    lengths_ = memory_.add(at::kInt, p.batch);
    p.seq_lens_stride = 1;
    for (int64_t i = 0; i < p.batch; ++i) memory_.set(lengths_, i, double(sequences_[size_t(i)].keys));
  }
  if (p.block_size == 0) return;
  blocks_ = memory_.add(at::kInt, p.batch * p.max_blocks);
  p.block_table_entry_stride = 1;
  p.block_table_batch_stride = p.max_blocks;
  int64_t block = p.num_blocks;
  for (int64_t i = 0; i < p.batch; ++i) {
    const int64_t keys = sequences_[size_t(i)].keys;
    for (int64_t j = 0; j < p.max_blocks; ++j) {
      const bool exists = j * p.block_size < keys;
      if (exists) --block;
      const bool is_given = exists && !is_missing(size_t(i), j);
      memory_.set(blocks_, i * p.max_blocks + j, is_given ? double(block) : -1.0);
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

// A tree in which each draft token has two children, and the last one does not see itself.
void Trial::add_tree() {
  Problem& p = problem_;
  if (!p.options.tree_mask) return;
  tree_ = memory_.add(at::kLong, p.q_len);
  p.options.tree_mask_batch_stride = 0;
  p.options.tree_mask_row_stride = 1;
  for (int64_t row = 0; row < p.q_len; ++row) {
    int64_t seen = row == p.q_len - 1 ? 0 : int64_t{1} << row;
    for (int64_t above = row; above > 0; above = (above - 1) / 2) seen |= int64_t{1} << (above - 1) / 2;
    memory_.set(tree_, row, double(seen));
  }
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
    memory_.set(mask_map_, cell, double(cell_byte(cell / keys * kCellRows, cell % keys * kCellKeys)));
  }
}

BackwardCall Trial::call() const {
  BackwardCall call;
  call.problem = problem_;
  const auto set = [&](Tensor& operand, const Place& place) {
    if (!place.sizes.empty()) operand = memory_.on_device(place);
  };
  set(call.query, query_);
  set(call.key, key_);
  set(call.value, value_);
  set(call.attn_mask, mask_);
  set(call.mask_map, mask_map_);
  set(call.sinks, sinks_);
  set(call.alibi_slopes, slopes_);
  set(call.tree_mask, tree_);
  set(call.cu_seqlens_q, starts_);
  set(call.cu_seqlens_k, key_starts_);
  set(call.seq_lens, lengths_);
  set(call.block_tables, blocks_);
  set(call.grad_out, grad_out_);
  set(call.grad_lse, grad_lse_);
  set(call.lse, lse_);
  return call;
}

void Trial::run_forward(const Plan& forward) const {
  launch_into(call(), forward, memory_.on_device(forward_out_), memory_.on_device(lse_));
}

void Trial::launch_into_results(const Plan& plan, Place Result::* place) const {
  const auto result = [&](size_t i) { return memory_.on_device(results_[i].*place); };
  if (is_backward(problem_.op)) {
    launch_into(call(), plan, {result(0), result(1), result(2), result(3), result(4)});
  } else {
    launch_into(call(), plan, result(0), result(1));
  }
}

void Trial::run(const Plan& tested, const Plan& expected) {
  launch_into_results(tested, &Result::tested);
  launch_into_results(expected, &Result::expected);
  memory_.download();
}

std::string Trial::fault() const {
  for (const Result& result : results_) {
    if (!memory_.is_guarded(result.tested)) return "it wrote beyond its results";
  }
  std::string wrong;
  for (size_t i = 0; i < results_.size() && wrong.empty(); ++i) wrong = difference(results_[i]);
  return wrong;
}

Place Trial::operand(int64_t heads, int64_t rows, int64_t dim) {
  const int64_t row = dim + kRowGap, head = rows * row + kRowGap;
  return memory_.add(type_, {1, heads, rows, dim}, {0, head, row, 1});  // packed rows have no batch
}

// The stored rows of keys that some query row sees.
std::vector<bool> Trial::seen_rows() const {
  const Problem& p = problem_;
  std::vector<bool> seen(size_t(stored_rows()), p.packed_keys);
  if (!p.packed && p.block_size == 0) {
    const int64_t keys = sequences_[0].keys;
    const int64_t end = p.is_causal ? std::min(keys, p.q_len + p.q_offset) : keys;
    std::fill_n(seen.begin(), end, true);
    if (p.mask_dtype != DType::kOther) seen[kHiddenKey] = false;
  }
  int64_t block = p.num_blocks;
  for (size_t i = 0; i < sequences_.size(); ++i) {
    for (int64_t key = 0; p.block_size > 0 && key < sequences_[i].keys; ++key) {
      if (key % p.block_size == 0) --block;
      const size_t row = size_t(block * rows_per_block_ + key % p.block_size);
      seen[row] = !is_missing(i, key / p.block_size);
    }
  }
  return seen;
}

// The query rows of a backward that see some key. Others have no influence on gradients.
std::vector<bool> Trial::seeing_rows() const {
  const Problem& p = problem_;
  std::vector<bool> seeing(size_t(p.q_len), true);
  if (!is_backward(p.op)) return seeing;
  if (p.mask_dtype != DType::kOther) seeing[kBlindRow] = false;
  if (p.is_causal && !p.packed) std::fill_n(seeing.begin(), std::max<int64_t>(-p.q_offset, 0), false);
  return seeing;
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

double Trial::largest_of(const Place& place) const {
  double largest = 0.0;
  for (int64_t i = 0; i < place.span(); ++i) largest = std::max(largest, std::abs(memory_.get(place, i)));
  return largest;
}

std::string Trial::difference(const Result& result) const {
  double most = result.most, largest = 0.0;
  if (is_backward(problem_.op)) most *= largest_of(result.expected);
  for (int64_t i = 0; i < result.tested.span(); ++i) {
    const double mine = memory_.get(result.tested, i), true_value = memory_.get(result.expected, i);
    if (mine == true_value) continue;  // of lse also -inf
    const double error = std::abs(mine - true_value);
    if (!(error <= most)) largest = std::isnan(error) ? INFINITY : std::max(largest, error);
  }
  if (largest == 0.0) return "";
  char text[128];
  std::snprintf(text, sizeof text, "its %s differs by %.2g from that of the simdgroup kernels (at most %.2g)",
                result.name, largest, most);
  return text;
}

}  // namespace fattn
