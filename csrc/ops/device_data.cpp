// The checks of FATTN_CHECK=1, on copies in host memory.
#include "device_data.h"

#include <algorithm>
#include <cstdlib>
#include <string_view>
#include <unordered_map>

#include <c10/util/Exception.h>

#include "../fallback/fallback.h"

namespace fattn {
namespace {

bool is_enabled() {
  const char* value = std::getenv("FATTN_CHECK");
  return value != nullptr && std::string_view(value) != "" && std::string_view(value) != "0";
}

at::Tensor on_host(const at::Tensor& tensor) { return tensor.to(at::kCPU).contiguous(); }

void check_seq_lens(const Problem& problem, const int32_t* lens) {
  for (int64_t batch = 0; batch < problem.batch; ++batch) {
    TORCH_CHECK_VALUE(lens[batch] >= 0 && lens[batch] <= problem.kv_len, name_of(problem.op), ": seq_lens[",
                      batch, "] is ", lens[batch], " and must be between 0 and the capacity ",
                      problem.kv_len);
  }
}

void check_block_tables(const Problem& problem, const int32_t* lens, const int32_t* tables) {
  for (int64_t batch = 0; batch < problem.batch; ++batch) {
    const int64_t used = (lens[batch] + problem.block_size - 1) / problem.block_size;
    for (int64_t entry = 0; entry < used; ++entry) {
      const int32_t block = tables[batch * problem.max_blocks + entry];
      TORCH_CHECK_VALUE(block >= 0 && block < problem.num_blocks, name_of(problem.op), ": block_tables[",
                        batch, ", ", entry, "] is ", block,
                        " and must be between 0 and num_blocks - 1 = ", problem.num_blocks - 1,
                        " (the sequence uses ", used, " blocks)");
    }
  }
}

// The hidden key fragments of each cell of a map, as bits.
at::Tensor hidden_fragments(const at::Tensor& map) {
  const at::Tensor mixed = map.remainder(1 << kCellKindBits).eq(int{kCellMixed});
  const at::Tensor bits = map.div(1 << kCellKindBits, "floor");
  return bits.masked_fill(mixed.logical_and(map.lt(kCellBytes)).logical_not(), 0)
      .masked_fill(map.eq(int{kCellHidden}), kAllCellFragments);
}

// kCellMixed is valid for every cell.
void check_mask_map(const Call& call) {
  const at::Tensor right = run_in_torch(describe_map_of(on_host(call.attn_mask)));
  const at::Tensor map = on_host(call.mask_map);
  const at::Tensor shown = hidden_fragments(right).bitwise_not().bitwise_and(hidden_fragments(map));
  const at::Tensor changed = right.ne(int{kCellWhole}).logical_and(map.eq(int{kCellWhole}));
  TORCH_CHECK_VALUE(!shown.ne(0).logical_or(changed).any().item<bool>(), name_of(call.problem.op),
                    ": mask_map does not match attn_mask; recreate it with torch_fattn.mask_map(attn_mask)");
}

// Limits for cu_seqlens of query or key, or of linear attention, whose first sequence may begin at any row.
struct Starts {
  const char* name;
  const char* rows_name;
  int64_t rows;  // in total
  const char* max_name = nullptr;
  int64_t most = INT64_MAX;  // rows per sequence
};

void check_cu_seqlens(const char* op, const Starts& of, const at::Tensor& cu_seqlens) {
  const at::Tensor copy = on_host(cu_seqlens);
  const int32_t* starts = copy.const_data_ptr<int32_t>();
  const int64_t sequences = copy.numel() - 1;
  const bool is_limited = of.max_name != nullptr;
  TORCH_CHECK_VALUE(is_limited ? starts[0] == 0 : starts[0] >= 0, op, ": ", of.name, "[0] is ", starts[0],
                    " and must ", is_limited ? "be 0" : "not be negative",
                    "; pass 0 for a first sequence that begins at row 0");
  for (int64_t batch = 0; batch < sequences; ++batch) {
    const int64_t rows = int64_t{starts[batch + 1]} - starts[batch];
    TORCH_CHECK_VALUE(rows >= 0, op, ": ", of.name, "[", batch + 1, "] is ", starts[batch + 1],
                      " and must not be below the entry before it, ", starts[batch]);
    TORCH_CHECK_VALUE(rows <= of.most, op, ": sequence ", batch, " has ", rows, " ", of.rows_name,
                      " rows and ", of.max_name, " is ", of.most, "; pass the rows of the longest sequence");
  }
  TORCH_CHECK_VALUE(starts[sequences] <= of.rows, op, ": ", of.name, " ends at ", starts[sequences], " and ",
                    of.rows_name, " has ", of.rows, " rows; its last entry must not be above that");
}

// What slots are of: tokens of a cache, or sequences with states.
struct SlotWords {
  const char* name;
  const char* count;
  const char* owner;
};
constexpr SlotWords kCacheSlots = {"slot_mapping", "num_blocks * block_size", "token"};
constexpr SlotWords kStateSlots = {"slots", "the number of states", "sequence"};

// `count`: slots of the cache or states of the pool.
void check_slots(const char* op, const SlotWords& of, const at::Tensor& slots, int64_t count) {
  const at::Tensor mapping = on_host(slots.to(at::kLong));
  const int64_t* slot_of = mapping.const_data_ptr<int64_t>();
  std::unordered_map<int64_t, int64_t> token_of;
  for (int64_t token = 0; token < mapping.numel(); ++token) {
    const int64_t slot = slot_of[token];
    if (slot < 0) continue;
    TORCH_CHECK_VALUE(slot < count, op, ": ", of.name, "[", token, "] is ", slot, " and must be below ",
                      of.count, " = ", count, ", or -1 to drop the ", of.owner);
    const auto [other, is_new] = token_of.try_emplace(slot, token);
    TORCH_CHECK_VALUE(is_new, op, ": ", of.name, "[", other->second, "] and [", token, "] are both ", slot,
                      "; give every ", of.owner, " a different slot, or -1 to drop it");
  }
}

// The sequences of linear attention, and their states.
void check_sequences(const SequenceOperands& call, const SequenceProblem& problem, const char* tokens) {
  if (!is_enabled()) return;
  const char* op = name_of(problem.op);
  if (call.slots.defined()) check_slots(op, kStateSlots, call.slots, problem.states);
  if (!call.cu_seqlens.defined()) return;
  check_cu_seqlens(op, {"cu_seqlens", tokens, problem.length}, call.cu_seqlens);
}

}  // namespace

void check_device_data_if_enabled(const Call& call) {
  if (!is_enabled()) return;
  const char* op = name_of(call.problem.op);
  if (call.cu_seqlens_q.defined()) {
    const Starts of = {"cu_seqlens_q", "query", call.problem.q_len, "max_seqlen_q",
                       call.problem.max_seqlen_q};
    check_cu_seqlens(op, of, call.cu_seqlens_q);
  }
  if (call.cu_seqlens_k.defined()) {
    const Starts of = {"cu_seqlens_k", "key", call.problem.kv_len, "max_seqlen_k", call.problem.max_seqlen_k};
    check_cu_seqlens(op, of, call.cu_seqlens_k);
  }
  if (call.mask_map.defined() && call.attn_mask.defined()) check_mask_map(call);
  if (!call.seq_lens.defined() || call.problem.batch == 0) return;
  const at::Tensor lens = on_host(call.seq_lens);
  check_seq_lens(call.problem, lens.const_data_ptr<int32_t>());
  if (!call.block_tables.defined()) return;
  const at::Tensor tables = on_host(call.block_tables);
  check_block_tables(call.problem, lens.const_data_ptr<int32_t>(), tables.const_data_ptr<int32_t>());
}

void check_device_data_if_enabled(const CacheWriteCall& call) {
  const CacheWriteProblem& problem = call.problem;
  if (!is_enabled()) return;
  check_slots(name_of(Op::kCacheWrite), kCacheSlots, call.slot_mapping,
              problem.num_blocks * problem.block_size);
}

void check_device_data_if_enabled(const RotaryCall& call) {
  const RotaryProblem& problem = call.problem;
  if (!is_enabled()) return;
  const int64_t capacity = problem.write.block_size;
  if (problem.has_slots) {
    check_slots(name_of(problem.op), kCacheSlots, call.slot_mapping.reshape(-1),
                problem.write.num_blocks * capacity);
  }
  if (!problem.has_starts) return;
  const at::Tensor starts = on_host(call.starts.to(at::kLong)).reshape(-1);
  const int64_t most = capacity - problem.params.start - problem.q_len;
  for (int64_t batch = 0; batch < starts.numel(); ++batch) {
    const int64_t start = starts.const_data_ptr<int64_t>()[batch];
    TORCH_CHECK_VALUE(start >= 0 && start <= most, name_of(problem.op), ": starts[", batch, "] is ", start,
                      " and must be between 0 and ", most, " for ", problem.q_len,
                      " tokens and a capacity of ", capacity,
                      "; pass the number of tokens that each sequence holds, or larger caches");
  }
}

void check_device_data_if_enabled(const GatedDeltaCall& call) {
  check_sequences(call, call.problem, "query");
}

void check_device_data_if_enabled(const CausalConv1dCall& call) { check_sequences(call, call.problem, "x"); }

void check_device_data_if_enabled(const GatedDeltaStepCall& call) {
  const char* op = name_of(call.problem.op);
  check_sequences(call, call.problem, "query");
  if (!is_enabled() || !call.counts.defined()) return;
  const at::Tensor counts = on_host(call.counts);
  for (int64_t batch = 0; batch < counts.numel(); ++batch) {
    const int32_t count = counts.const_data_ptr<int32_t>()[batch];
    TORCH_CHECK_VALUE(count >= 0 && count <= call.problem.length, op, ": counts[", batch, "] is ", count,
                      " and must be between 0 and the length ", call.problem.length,
                      "; pass the number of tokens of each sequence");
  }
}

}  // namespace fattn
