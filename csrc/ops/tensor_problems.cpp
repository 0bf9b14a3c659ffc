#include "tensor_problems.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <exception>
#include <future>

#include <ATen/Parallel.h>
#include <c10/util/Exception.h>

#include "../metal/executor.h"
#include "../plan/slices.h"
#include "tensor_trial.h"

namespace fattn {
namespace {

bool has_padded_heads(TensorSize size) { return padded_dim(kPaddedDims[0]) == size.dim; }

Problem problem_of(TensorSize size, const TensorProblem& wanted) {
  Problem p;
  if (size.is_backward) p.op = Op::kPrefillBackward;
  p.dtype = size.dtype;
  p.batch = 1;
  p.q_heads = wanted.q_heads;
  p.kv_heads = wanted.kv_heads;
  p.q_len = wanted.q_len;
  p.kv_len = wanted.kv_len;
  const bool is_padded = wanted.kind == TensorProblem::kPadded;
  p.head_dim = is_padded ? kPaddedDims[0] : size.dim;
  p.value_dim = is_padded ? p.head_dim : size.value_dim();
  p.query.row = p.key.row = p.head_dim;
  p.value.row = p.grad_out.row = p.value_dim;
  p.vector_aligned = true;
  p.is_causal = wanted.is_causal;
  p.q_offset = wanted.q_offset;
  if (wanted.kind == TensorProblem::kDecode) {
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
  if (is_decode(p.op)) {  // with as many groups of 16 rows; only latent heads can have one full group
    p.q_heads = pipeline.grouped ? 16 : 2;
    p.q_len = !pipeline.grouped ? 16 : pipeline.row_groups == 4 ? 7 : 3;
  }
  constexpr int64_t kKeysOfParts = 2200;
  p.kv_len = pipeline.split ? kKeysOfParts : p.mask_pairs ? 118 : 117;
  p.q_offset = p.kv_len - p.q_len - (is_decode(p.op) ? 0 : 3);
  p.part = p.value_in_key = p.has_float32_out = false;
  p.has_mask_map = pipeline.mask_map;  // the planner makes none for so few keys
  p.scale = 1.0 / std::sqrt(double(p.head_dim));
  ScoreOptions& options = p.options;
  // Numbers that leave gradients: beside a window of one key, all would be 0.
  if (options.window_left >= 0) options.window_left = pipeline.split ? kKeysOfParts - 600 : 20;
  if (options.window_right >= 0) options.window_right = 7;
  if (options.sink_tokens > 0) options.sink_tokens = 5;
  if (options.softcap > 0.0) options.softcap = 5.0;
  return p;
}

// A plan that has the tensor kernels, or with kOff has not, whatever was timed.
Plan plan_with(const Problem& problem, TensorState variant, const DeviceFacts& gpu) {
  const TensorSize size = *tensor_size(problem);
  DeviceFacts facts = gpu;
  facts.tuned = nullptr;
  facts.only_prefills_on_tensors = false;
  facts.tensors.set(size, variant);
  Plan made = plan_or_raise(problem, facts);
  TORCH_CHECK(has_tensors(made) == is_on(variant), "the plan of ", name_of(size),
              " does not follow the state ", name_of(variant));
  return made;
}

// The forward of a backward.
Problem forward_of(Problem p) {
  p.op = p.packed ? Op::kVarlenPrefill : Op::kPrefill;
  return p;
}

// What is wrong with the results of `tested`, a plan of the trial's problem.
std::string fault_of(Trial& trial, const Plan& tested, const DeviceFacts& gpu) {
  if (is_backward(trial.problem().op)) {
    trial.run_forward(plan_with(forward_of(trial.problem()), TensorState::kOff, gpu));
  }
  trial.run(tested, plan_with(trial.problem(), TensorState::kOff, gpu));
  return trial.fault();
}

// Gives the plan of a small problem the slices of this pipeline. Returns whether it then has the pipeline.
bool takes_pipeline(Plan& plan, const KernelSpec& pipeline) {
  bool has_it = false;
  for (uint32_t i = 0; i < plan.pass_count; ++i) {
    Pass& pass = plan.passes[i];
    if (pipeline.sliced && pass.spec.kernel == pipeline.kernel) cut_into_slices(pass, 1);
    has_it = has_it || pass.spec == pipeline;
  }
  return has_it;
}

bool take_pipelines(Plan& plan, const std::vector<KernelSpec>& pipelines) {
  return std::all_of(pipelines.begin(), pipelines.end(),
                     [&](const KernelSpec& pipeline) { return takes_pipeline(plan, pipeline); });
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

bool is_lasting(const std::string& error) {
  return error.find("error: ") != std::string::npos || error.find(" threads ") != std::string::npos;
}

void compile_or_raise(const Plan& plan) {
  using Clock = std::chrono::steady_clock;
  const Clock::time_point start = Clock::now();
  try {
    metal::prepare(plan);
  } catch (const c10::Error& error) {
    throw CompileFault(summary_of(error.what_without_backtrace()),
                       is_lasting(error.what_without_backtrace()));
  }
  const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
  if (seconds <= kMostCompileSeconds) return;
  char text[64];
  std::snprintf(text, sizeof text, "it took %.1f s to compile (at most %.0f)", seconds, kMostCompileSeconds);
  throw CompileFault(text, true);
}

bool has_problem(TensorSize size, const TensorProblem& problem) {
  if (problem.kind == TensorProblem::kPadded) return has_padded_heads(size);
  return problem.kind == TensorProblem::kAny || !size.is_backward;
}

void compile_problems(TensorSize size, const std::vector<TensorState>& states, const DeviceFacts& gpu) {
  std::vector<Plan> plans;
  for (const TensorState state : states) {
    for (const TensorProblem& wanted : kTensorProblems) {
      if (!has_problem(size, wanted)) continue;
      const Problem problem = problem_of(size, wanted);
      plans.push_back(plan_with(problem, state, gpu));
      if (size.is_backward && state == TensorState::kOff)
        plans.push_back(plan_with(forward_of(problem), TensorState::kOff, gpu));
    }
  }
  std::vector<std::exception_ptr> faults(plans.size());
  std::atomic<size_t> next{0};
  std::atomic<bool> has_fault{false};
  const auto compile = [&] {
    for (size_t i = next++; i < plans.size() && !has_fault; i = next++) {
      try {
        compile_or_raise(plans[i]);
      } catch (...) {
        faults[i] = std::current_exception();
        // There is none for an Objective-C exception.
        if (!faults[i]) faults[i] = std::make_exception_ptr(CompileFault("it did not compile", false));
        has_fault = true;
      }
    }
  };
  std::vector<std::future<void>> compilers;
  const size_t threads = std::min(size_t(at::get_num_threads()), plans.size());
  for (size_t i = 0; i < threads; ++i) {
    compilers.push_back(std::async(std::launch::async, compile));
  }
  for (const std::future<void>& compiler : compilers) compiler.wait();
  for (const std::exception_ptr& fault : faults) {
    if (fault) std::rethrow_exception(fault);
  }
}

std::string fault_of_problem(TensorSize size, const TensorProblem& problem, TensorState variant,
                             const DeviceFacts& gpu) {
  Trial trial(problem_of(size, problem));
  return fault_of(trial, plan_with(trial.problem(), variant, gpu), gpu);
}

std::optional<std::string> fault_of_options(const Problem& problem, const std::vector<KernelSpec>& pipelines,
                                            const DeviceFacts& gpu) {
  constexpr int kManyCores = 64;  // for which few tiles are cut into parts
  const KernelSpec& pipeline = pipelines[0];
  DeviceFacts facts = gpu;
  if (pipeline.split) facts.cores = kManyCores;
  Trial trial(small_problem(problem, pipeline));
  if (tensor_size(trial.problem()) != tensor_size(problem)) return std::nullopt;
  Plan tested = plan_with(trial.problem(), tensor_state(problem, gpu.tensors), facts);
  if (!take_pipelines(tested, pipelines)) return std::nullopt;
  compile_or_raise(tested);
  return fault_of(trial, tested, facts);
}

std::vector<KernelSpec> pipelines_of_test(TensorSize size, const DeviceFacts& gpu) {
  std::vector<KernelSpec> found;
  for (const TensorProblem& problem : kTensorProblems) {
    if (!has_problem(size, problem)) continue;
    const Plan made = plan_with(problem_of(size, problem), gpu.tensors.of(size), gpu);
    for (uint32_t i = 0; i < made.pass_count; ++i) found.push_back(made.passes[i].spec);
  }
  return found;
}

}  // namespace fattn
