// Tensors -> RotaryProblem or RmsNormProblem. The planner checks everything that follows from the problem
// alone.
#include <limits>

#include <ATen/ops/empty_strided.h>
#include <c10/util/Exception.h>

#include "layout.h"
#include "written_caches.h"
#include "../plan/supported.h"

namespace fattn {
namespace {

using at::Tensor;

NormForm norm_form_of(const char* op, std::string_view norm) {
  return NormForm(choice_of(op, "norm", norm, {"rounded", "plus_one", "float"}));
}

void check_table(const char* op, const char* name, const Tensor& table, const Tensor& query) {
  check_rank(op, name, table, 3, "[batch or 1, length, columns]");
  check_device(op, name, table, query);
  check_factor_dtype(op, name, table, query);
  TORCH_CHECK_VALUE((table.size(0) == 1 || table.size(0) == query.size(0)) && table.size(1) == query.size(2),
                    op, ": ", name, " has shape ", table.sizes(), " and must be [", query.size(0), " or 1, ",
                    query.size(2), ", columns]; pass the rows of the tables at the positions of the tokens");
}

void add_tables(RotaryCall& call, const Arguments& arguments) {
  RotaryProblem& problem = call.problem;
  const char* op = name_of(problem.op);
  call.cos = arguments.tensor("cos");
  call.sin = arguments.tensor("sin");
  check_table(op, "cos", call.cos, call.query);
  check_table(op, "sin", call.sin, call.query);
  check_same_dtype(op, "cos", call.cos, "sin", call.sin);
  check_same_size(op, "columns", "cos", call.cos.size(2), "sin", call.sin.size(2));
  problem.table_dtype = dtype_of(call.cos.scalar_type());
  const int64_t columns = problem.table_columns = call.cos.size(2);
  problem.rotary_dim = arguments.get<std::optional<int64_t>>("rotary_dim").value_or(columns);
  TORCH_CHECK_VALUE(columns == problem.rotary_dim || columns * 2 == problem.rotary_dim, op, ": cos has ",
                    columns, " columns and rotary_dim is ", problem.rotary_dim,
                    "; pass a table of that many columns, or of half as many");
  problem.rotary_offset = arguments.get<int64_t>("rotary_offset");
  problem.style =
      RotaryStyle(choice_of(op, "style", arguments.text("style"), {"halves", "pairs", "pairs_to_halves"}));
}

// Returns the weight of a norm of rows, undefined if there is none.
Tensor norm_of(const char* op, const char* name, const OptionalTensor& weight, const Tensor& rows,
               const char* rows_name, DType& dtype) {
  if (!weight.has_value()) return {};
  check_rank(op, name, *weight, 1, "[columns]");
  check_device(op, name, *weight, rows, rows_name);
  check_factor_dtype(op, name, *weight, rows, rows_name);
  check_same_size(op, "columns", rows_name, rows.size(-1), name, weight->size(0));
  dtype = dtype_of(weight->scalar_type());
  return weight->contiguous();
}

void add_norms(RotaryCall& call, const Arguments& arguments) {
  RotaryProblem& problem = call.problem;
  const char* op = name_of(problem.op);
  const auto norm = [&](const char* name) {
    return norm_of(op, name, arguments.optional_tensor(name), call.query, "query", problem.weight_dtype);
  };
  call.query_norm = norm("query_norm");
  call.key_norm = norm("key_norm");
  problem.has_query_norm = call.query_norm.defined();
  problem.has_key_norm = call.key_norm.defined();
  if (problem.has_query_norm && problem.has_key_norm) {
    check_same_dtype(op, "query_norm", call.query_norm, "key_norm", call.key_norm);
  }
  problem.norm = norm_form_of(op, arguments.text("norm"));
  problem.eps = arguments.get<double>("eps");
}

// What both ops have. They add the layout after they know what is copied.
void describe_rows(RotaryCall& call, Op op, const Arguments& arguments) {
  const Tensor& query = call.query = arguments.tensor("query");
  const Tensor& key = call.key = arguments.tensor("key");
  const char* name = name_of(op);
  check_rank(name, "query", query, 4, kHeadsFirst);
  check_rank(name, "key", key, 4, kHeadsFirst);
  check_device(name, "key", key, query);
  check_float(name, "query", query);
  check_same_dtype(name, "query", query, "key", key);
  check_same_size(name, "batch size", "query", query.size(0), "key", key.size(0));
  check_same_size(name, "length", "query", query.size(2), "key", key.size(2));
  check_same_size(name, "head_dim", "query", query.size(3), "key", key.size(3));
  RotaryProblem& problem = call.problem;
  problem.op = op;
  problem.q_heads = query.size(1);
  problem.q_len = query.size(2);
  problem.token_major_out = arguments.get<bool>("token_major_out");
  problem.write.dtype = dtype_of(query.scalar_type());
  problem.write.tokens = query.size(0) * query.size(2);
  problem.write.kv_heads = key.size(1);
  problem.write.num_blocks = query.size(0);
  problem.write.block_size = query.size(2);
  problem.write.key.head_dim = problem.write.value.head_dim = key.size(3);
  problem.write.vector_aligned = problem.vector_tables = true;
  add_tables(call, arguments);
  add_norms(call, arguments);
}

// The strides of rows or of their contiguous copy. Clears `aligned` unless four columns can be read at once.
Strides3 strides_of(const Tensor& rows, bool copied, bool& aligned) {
  if (copied) return row_strides(rows.size(1), rows.size(2), rows.size(3), false);
  aligned = aligned && is_multiple(rows);
  return {rows.stride(0), rows.stride(1), rows.stride(2)};
}

TableStrides strides_of(Tensor& table, bool& aligned) {
  // 32 bits must hold the offset of a column.
  if (table.stride(2) > std::numeric_limits<int32_t>::max() / kMaxHeadDim) table = table.contiguous();
  aligned = aligned && table.stride(2) == 1 && is_multiple(table);
  return {table.size(0) == 1 ? 0 : table.stride(0), table.stride(1), int32_t(table.stride(2)), 0};
}

void add_layout(RotaryCall& call) {
  RotaryProblem& problem = call.problem;
  problem.params.query = strides_of(call.query, call.copy_query, problem.write.vector_aligned);
  problem.params.key = strides_of(call.key, call.copy_key, problem.write.vector_aligned);
  problem.params.cos = strides_of(call.cos, problem.vector_tables);
  problem.params.sin = strides_of(call.sin, problem.vector_tables);
  for (const Tensor& weight : {call.query_norm, call.key_norm}) {
    problem.write.vector_aligned &= !weight.defined() || is_multiple(weight);
  }
}

// Which slots the tokens are written to.
void add_slots(RotaryCall& call, const Arguments& arguments) {
  RotaryProblem& problem = call.problem;
  const char* op = name_of(problem.op);
  const int64_t batch = call.query.size(0);
  problem.params.start = arguments.get<int64_t>("start");
  const OptionalTensor slots = arguments.optional_tensor("slot_mapping"),
                       starts = arguments.optional_tensor("starts");
  TORCH_CHECK_VALUE(!slots.has_value() || (!starts.has_value() && problem.params.start == 0), op,
                    ": slot_mapping and ", starts.has_value() ? "starts" : "start",
                    " both say where the tokens go; pass one of them");
  const char* name = slots.has_value() ? "slot_mapping" : "starts";
  const OptionalTensor& given = slots.has_value() ? slots : starts;
  if (given.has_value()) {
    check_device(op, name, *given, call.query);
    check_slot_dtype(op, name, *given);
    problem.write.long_slots = given->scalar_type() == at::kLong;
  }
  if (slots.has_value()) {
    TORCH_CHECK_VALUE(slots->sizes() == at::IntArrayRef({batch, problem.q_len}), op,
                      ": slot_mapping has shape ", slots->sizes(), " and must be [batch, length] = [", batch,
                      ", ", problem.q_len, "]; pass a slot for each token");
    problem.has_slots = true;
    call.slot_mapping = readable(call, *slots);
    problem.params.slot_batch = call.slot_mapping.stride(0);
    problem.params.slot_row = call.slot_mapping.stride(1);
    return;
  }
  TORCH_CHECK_VALUE(problem.write.num_blocks == batch, op, ": key_cache has ", problem.write.num_blocks,
                    " blocks and query ", batch,
                    " sequences, and there is no slot_mapping; pass one, or a cache of a block per sequence");
  if (!starts.has_value()) return;
  TORCH_CHECK_VALUE(starts->dim() == 0 || starts->sizes() == at::IntArrayRef({batch}), op,
                    ": starts has shape ", starts->sizes(), " and must be [] or [batch] = [", batch,
                    "]; pass the number of tokens that each sequence holds");
  problem.has_starts = true;
  call.starts = readable(call, *starts);
  problem.params.slot_batch = starts->dim() == 0 ? 0 : call.starts.stride(0);
}

void check_gate(const char* op, const Tensor& gate, const Tensor& x) {
  check_device(op, "gate", gate, x, "x");
  TORCH_CHECK_VALUE(gate.sizes() == x.sizes(), op, ": gate has shape ", gate.sizes(), " and x ", x.sizes(),
                    "; pass a gate for each element of x");
  check_same_dtype(op, "x", x, "gate", gate);
}

// With one dimension of rows, or at most three. Copied if others do not merge.
Tensor merged(const Tensor& x, bool to_one) {
  const int64_t outer = x.dim() - (to_one ? 2 : 4);
  return outer > 0 ? x.flatten(0, outer) : x;
}

}  // namespace

RmsNormCall describe_rms_norm(const Arguments& arguments) {
  const char* op = name_of(Op::kRmsNorm);
  const Tensor& x = arguments.tensor("x");
  const OptionalTensor gate = arguments.optional_tensor("gate");
  TORCH_CHECK_TYPE(x.defined(), op, ": x is None; pass a tensor");
  TORCH_CHECK_VALUE(x.dim() > 0, op, ": x has no dimensions; pass rows [.., columns]");
  check_float(op, "x", x);
  if (gate.has_value()) check_gate(op, *gate, x);
  const bool contiguous = x.is_contiguous() && (!gate.has_value() || gate->is_contiguous());
  RmsNormCall call{.x = x, .rows = merged(x, contiguous)};
  RmsNormProblem& problem = call.problem;
  const GateKind kind =
      GateKind(choice_of(op, "activation", arguments.text("activation"), {"silu", "sigmoid"}) + kGateSilu);
  problem.norm = norm_form_of(op, arguments.text("norm"));
  problem.eps = arguments.get<double>("eps");
  problem.dtype = problem.weight_dtype = dtype_of(x.scalar_type());
  problem.out_dtype = arguments.get<bool>("float32_out") ? DType::kFloat32 : problem.dtype;
  problem.columns = x.size(-1);
  problem.rows = c10::multiply_integers(x.sizes().slice(0, x.dim() - 1));
  problem.params.heads = int32_t(call.rows.dim() > 2 ? call.rows.size(-3) : 1);
  problem.params.length = int32_t(call.rows.dim() > 1 ? call.rows.size(-2) : 1);
  call.weight = norm_of(op, "weight", arguments.optional_tensor("weight"), x, "x", problem.weight_dtype);
  problem.has_weight = call.weight.defined();
  if (!problem.has_weight && problem.norm == kNormPlusOne) problem.norm = kNormFloat;  // the weight is 1
  if (gate.has_value()) {
    call.gates = merged(*gate, contiguous);
    problem.gate = kind;
  }
  const auto strides = [&](const Tensor& tensor) {
    if (!tensor.defined()) return Strides3{};
    const Layout layout = layout_of(tensor);
    problem.vector_aligned = problem.vector_aligned && layout.vector_aligned;
    return layout.by_dimension();
  };
  problem.vector_aligned = problem.columns % kLogitsVector == 0;
  problem.params.x = strides(call.rows);
  problem.params.gate = strides(call.gates);
  strides(call.weight);
  return call;
}

RotaryCall describe_rotary(const Arguments& arguments) {
  RotaryCall call;
  describe_rows(call, Op::kRotary, arguments);
  call.copy_query = !has_contiguous_rows(call.query);
  call.copy_key = !has_contiguous_rows(call.key);
  add_layout(call);
  call.problem.write.key.cache =
      row_strides(call.key.size(1), call.key.size(2), call.key.size(3), call.problem.token_major_out);
  return call;
}

RotaryCall describe_rotary_write(const Arguments& arguments) {
  RotaryCall call;
  describe_rows(call, Op::kRotaryWrite, arguments);
  RotaryProblem& problem = call.problem;
  const Tensor& value = arguments.tensor("value");
  const char* op = name_of(problem.op);
  check_rank(op, "value", value, 4, kHeadsFirst);
  check_device(op, "value", value, call.query);
  check_same_size(op, "batch size", "query", call.query.size(0), "value", value.size(0));
  check_same_size(op, "length", "query", problem.q_len, "value", value.size(2));
  add_written_caches(op, arguments, call, problem.write);
  const bool share =
      share_elements(call.key_cache, call.value_cache) || share_elements(call.key_scales, call.value_scales);
  TORCH_CHECK_VALUE(!share, op, ": key_cache and value_cache (or their scales) share memory; ",
                    "pass separate memory for each, or use torch_fattn.rotary and torch_fattn.cache_write");
  call.copy_query = need_copy(call, call.query);
  for (Tensor* read : {&call.cos, &call.sin, &call.query_norm, &call.key_norm}) {
    *read = readable(call, *read);
  }
  add_layout(call);
  problem.params.value = strides_of(value, call.copy_value, problem.write.vector_aligned);
  add_slots(call, arguments);
  return call;
}

Tensor empty_rows(const RotaryCall& call, const Tensor& rows) {
  const Strides3 strides =
      row_strides(rows.size(1), rows.size(2), rows.size(3), call.problem.token_major_out);
  return at::empty_strided(rows.sizes(), {strides.batch, strides.head, strides.row, 1}, rows.options());
}

}  // namespace fattn
