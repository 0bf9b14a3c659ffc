#include "tensor_problems.h"

#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <utility>
#include <variant>
#include <vector>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/Exception.h>

#include "../describe/arguments.h"
#include "../describe/calls.h"
#include "../describe/tensor_checks.h"
#include "../metal/executor.h"
#include "../plan/plan.h"
#include "launch.h"

namespace fattn {
namespace {

using at::Tensor;
using Sizes = std::vector<int64_t>;

constexpr int64_t kGuardBytes = 4096;
constexpr int64_t kRowGap = 16;  // elements between the rows of an operand

// Where a tensor is in the memory of a problem.
struct Place {
  at::ScalarType type;
  Sizes sizes;
  Sizes strides;
  int64_t byte;

  int64_t span() const {  // elements from the first to the last
    int64_t last = 0;
    for (size_t dim = 0; dim < sizes.size(); ++dim) last += (sizes[dim] - 1) * strides[dim];
    return last + 1;
  }
  int64_t bytes() const { return span() * int64_t(c10::elementSize(type)); }
};

// All tensors of a problem, with guard bands between. Every byte that is not written is of a NaN.
class Memory {
 public:
  Place add(at::ScalarType type, Sizes sizes, Sizes strides) {
    Place place{type, std::move(sizes), std::move(strides), int64_t(bytes_.size()) + kGuardBytes};
    bytes_.resize(size_t(place.byte + (place.bytes() + 255) / 256 * 256 + kGuardBytes), 0xff);
    return place;
  }
  void set(const Place& place, int64_t element, float value) {
    if (place.type == at::kHalf) return store(place, element, c10::Half(value));
    store(place, element, c10::BFloat16(value));
  }
  float get(const Place& place, int64_t element) const {
    if (place.type == at::kFloat) return load<float>(place, element);
    return place.type == at::kHalf ? float(load<c10::Half>(place, element))
                                   : float(load<c10::BFloat16>(place, element));
  }
  // Whether the bands around a contiguous tensor are as they were.
  bool is_guarded(const Place& place) const {
    const auto is_kept = [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        if (bytes_[size_t(i)] != 0xff) return false;
      }
      return true;
    };
    const int64_t end = place.byte + place.bytes();
    return is_kept(place.byte - kGuardBytes, place.byte) && is_kept(end, end + kGuardBytes);
  }

  void upload() {
    device_ = at::empty({int64_t(bytes_.size())}, at::device(at::kMPS).dtype(at::kByte));
    device_.copy_(host());
  }
  void download() { host().copy_(device_); }
  Tensor on_device(const Place& place) const {
    const int64_t offset = place.byte / int64_t(c10::elementSize(place.type));
    return device_.view(place.type).as_strided(place.sizes, place.strides, offset);
  }

 private:
  Tensor host() { return at::from_blob(bytes_.data(), {int64_t(bytes_.size())}, at::kByte); }
  template <typename T>
  void store(const Place& place, int64_t element, T value) {
    std::memcpy(bytes_.data() + place.byte + element * int64_t(sizeof value), &value, sizeof value);
  }
  template <typename T>
  T load(const Place& place, int64_t element) const {
    T value;
    std::memcpy(&value, bytes_.data() + place.byte + element * int64_t(sizeof value), sizeof value);
    return value;
  }

  std::vector<uint8_t> bytes_;
  Tensor device_;
};

// Numbers between -1 and 1, the same in every process. torch's generators are the caller's.
class Numbers {
 public:
  float next() {
    state_ = state_ * 1664525u + 1013904223u;
    return float(state_ >> 8) / float(1 << 23) - 1.0f;
  }

 private:
  uint32_t state_ = 24;
};

struct Results {
  Place out;
  Place lse;
};

// A problem in memory: operands, and results of both kinds of kernels.
class Trial {
 public:
  Trial(TensorSize size, const TensorProblem& problem)
      : problem_(problem),
        dim_(problem.is_padded ? padded_dim(size) : size.dim),
        type_(scalar_type_of(size.dtype)) {
    query_ = operand(problem.q_heads, problem.q_len);
    key_ = operand(problem.kv_heads, problem.kv_len);
    value_ = operand(problem.kv_heads, problem.kv_len);
    tested_ = results();
    expected_ = results();
  }

  static int64_t padded_dim(TensorSize size) { return size.dim == 96 ? 72 : 0; }

  void upload() {
    const int64_t seen =
        problem_.is_causal ? std::min(problem_.kv_len, problem_.q_len + problem_.q_offset) : problem_.kv_len;
    // Scores have a standard deviation of 1 to 10: some rows have one dominant key.
    fill_rows(query_, problem_.q_len, 3.0f);
    fill_rows(key_, seen, 3.0f);
    fill_rows(value_, seen, 0.0f);
    memory_.upload();
  }

  // The call, described like any other.
  Call call() const {
    static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("fattn::prefill", "");
    Invocation prefill(op);
    prefill.set("query", memory_.on_device(query_)).set("key", memory_.on_device(key_));
    prefill.set("value", memory_.on_device(value_)).set("is_causal", problem_.is_causal);
    if (problem_.is_causal) prefill.set("q_offset", problem_.q_offset);
    return describe_prefill(prefill.arguments());
  }

  void run(const Call& call, const Plan& tested, const Plan& expected) {
    launch_into(call, tested, memory_.on_device(tested_.out), memory_.on_device(tested_.lse));
    launch_into(call, expected, memory_.on_device(expected_.out), memory_.on_device(expected_.lse));
    memory_.download();
  }

  std::string fault(DType dtype) const {
    if (!memory_.is_guarded(tested_.out) || !memory_.is_guarded(tested_.lse))
      return "it wrote beyond its results";
    std::string wrong = difference("out", tested_.out, expected_.out, most_out_error(dtype));
    return wrong.empty() ? difference("lse", tested_.lse, expected_.lse, kMostLseError) : wrong;
  }

 private:
  Place operand(int64_t heads, int64_t rows) {
    const int64_t row = dim_ + kRowGap, head = rows * row + kRowGap;
    return memory_.add(type_, {1, heads, rows, dim_}, {heads * head, head, row, 1});
  }
  Results results() {
    const int64_t heads = problem_.q_heads, rows = problem_.q_len;
    return {memory_.add(type_, {1, heads, rows, dim_}, {heads * rows * dim_, rows * dim_, dim_, 1}),
            memory_.add(at::kFloat, {1, heads, rows}, {heads * rows, rows, 1})};
  }
  // `spread`: numbers of head h are up to spread + h; 0: up to 1.
  void fill_rows(const Place& place, int64_t rows, float spread) {
    for (int64_t head = 0; head < place.sizes[1]; ++head) {
      const float most = spread == 0.0f ? 1.0f : spread + float(head);
      for (int64_t row = 0; row < rows; ++row) {
        for (int64_t column = 0; column < dim_; ++column) {
          memory_.set(place, head * place.strides[1] + row * place.strides[2] + column,
                      most * numbers_.next());
        }
      }
    }
  }
  std::string difference(const char* name, const Place& tested, const Place& expected, double most) const {
    double largest = 0.0;
    for (int64_t i = 0; i < tested.span(); ++i) {
      const double mine = memory_.get(tested, i), true_value = memory_.get(expected, i);
      if (mine == true_value) continue;  // of lse also -inf
      const double error = std::abs(mine - true_value);
      if (!(error <= most)) largest = std::isnan(error) ? INFINITY : std::max(largest, error);
    }
    if (largest == 0.0) return "";
    char text[128];
    std::snprintf(text, sizeof text,
                  "its %s differs by %.2g from that of the simdgroup kernels (at most %.2g)", name, largest,
                  most);
    return text;
  }

  const TensorProblem& problem_;
  int64_t dim_;
  at::ScalarType type_;
  Memory memory_;
  Numbers numbers_;
  Place query_, key_, value_;
  Results tested_, expected_;
};

// A plan that has the tensor kernels, or with kOff has not.
Plan plan_with(const Call& call, TensorSize size, TensorState variant, const DeviceFacts& gpu) {
  DeviceFacts facts = gpu;
  facts.tensors.set(size, variant);
  auto planned = plan(call.problem, facts);
  if (const Refusal* refusal = std::get_if<Refusal>(&planned)) raise(*refusal);
  Plan made = std::get<Plan>(planned);
  TORCH_CHECK(is_tensor(made.passes[0].spec.kernel) == is_on(variant), "the plan of ", name_of(size.dtype),
              " ", size.dim, " does not follow the state ", name_of(variant));
  return made;
}

}  // namespace

std::string summary_of(const std::string& error) {
  const size_t end = error.find('\n');
  std::string text = error.substr(0, end);
  if (const size_t at = error.find("error: "); end != std::string::npos && at != std::string::npos)
    text += " " + error.substr(at, error.find('\n', at) - at);
  constexpr size_t kMost = 600;
  return text.substr(0, kMost);
}

void compile_or_raise(const Plan& plan) {
  using Clock = std::chrono::steady_clock;
  const Clock::time_point start = Clock::now();
  try {
    metal::prepare(plan);
  } catch (const c10::Error& error) {
    throw CompileFault(summary_of(error.what_without_backtrace()));
  }
  const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
  if (seconds <= kMostCompileSeconds) return;
  char text[64];
  std::snprintf(text, sizeof text, "it took %.1f s to compile (at most %.0f)", seconds, kMostCompileSeconds);
  throw CompileFault(text);
}

bool has_problem(TensorSize size, const TensorProblem& problem) {
  return !problem.is_padded || Trial::padded_dim(size) > 0;
}

std::string fault_of_problem(TensorSize size, const TensorProblem& problem, TensorState variant,
                             const DeviceFacts& gpu, bool only_compile) {
  Trial trial(size, problem);
  trial.upload();
  const Call call = trial.call();
  const Plan tested = plan_with(call, size, variant, gpu);
  compile_or_raise(tested);
  if (only_compile) return "";
  trial.run(call, tested, plan_with(call, size, TensorState::kOff, gpu));
  return trial.fault(size.dtype);
}

}  // namespace fattn
