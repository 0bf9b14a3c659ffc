// Times plan() alone and prints lines `<problem> <nanoseconds per call>`. host_cost.py builds and runs it.
#include <algorithm>
#include <chrono>
#include <cstdio>

#include "../../csrc/plan/plan.h"

namespace {

using namespace fattn;

Problem llama(Op op, int64_t q_len, int64_t kv_len) {
  constexpr int64_t kHeads = 32, kKvHeads = 8, kDim = 128;
  Problem problem;
  problem.op = op;
  problem.dtype = DType::kFloat16;
  problem.batch = 1;
  problem.q_heads = kHeads;
  problem.kv_heads = kKvHeads;
  problem.q_len = q_len;
  problem.kv_len = kv_len;
  problem.head_dim = problem.value_dim = kDim;
  problem.query = {kHeads * q_len * kDim, q_len * kDim, kDim};
  problem.key = problem.value = {kKvHeads * kv_len * kDim, kv_len * kDim, kDim};
  problem.vector_aligned = true;
  problem.is_causal = true;
  problem.q_offset = kv_len - q_len;
  problem.scale = 0.088;
  if (op == Op::kPagedDecode) {
    problem.has_seq_lens = true;
    problem.seq_lens_stride = 1;
    problem.block_size = 16;
    problem.max_blocks = kv_len / problem.block_size;
    problem.num_blocks = problem.max_blocks;
    problem.block_table_batch_stride = problem.max_blocks;
    problem.block_table_entry_stride = 1;
  }
  return problem;
}

// The best of several batches, each long enough for the clock.
template <typename AnyProblem>
double nanoseconds_per_plan(const AnyProblem& problem) {
  using Clock = std::chrono::steady_clock;
  constexpr int kBatches = 20, kCalls = 10000;
  const DeviceFacts device;
  double best = 1e30;
  for (int batch = 0; batch < kBatches; ++batch) {
    const auto start = Clock::now();
    for (int call = 0; call < kCalls; ++call) {
      const auto planned = plan(problem, device);
      asm volatile("" : : "r"(&planned) : "memory");  // keeps the compiler from dropping the call
    }
    const std::chrono::duration<double, std::nano> elapsed = Clock::now() - start;
    best = std::min(best, elapsed.count() / kCalls);
  }
  return best;
}

}  // namespace

int main() {
  std::printf("prefill %.1f\n", nanoseconds_per_plan(llama(Op::kPrefill, 4096, 4096)));
  std::printf("decode %.1f\n", nanoseconds_per_plan(llama(Op::kDecode, 1, 8192)));
  std::printf("paged_decode %.1f\n", nanoseconds_per_plan(llama(Op::kPagedDecode, 1, 8192)));
  std::printf("merge %.1f\n", nanoseconds_per_plan(MergeProblem{DType::kFloat16, 4, 4096, 128}));
}
