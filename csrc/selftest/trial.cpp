#include "trial.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <utility>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linspace.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/where.h>

#include "../describe/tensor_checks.h"
#include "../launch/launch.h"

namespace fattn {
namespace {

using at::Tensor;
using Given = std::vector<std::pair<const char*, c10::IValue>>;

struct Range {
  int64_t begin;
  int64_t end;
};

struct Heads {
  int64_t of_query;
  int64_t of_keys;
};

// Two packed sequences, a short one before a long one.
constexpr std::array<int64_t, 2> kPackedRows{3, 83}, kPackedKeys{20, 117};
constexpr int64_t kAllRows = kPackedRows[0] + kPackedRows[1], kAllKeys = kPackedKeys[0] + kPackedKeys[1];
constexpr int64_t kBand = 2048;  // elements around a result

Tensor ints(std::vector<int32_t> numbers) { return at::tensor(numbers, at::kInt).to(at::kMPS); }

Tensor starts(const std::array<int64_t, 2>& lengths) {
  return ints({0, int32_t(lengths[0]), int32_t(lengths[0] + lengths[1])});
}

template <typename AnyCall>
AnyCall described(const char* op, AnyCall (*describe)(const Arguments&), const Given& given) {
  const auto handle = c10::Dispatcher::singleton().findSchemaOrThrow(op, "");
  Invocation call(handle);
  for (const auto& [name, value] : given) call.set(name, value);
  return describe(call.arguments());
}

// The trials of a size. Their numbers are the same in every process, and torch's generators are not used.
class Trials {
 public:
  explicit Trials(UnitsSize size)
      : is_backward_(size.is_backward),
        type_(scalar_type_of(size.dtype)),
        dim_(size.dim),
        value_dim_(size.value_dim()),
        is_padding_(padded_dim(kPaddedDims[0]) == size.dim) {}

  std::vector<Trial> made() {
    add_causal();
    add_all_options();
    add_packed();
    if (!is_backward_) {
      add_paged();
      add_tree();
      add_decode();
    }
    add_large();
    return std::move(trials_);
  }

 private:
  void add_causal() {
    constexpr int64_t kRows = 83, kKeys = 117, kOffset = -5;
    const Range seeing = {is_backward_ ? -kOffset : 0, kRows};
    Given given = dense({8, 1}, kRows, kKeys, {seeing}, {{0, kRows + kOffset}});
    given.insert(given.end(), {{"is_causal", true}, {"q_offset", kOffset}});
    add("a causal prefill of 83 rows", std::move(given), {seeing});
  }

  void add_all_options() {
    constexpr int64_t kRows = 83, kKeys = 118, kWindow = 20, kSinkTokens = 5;
    constexpr int64_t kBlindRow = 2, kHiddenKey = 40, kFirstWindow = kKeys - kRows - kWindow;
    std::vector<Range> seeing = {{0, kRows}};
    if (is_backward_) seeing = {{0, kBlindRow}, {kBlindRow + 1, kRows}};
    Tensor mask = uniform({kRows, kKeys});
    mask = at::where(mask.gt(-0.4), mask, -INFINITY);
    mask.slice(0, 0, 2 * kCellRows).slice(1, 2 * kCellKeys, 3 * kCellKeys).fill_(-INFINITY);
    mask.slice(0, 2 * kCellRows, 4 * kCellRows).slice(1, 2 * kCellKeys, 3 * kCellKeys).fill_(0.0);
    mask[kBlindRow].fill_(-INFINITY);
    mask.select(1, kHiddenKey).fill_(-INFINITY);
    mask = mask.to(type_).to(at::kMPS);
    const MaskMapCall map = describe_map_of(mask);
    const std::vector<Range> seen = {{0, kSinkTokens}, {kFirstWindow, kHiddenKey}, {kHiddenKey + 1, kKeys}};
    const int64_t dim = std::exchange(dim_, is_padding_ ? kPaddedDims[1] : dim_);
    const int64_t value_dim = std::exchange(value_dim_, is_padding_ ? dim_ : value_dim_);
    Given given = dense({4, 2}, kRows, kKeys, seeing, seen);
    given.insert(given.end(), {{"attn_mask", mask},
                               {"mask_map", launch(map, plan_or_raise(map.problem, DeviceFacts()))},
                               {"window_left", kWindow},
                               {"window_right", 7},
                               {"sink_tokens", kSinkTokens},
                               {"sinks", numbers(4, 2.0)},
                               {"alibi_slopes", numbers(4, 0.2)},
                               {"softcap", 5.0}});
    Given gradients;
    if (is_backward_) gradients = {{"grad_lse", uniform({1, 4, kRows}).to(at::kMPS)}};
    add("a prefill with all options", std::move(given), seeing, std::move(gradients));
    dim_ = dim;
    value_dim_ = value_dim;
  }

  void add_packed() {
    const Heads heads = {4, 2};
    add("a packed prefill",
        {{"query", rows(heads.of_query, kAllRows, dim_, {{0, kAllRows}}, 3.0).transpose(0, 1)},
         {"key", rows(heads.of_keys, kAllKeys, dim_, {{0, kAllKeys}}, 3.0).transpose(0, 1)},
         {"value", rows(heads.of_keys, kAllKeys, value_dim_, {{0, kAllKeys}}, 1.0).transpose(0, 1)},
         {"cu_seqlens_q", starts(kPackedRows)},
         {"cu_seqlens_k", starts(kPackedKeys)},
         {"max_seqlen_q", kPackedRows[1]},
         {"max_seqlen_k", kPackedKeys[1]},
         {"is_causal", true}},
        {{0, kAllRows}});
  }

  // The sequences' blocks are in reverse order. The short sequence's first block does not exist, and the
  // pool's first block is unused.
  void add_paged() {
    constexpr int64_t kBlock = 16, kTable = (kPackedKeys[1] + kBlock - 1) / kBlock;
    constexpr int64_t kBlocks = 1 + (kPackedKeys[0] + kBlock - 1) / kBlock + kTable;
    std::vector<int32_t> tables(2 * kTable, -1);
    std::vector<Range> seen;
    int64_t block = kBlocks;
    for (size_t i = 0; i < kPackedKeys.size(); ++i) {
      for (int64_t key = 0; key < kPackedKeys[i]; key += kBlock) {
        --block;
        if (i == 0 && key == 0) continue;
        tables[i * kTable + size_t(key / kBlock)] = int32_t(block);
        seen.push_back({block * kBlock, block * kBlock + std::min(kBlock, kPackedKeys[i] - key)});
      }
    }
    const auto pool = [&](int64_t dim, double largest) {
      return rows(1, kBlocks * kBlock, dim, seen, largest)
          .view({1, kBlocks, kBlock, dim})
          .permute({1, 2, 0, 3});
    };
    add_forward("a paged prefill of shared heads", "fattn::paged_prefill", describe_paged_prefill,
                {{"query", rows(8, kAllRows, dim_, {{0, kAllRows}}, 3.0).transpose(0, 1)},
                 {"key_cache", pool(dim_, 3.0)},
                 {"value_cache", pool(value_dim_, 1.0)},
                 {"block_tables", ints(tables).view({2, kTable})},
                 {"seq_lens", ints({int32_t(kPackedKeys[0]), int32_t(kPackedKeys[1])})},
                 {"cu_seqlens_q", starts(kPackedRows)},
                 {"max_seqlen_q", kPackedRows[1]},
                 {"is_causal", true}});
  }

  // The second token sees the first and itself, the third only the first.
  void add_tree() {
    Given given = cached({16, 2}, 3);
    given.emplace_back("tree_mask", at::tensor({1, 3, 1}, at::kLong).to(at::kMPS));
    add_forward("a decode of 24 rows", "fattn::decode", describe_decode, given);
  }

  void add_decode() {
    Given given = cached({14, 2}, 8);
    given.insert(given.end(), {{"window_left", 700},
                               {"sink_tokens", 5},
                               {"sinks", numbers(14, 2.0)},
                               {"alibi_slopes", numbers(14, 0.2)},
                               {"softcap", 5.0}});
    add_forward("a decode of 56 rows", "fattn::decode", describe_decode, given);
  }

  void add_large() {
    constexpr int64_t kRows = 1024, kKeys = 2048;
    add("a problem of 1,024 rows and 2,048 keys", dense({1, 1}, kRows, kKeys, {{0, kRows}}, {{0, kKeys}}),
        {{0, kRows}});
  }

  void add_forward(const char* what, const char* op, Call (*describe)(const Arguments&), const Given& given) {
    trials_.push_back({what, BackwardCall{described(op, describe, given)}, std::nullopt});
  }

  // A prefill, dense or packed, or its backward, whose rows `seeing` have a gradient.
  void add(const char* what, Given given, const std::vector<Range>& seeing, Given gradients = {}) {
    const bool packed = std::any_of(given.begin(), given.end(), [](const auto& argument) {
      return argument.first == std::string_view("cu_seqlens_k");
    });
    const char* op = packed ? "fattn::varlen_prefill" : "fattn::prefill";
    const auto describe = packed ? describe_varlen_prefill : describe_prefill;
    if (!is_backward_) return add_forward(what, op, describe, given);
    Call forward = described(op, describe, given);
    forward.problem.has_out_remainder = true;
    const Problem& p = forward.problem;
    const Tensor grad_out = rows(p.q_heads, p.q_len, p.value_dim, seeing, 1.0);
    gradients.emplace_back("grad_out", packed ? grad_out.transpose(0, 1) : grad_out.unsqueeze(0));
    const ResultSizes sizes = result_sizes(p);  // the self-test replaces the results of the forward
    gradients.emplace_back("lse", at::full(sizes.lse, NAN, at::kFloat).to(at::kMPS));
    for (const char* name : {"out", "out_remainder"}) {
      gradients.emplace_back(name, at::full(sizes.out, NAN, type_).to(at::kMPS));
    }
    given.insert(given.end(), gradients.begin(), gradients.end());
    trials_.push_back(
        {what,
         packed ? described("fattn::varlen_prefill_backward", describe_varlen_prefill_backward, given)
                : described("fattn::prefill_backward", describe_prefill_backward, given),
         forward});
  }

  Given dense(Heads heads, int64_t q_len, int64_t kv_len, const std::vector<Range>& seeing,
              const std::vector<Range>& seen) {
    return {{"query", rows(heads.of_query, q_len, dim_, seeing, 3.0).unsqueeze(0)},
            {"key", rows(heads.of_keys, kv_len, dim_, seen, 3.0).unsqueeze(0)},
            {"value", rows(heads.of_keys, kv_len, value_dim_, seen, 1.0).unsqueeze(0)}};
  }

  // A decode with unused cache capacity.
  Given cached(Heads heads, int64_t q_len) {
    constexpr int64_t kKeys = 1091, kRoom = 9;
    Given given = dense(heads, q_len, kKeys + kRoom, {{0, q_len}}, {{0, kKeys}});
    given.emplace_back("seq_lens", ints({int32_t(kKeys)}));
    return given;
  }

  Tensor uniform(at::IntArrayRef sizes) {
    return at::full(sizes, 0.0, at::kFloat).uniform_(-1.0, 1.0, generator_);
  }

  // [heads, rows, dim] on the GPU. The first head has numbers up to `largest`, the last three times as large,
  // so that some rows have a dominant key. Rows that are not in `seen`, and all memory around, are NaN.
  Tensor rows(int64_t heads, int64_t count, int64_t dim, const std::vector<Range>& seen, double largest) {
    constexpr int64_t kGap = 16;
    const Tensor memory = at::full({heads + 2, count, dim + kGap}, NAN, at::kFloat);
    const Tensor spread =
        largest > 1.0 ? at::linspace(largest, 3.0 * largest, heads) : at::full({heads}, largest);
    for (const Range& range : seen) {
      memory.slice(0, 1, heads + 1)
          .slice(1, range.begin, range.end)
          .slice(2, 0, dim)
          .copy_(uniform({heads, range.end - range.begin, dim}).mul(spread.view({heads, 1, 1})));
    }
    return memory.to(type_).to(at::kMPS).slice(0, 1, heads + 1).slice(2, 0, dim);
  }

  Tensor numbers(int64_t heads, double largest) {
    return at::linspace(largest / double(heads), largest, heads).to(at::kMPS);
  }

  bool is_backward_;
  at::ScalarType type_;
  int64_t dim_;
  int64_t value_dim_;
  bool is_padding_;
  at::Generator generator_ = at::detail::createCPUGenerator(24);
  std::vector<Trial> trials_;
};

// Memory for the results of a call, in the operator's order, filled with NaN, with a band on both sides.
std::vector<Tensor> memory_of_results(const BackwardCall& call) {
  const auto memory = [](int64_t size, at::ScalarType type) {
    return at::full({size + 2 * kBand}, NAN, type).to(at::kMPS);
  };
  if (!is_backward(call.problem.op)) {
    const ResultSizes sizes = result_sizes(call.problem);
    return {memory(c10::multiply_integers(sizes.out), call.query.scalar_type()),
            memory(c10::multiply_integers(sizes.lse), at::kFloat)};
  }
  return std::apply(
      [&](const auto&... gradient) {
        return std::vector<Tensor>{memory(gradient.numel(), gradient.scalar_type())...};
      },
      empty_gradients(call));
}

std::vector<Tensor> results_of(const BackwardCall& call, const Plan& plan) {
  const std::vector<Tensor> memory = memory_of_results(call);
  const auto result = [&](size_t i) { return memory[i].slice(0, kBand, memory[i].size(0) - kBand); };
  if (is_backward(call.problem.op)) {
    launch_into(call, plan, {result(0), result(1), result(2), result(3), result(4)});
  } else {
    launch_into(call, plan, std::vector<Tensor>{result(0), result(1)});
  }
  return memory;
}

// Maximum differences from the simdgroup kernels: absolute for values below 1, and for a gradient relative to
// its maximum. Both round results, weights and gradients of scores to the dtype; relaxed products truncate
// the latter to 10 bits.
double max_error(bool is_lse, DType dtype) {
  if (is_lse) return 1e-3;
  return dtype == DType::kFloat16 ? 4e-3 : 3.2e-2;
}

}  // namespace

std::vector<Trial> trials_of(UnitsSize size) { return Trials(size).made(); }

std::string difference(const Trial& trial, const Plan& tested, const Plan& expected) {
  static constexpr const char* kResults[] = {"out", "lse"};
  static constexpr const char* kGradients[] = {"grad_query", "grad_key", "grad_value", "grad_sinks",
                                               "grad_alibi_slopes"};
  const bool is_gradient = is_backward(trial.call.problem.op);
  const std::vector<Tensor> mine = results_of(trial.call, tested), theirs = results_of(trial.call, expected);
  for (size_t i = 0; i < mine.size(); ++i) {
    const Tensor memory = mine[i].cpu().to(at::kDouble);
    const int64_t size = memory.size(0) - 2 * kBand;
    if (!memory.slice(0, 0, kBand).isnan().all().item<bool>() ||
        !memory.slice(0, kBand + size).isnan().all().item<bool>())
      return "it wrote beyond its results";
    if (size == 0) continue;
    const Tensor result = memory.slice(0, kBand, kBand + size);
    const Tensor wanted = theirs[i].cpu().to(at::kDouble).slice(0, kBand, kBand + size);
    // Equal results may be infinite; a NaN counts as infinite.
    const Tensor errors = result.sub(wanted).abs().masked_fill(result.eq(wanted), 0.0);
    const auto error = errors.nan_to_num(INFINITY).max().item<double>();
    const double scale = is_gradient ? wanted.abs().max().item<double>() : 1.0;
    const double limit = scale * max_error(!is_gradient && i == 1, trial.call.problem.dtype);
    if (error <= limit) continue;
    char text[128];
    std::snprintf(text, sizeof text,
                  "its %s differs by %.2g from that of the simdgroup kernels (at most %.2g)",
                  is_gradient ? kGradients[i] : kResults[i], error, limit);
    return text;
  }
  return "";
}

}  // namespace fattn
