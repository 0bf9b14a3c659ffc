#include "tensor_problems.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <variant>

#include <c10/util/Exception.h>

#include "../metal/executor.h"
#include "tensor_trial.h"

namespace fattn {
namespace {

int64_t padded_dim(TensorSize size) { return size.dim == 96 ? 72 : 0; }

Problem problem_of(TensorSize size, const TensorProblem& wanted) {
  Problem p;
  if (size.is_backward) p.op = Op::kPrefillBackward;
  p.dtype = size.dtype;
  p.q_heads = wanted.q_heads;
  p.kv_heads = wanted.kv_heads;
  p.q_len = wanted.q_len;
  p.kv_len = wanted.kv_len;
  p.head_dim = wanted.is_padded ? padded_dim(size) : size.dim;
  p.value_dim = wanted.is_padded ? p.head_dim : size.value_dim();
  p.vector_aligned = true;
  p.is_causal = wanted.is_causal;
  p.q_offset = wanted.q_offset;
  if (wanted.is_decode) {
    p.op = Op::kDecode;
    p.has_seq_lens = true;
  }
  p.scale = 1.0 / std::sqrt(double(p.head_dim));
  return p;
}

// A small problem with the options of another one, planned with its pipeline.
Problem small_problem(const Problem& like, const KernelSpec& pipeline) {
  Problem p = like;
  p.kv_heads = 2;
  p.q_heads = pipeline.grouped ? 8 : p.packed || is_backward(p.op) ? 4 : 2;
  p.q_len = pipeline.grouped ? 33 : 83;
  if (is_decode(p.op)) {  // with as many groups of 16 rows, of which the last is not full
    p.q_heads = pipeline.grouped ? 16 : 2;
    p.q_len = !pipeline.grouped ? 16 : pipeline.row_groups == 4 ? 7 : pipeline.row_groups == 2 ? 3 : 2;
  }
  p.kv_len = pipeline.split ? 1100 : p.mask_pairs ? 118 : 117;
  p.q_offset = p.kv_len - p.q_len - (is_decode(p.op) ? 0 : 3);
  p.part = p.value_in_key = p.has_float32_out = false;
  p.has_mask_map = pipeline.mask_map;  // the planner makes none for so few keys
  p.scale = 1.0 / std::sqrt(double(p.head_dim));
  ScoreOptions& options = p.options;
  // Numbers that leave gradients: beside a window of one key, all would be 0.
  if (options.window_left >= 0) options.window_left = 20;
  if (options.window_right >= 0) options.window_right = 7;
  if (options.sink_tokens > 0) options.sink_tokens = 5;
  if (options.softcap > 0.0) options.softcap = 5.0;
  return p;
}

// A plan that has the tensor kernels, or with kOff has not.
Plan plan_with(const Problem& problem, TensorState variant, const DeviceFacts& gpu) {
  const TensorSize size = *tensor_size(problem);
  DeviceFacts facts = gpu;
  facts.tensors.set(size, variant);
  auto planned = plan(problem, facts);
  if (const Refusal* refusal = std::get_if<Refusal>(&planned)) raise(*refusal);
  Plan made = std::get<Plan>(planned);
  TORCH_CHECK(has_tensors(made) == is_on(variant), "the plan of ", name_of(size),
              " does not follow the state ", name_of(variant));
  return made;
}

// The forward of a backward.
Problem forward_of(Problem p) {
  p.op = p.packed ? Op::kVarlenPrefill : Op::kPrefill;
  return p;
}

std::string fault_of(const Problem& problem, TensorState variant, const DeviceFacts& gpu, bool only_compile) {
  Trial trial(problem);
  const Plan tested = plan_with(trial.problem(), variant, gpu);
  compile_or_raise(tested);
  if (only_compile) return "";
  if (is_backward(problem.op)) {
    trial.run_forward(plan_with(forward_of(trial.problem()), TensorState::kOff, gpu));
  }
  trial.run(tested, plan_with(trial.problem(), TensorState::kOff, gpu));
  return trial.fault();
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
  if (problem.is_decode && size.is_backward) return false;
  return !problem.is_padded || padded_dim(size) > 0;
}

std::string fault_of_problem(TensorSize size, const TensorProblem& problem, TensorState variant,
                             const DeviceFacts& gpu, bool only_compile) {
  return fault_of(problem_of(size, problem), variant, gpu, only_compile);
}

std::string fault_of_options(const Problem& problem, const KernelSpec& pipeline, const DeviceFacts& gpu) {
  constexpr int kManyCores = 64;  // for which few tiles are cut into parts
  DeviceFacts facts = gpu;
  if (pipeline.split) facts.cores = kManyCores;
  return fault_of(small_problem(problem, pipeline), tensor_state(problem, gpu.tensors), facts,
                  /*only_compile=*/false);
}

}  // namespace fattn
