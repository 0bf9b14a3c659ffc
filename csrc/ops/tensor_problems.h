// The problems of the self-test of tensor operations. Compiled only with Metal.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "../plan/plan.h"
#include "../plan/tensor.h"

namespace fattn {

struct TensorProblem {
  const char* what;
  int64_t q_heads;
  int64_t kv_heads;
  int64_t q_len;
  int64_t kv_len;
  int64_t q_offset;
  bool is_causal;
  enum Kind : uint8_t {
    kAny,
    kForward,  // not of backwards
    kDecode,   // likewise; a decode
    kPadded,   // with the smallest heads that the kernel pads; only for sizes that have such
  } kind;
};

// Lengths that fill no tile; rows that see no key, and keys that no row sees; decodes whose keys are cut into
// parts; and one that is large, as a wrong layout may show only there (published, a fork of llama.cpp: 64 x
// 512 was right and 1024 x 2048 wrong). Most calls have the pipeline of one of them.
inline constexpr std::array<TensorProblem, 7> kTensorProblems{{
    {"a causal problem of 83 rows", 2, 2, 83, 117, -5, true, TensorProblem::kAny},
    {"a problem of 90 rows and 117 keys", 2, 2, 90, 117, 0, false, TensorProblem::kAny},
    {"a causal problem of shared heads", 8, 1, 83, 117, 34, true, TensorProblem::kForward},
    {"a problem with padded heads", 2, 1, 83, 117, 34, true, TensorProblem::kPadded},
    {"a decode of 24 rows", 16, 2, 3, 1100, 1097, true, TensorProblem::kDecode},
    {"a decode of 56 rows", 14, 2, 8, 1100, 1092, true, TensorProblem::kDecode},
    {"a problem of 1,024 rows and 2,048 keys", 1, 1, 1024, 2048, 0, false, TensorProblem::kAny},
}};

// Largest differences from the simdgroup kernels: for values below 1, and of a gradient for its largest
// number. Both round results, weights and gradients of scores to the dtype; relaxed products cut the latter
// to 10 bits.
constexpr double most_out_error(DType dtype) { return dtype == DType::kFloat16 ? 4e-3 : 3.2e-2; }
inline constexpr double kMostLseError = 1e-3;

// Metal's compiler takes about 0.2 s for such a kernel (published, M4 Pro).
inline constexpr double kMostCompileSeconds = 20.0;

struct CompileFault : std::runtime_error {
  CompileFault(const std::string& what, bool lasting) : std::runtime_error(what), lasting(lasting) {}
  bool lasting;
};

// Whether a compiler's error will come again: it names what is wrong, or the threads are too many. Others,
// such as a service of the system that broke down, may not.
bool is_lasting(const std::string& error);

// The first line of an error and, of a compiler's, the first that says what is wrong.
std::string summary_of(const std::string& error);

// Compiles the pipelines of a plan. Raises CompileFault if one does not compile, or not for its threads, or
// if they take long.
void compile_or_raise(const Plan& plan);

// Whether a size has such a problem.
bool has_problem(TensorSize size, const TensorProblem& problem);

// Compiles the pipelines of all problems of a size side by side, in each of the states. Raises CompileFault
// for the first that cannot be used.
void compile_problems(TensorSize size, const std::vector<TensorState>& states, const DeviceFacts& gpu);
// Runs the kernels of this variant and the simdgroup kernels. Returns what is wrong, "" if nothing.
std::string fault_of_problem(TensorSize size, const TensorProblem& problem, TensorState variant,
                             const DeviceFacts& gpu);
// The same for pipelines of a call, which it compiles, on a small problem with the options of the call; none
// if no small problem has them, as of packed rows whose keys are cut into parts. Raises CompileFault.
std::optional<std::string> fault_of_options(const Problem& problem, const std::vector<KernelSpec>& pipelines,
                                            const DeviceFacts& gpu);
// The pipelines of all problems of a size whose state is on.
std::vector<KernelSpec> pipelines_of_test(TensorSize size, const DeviceFacts& gpu);

}  // namespace fattn
