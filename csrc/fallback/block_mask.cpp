#include "block_mask.h"

#include <algorithm>

#include <ATen/ops/arange.h>

namespace fattn {
namespace {

using at::Tensor;

// The keys of the visible blocks of a row of blocks, bool [blocks].
Tensor keys_of_blocks(const Problem& problem, const Tensor& blocks) {
  const Tensor within = at::arange(problem.block_keys, blocks.options().dtype(at::kLong));
  const Tensor keys = blocks.nonzero().mul(problem.block_keys).add(within).flatten();
  return keys.masked_select(keys.lt(problem.kv_len));
}

}  // namespace

void visit_block_rows(const Call& call, const std::function<void(const BlockRows&)>& visit) {
  const Problem& problem = call.problem;
  if (problem.q_heads == 0) return;
  const int64_t masks = call.mask_map.size(1), heads = problem.q_heads / masks;
  const int64_t group_size = problem.q_heads / problem.kv_heads;
  for (int64_t mask = 0; mask < masks; ++mask) {
    BlockRows own{.head = mask * heads,
                  .heads = heads,
                  .kv_head = mask * heads / group_size,
                  .kv_heads = std::max<int64_t>(heads / group_size, 1)};
    Call of_heads = call;
    of_heads.problem.q_heads = own.heads;
    of_heads.problem.kv_heads = own.kv_heads;
    of_heads.query = call.query.narrow(1, own.head, heads);
#define FATTN_TENSOR(slot, name, shapes) \
  if (of_heads.name.defined()) of_heads.name = of_heads.name.narrow(-1, own.head, heads);
    FATTN_SCORE_OPTIONS(FATTN_NOTHING, FATTN_TENSOR)
#undef FATTN_TENSOR
    const Tensor key = call.key.narrow(1, own.kv_head, own.kv_heads);
    const Tensor value = call.value.narrow(1, own.kv_head, own.kv_heads);
    for (own.row = 0; own.row < problem.q_len; own.row += problem.block_rows) {
      own.rows = std::min(problem.block_rows, problem.q_len - own.row);
      own.key_positions =
          keys_of_blocks(problem, call.mask_map.select(1, mask).select(1, own.row / problem.block_rows)[0]);
      own.call = of_heads;
      own.call.problem.q_len = own.rows;
      own.call.problem.kv_len = own.key_positions.size(0);
      own.call.query = of_heads.query.narrow(2, own.row, own.rows);
      own.call.key = key.index_select(2, own.key_positions);
      own.call.value = value.index_select(2, own.key_positions);
      visit(own);
    }
  }
}

}  // namespace fattn
