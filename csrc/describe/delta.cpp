// Tensors -> the problems of linear attention: gated_delta_rule, gated_delta_step and causal_conv1d.
#include <cmath>
#include <vector>

#include <c10/util/Exception.h>

#include "layout.h"
#include "written_caches.h"

namespace fattn {
namespace {

using at::Tensor;

constexpr std::string_view kTokens = "[batch, length, heads, head_dim]";

void check_shape(const char* op, const char* name, const Tensor& tensor, at::IntArrayRef shape,
                 std::string_view advice) {
  TORCH_CHECK_VALUE(tensor.sizes() == shape, op, ": ", name, " has shape ", tensor.sizes(), " and must be ",
                    shape, "; ", advice);
}

// From token to token. 32 bits hold the offset of a row of a chunk.
constexpr int64_t kMaxTokenStride = int64_t(1) << 27;

// Columns side by side, and tokens not too far apart.
Tensor with_close_tokens(const Tensor& rows) {
  return rows.stride(1) > kMaxTokenStride ? rows.contiguous() : with_contiguous_rows(rows);
}

// A copy if it may share memory with a written state.
Tensor apart(const Tensor& operand, const Tensor& state) {
  return state.defined() && may_share(operand, state) ? operand.clone() : operand;
}

// Factors in the dtype of `first` or in float32.
void check_factors(const char* op, const char* name, const Tensor& factors, at::IntArrayRef shape,
                   const Tensor& first, std::string_view advice) {
  check_device(op, name, factors, first);
  check_factor_dtype(op, name, factors, first);
  check_shape(op, name, factors, shape, advice);
}

// A number for each sequence.
Tensor numbers_of(const char* op, const char* name, const Tensor& numbers, const Tensor& first,
                  const char* first_name, int64_t sequences, std::string_view advice) {
  check_device(op, name, numbers, first, first_name);
  check_int32(op, name, numbers);
  check_shape(op, name, numbers, {sequences}, advice);
  return numbers.contiguous();
}

// The state [states, ..] of a sequence, updated in place.
void check_state(const SequenceProblem& problem, const char* name, const Tensor& state, const Tensor& first,
                 const char* first_name) {
  const char* op = name_of(problem.op);
  check_written(op, name, state, first, first_name);
  TORCH_CHECK_VALUE(problem.has_slots || state.size(0) == problem.sequences, op, ": ", name, " has ",
                    state.size(0), " states and there are ", problem.sequences,
                    " sequences without slots; pass the slots of the sequences, or a state for each");
}

// Where the sequences are, and which state each of them has.
void add_sequences(SequenceOperands& call, SequenceProblem& problem, const Tensor& first,
                   const char* first_name, const Arguments& arguments) {
  const char* op = name_of(problem.op);
  const auto given = [&](const char* name) {
    return arguments.has(name) ? arguments.optional_tensor(name) : std::nullopt;
  };
  const OptionalTensor cu_seqlens = given("cu_seqlens"), slots = given("slots"),
                       initial = given("has_initial_state"), state = given("state");
  problem.batch = problem.sequences = first.size(0);
  problem.length = first.size(1);
  problem.packed = cu_seqlens.has_value();
  problem.has_slots = slots.has_value();
  problem.has_initial = initial.has_value();
  problem.has_state = state.has_value();
  if (problem.packed) {
    check_rank(op, "cu_seqlens", *cu_seqlens, 1, "[sequences + 1]");
    check_device(op, "cu_seqlens", *cu_seqlens, first, first_name);
    check_int32(op, "cu_seqlens", *cu_seqlens);
    TORCH_CHECK_VALUE(
        problem.batch == 1 && cu_seqlens->size(0) > 0, op, ": cu_seqlens has ", cu_seqlens->size(0),
        " entries and ", first_name, " batch size ", problem.batch,
        "; pass the tokens of all sequences as one batch, and where each of them begins and ends");
    problem.sequences = cu_seqlens->size(0) - 1;
    call.cu_seqlens = cu_seqlens->contiguous();
  }
  TORCH_CHECK_VALUE(problem.has_state || !(problem.has_slots || problem.has_initial), op, ": ",
                    problem.has_slots ? "slots" : "has_initial_state",
                    " says which states the sequences have and there is no state; pass one, or leave it out");
  if (problem.has_slots) {
    call.slots = numbers_of(op, "slots", *slots, first, first_name, problem.sequences,
                            "pass the state of each sequence, or -1 to skip it");
  }
  if (problem.has_initial) {
    check_device(op, "has_initial_state", *initial, first, first_name);
    TORCH_CHECK_TYPE(initial->scalar_type() == at::kBool, op, ": has_initial_state is ", dtype_name(*initial),
                     " and must be torch.bool; convert it with .bool()");
    check_shape(op, "has_initial_state", *initial, {problem.sequences}, "pass a bool for each sequence");
    call.has_initial_state = initial->contiguous();
  }
  if (problem.has_state) {
    check_state(problem, "state", *state, first, first_name);
    call.state = *state;
    problem.states = state->size(0);
  }
}

// `split`: the heads of the tensor are two dimensions, key heads and the value heads of each.
TokenStrides token_strides(const Tensor& tensor, bool split, int64_t group_size) {
  const int64_t head = tensor.stride(2);
  return split ? TokenStrides{tensor.stride(0), tensor.stride(1), head, tensor.stride(3)}
               : TokenStrides{tensor.stride(0), tensor.stride(1), head * group_size, head};
}

// query, key, value, gates. Returns whether value heads are two dimensions.
bool add_operands(DeltaOperands& call, GatedDeltaProblem& problem, const char* decay_name,
                  const char* beta_name, const Arguments& arguments) {
  const char* op = name_of(problem.op);
  const Tensor &query = call.query = arguments.tensor("query"), &key = call.key = arguments.tensor("key"),
               &value = call.value = arguments.tensor("value"),
               &decay = call.decay = arguments.tensor(decay_name),
               &beta = call.beta = arguments.tensor(beta_name);
  check_rank(op, "query", query, 4, kTokens);
  check_rank(op, "key", key, 4, kTokens);
  TORCH_CHECK_TYPE(value.defined(), op, ": value is None; pass a tensor of shape ", kTokens);
  const bool split = value.dim() == 5;
  if (!split) check_rank(op, "value", value, 4, kTokens);
  check_float(op, "query", query);
  check_device(op, "key", key, query);
  check_device(op, "value", value, query);
  check_same_dtype(op, "query", query, "key", key);
  check_same_dtype(op, "query", query, "value", value);
  check_shape(op, "key", key, query.sizes(), "pass a key for each query");
  check_same_size(op, "batch size", "query", query.size(0), "value", value.size(0));
  check_same_size(op, "length", "query", query.size(1), "value", value.size(1));
  if (split) check_same_size(op, "head count", "query", query.size(2), "value", value.size(2));

  const at::IntArrayRef heads = value.sizes().slice(0, value.dim() - 1);
  problem.channel_decay = decay.dim() == value.dim();
  std::vector<int64_t> decays = heads.vec();
  if (problem.channel_decay) decays.push_back(query.size(3));
  check_factors(op, decay_name, decay, decays, query,
                "pass one for each token and value head, or for each channel too");
  check_factors(op, beta_name, beta, heads, query, "pass one for each token and value head");

  problem.dtype = dtype_of(query.scalar_type());
  problem.decay_dtype = dtype_of(decay.scalar_type());
  problem.beta_dtype = dtype_of(beta.scalar_type());
  problem.key_heads = query.size(2);
  problem.value_heads = split ? value.size(2) * value.size(3) : value.size(2);
  problem.head_dim = query.size(3);
  problem.value_dim = value.size(-1);
  problem.scale = arguments.get<std::optional<double>>("scale").value_or(
      1.0 / std::sqrt(static_cast<double>(problem.head_dim)));
  problem.writes_state = arguments.get<bool>("writes_state");
  return split;
}

// A_log and dt_bias, from which g and beta are computed.
void add_raw_gates(DeltaOperands& call, GatedDeltaProblem& problem, const Tensor& a_log,
                   const Tensor& dt_bias) {
  const char* op = name_of(problem.op);
  const int64_t sizes[] = {problem.value_heads, problem.head_dim};
  const auto check = [&](const char* name, const Tensor& tensor, size_t rank) {
    check_factors(op, name, tensor, at::IntArrayRef(sizes, rank), call.query,
                  "pass that of the model's layer, viewed in this shape");
    return tensor.contiguous();
  };
  call.a_log = check("A_log", a_log, 1);
  call.dt_bias = check("dt_bias", dt_bias, problem.channel_decay ? 2 : 1);
  problem.a_log_dtype = dtype_of(a_log.scalar_type());
  problem.dt_bias_dtype = dtype_of(dt_bias.scalar_type());
  problem.raw_gates = true;
}

// Checks a state [states, value_heads, head_dim, value_dim].
void check_matrices(const GatedDeltaProblem& problem, const Tensor& state) {
  const char* op = name_of(problem.op);
  check_rank(op, "state", state, 4, "[states, value_heads, head_dim, value_dim]");
  TORCH_CHECK_TYPE(state.scalar_type() == at::kFloat, op, ": state is ", dtype_name(state),
                   " and must be torch.float32; convert it with .float()");
  check_shape(op, "state", state, {state.size(0), problem.value_heads, problem.head_dim, problem.value_dim},
              "allocate a matrix for each value head");
  TORCH_CHECK_VALUE(state.numel() == 0 || state[0].is_contiguous(), op, ": state has strides ",
                    state.strides(),
                    " and is written in place; its last three dimensions must be contiguous");
}

// Copies what the kernels cannot read where it is, and sets the strides.
void add_layout(DeltaOperands& call, GatedDeltaProblem& problem, bool split, const Tensor& other_state = {}) {
  for (Tensor* operand :
       {&call.query, &call.key, &call.value, &call.decay, &call.beta, &call.a_log, &call.dt_bias}) {
    if (operand->defined()) *operand = apart(apart(*operand, call.state), other_state);
  }
  for (Tensor* rows : {&call.query, &call.key, &call.value}) *rows = with_close_tokens(*rows);
  if (problem.channel_decay) call.decay = with_close_tokens(call.decay);
  const int64_t group = problem.key_heads > 0 ? problem.value_heads / problem.key_heads : 1;
  problem.vector_aligned = is_multiple(call.query) && is_multiple(call.key);
  problem.params.query = token_strides(call.query, false, 1);
  problem.params.key = token_strides(call.key, false, 1);
  problem.params.value = token_strides(call.value, split, group);
  problem.params.decay = token_strides(call.decay, split, group);
  problem.params.beta = token_strides(call.beta, split, group);
  problem.params.state = call.state.defined() ? call.state.stride(0) : 0;
}

// The weight of a convolution of `channels`, and its bias, if any.
int64_t check_convolution(const char* op, const char* weight_name, const Tensor& weight,
                          const char* bias_name, const OptionalTensor& bias, int64_t channels,
                          const Tensor& first, const char* first_name) {
  check_rank(op, weight_name, weight, 2, "[channels, taps]");
  check_device(op, weight_name, weight, first, first_name);
  check_factor_dtype(op, weight_name, weight, first, first_name);
  check_same_size(op, "channels", first_name, channels, weight_name, weight.size(0));
  if (bias.has_value()) {
    check_device(op, bias_name, *bias, first, first_name);
    check_same_dtype(op, weight_name, weight, bias_name, *bias);
    check_shape(op, bias_name, *bias, {channels}, "pass a number for each channel");
  }
  return weight.size(1);
}

// The state [states, channels, columns] of a convolution. Returns its columns.
int64_t check_columns(const char* op, const char* name, const Tensor& state, const Tensor& first,
                      const char* first_name, int64_t channels, int64_t taps) {
  check_rank(op, name, state, 3, "[states, channels, columns]");
  check_same_dtype(op, first_name, first, name, state);
  TORCH_CHECK_VALUE(state.size(1) == channels && state.size(2) + 1 >= taps, op, ": ", name, " has shape ",
                    state.sizes(), " and must be [states, ", channels, ", ", taps - 1,
                    " or more]; allocate a column for each token that the next ones see");
  return state.size(2);
}

}  // namespace

GatedDeltaCall describe_gated_delta_rule(const Arguments& arguments) {
  GatedDeltaCall call;
  GatedDeltaProblem& problem = call.problem;
  problem.op = Op::kGatedDeltaRule;
  const char* op = name_of(problem.op);
  const bool split = add_operands(call, problem, "g", "beta", arguments);
  problem.l2norm = arguments.get<bool>("use_qk_l2norm_in_kernel");
  const OptionalTensor a_log = arguments.optional_tensor("A_log"),
                       dt_bias = arguments.optional_tensor("dt_bias");
  TORCH_CHECK_VALUE(a_log.has_value() == dt_bias.has_value(), op, ": ",
                    a_log.has_value() ? "A_log" : "dt_bias",
                    " comes without the other; pass both, or neither");
  if (a_log.has_value()) add_raw_gates(call, problem, *a_log, *dt_bias);
  if (const OptionalTensor state = arguments.optional_tensor("state")) check_matrices(problem, *state);
  add_sequences(call, problem, call.query, "query", arguments);
  problem.writes_state = problem.writes_state && problem.has_state;
  add_layout(call, problem, split);
  return call;
}

GatedDeltaStepCall describe_gated_delta_step(const Arguments& arguments) {
  GatedDeltaStepCall call;
  GatedDeltaStepProblem& problem = call.problem;
  problem.op = Op::kGatedDeltaStep;
  const char* op = name_of(problem.op);
  const bool split = add_operands(call, problem, "a", "b", arguments);
  problem.l2norm = true;
  add_raw_gates(call, problem, arguments.tensor("A_log"), arguments.tensor("dt_bias"));

  const Tensor &gate = arguments.tensor("z"), &weight = arguments.tensor("conv_weight"),
               &norm = arguments.tensor("norm_weight"), &conv_state = arguments.tensor("conv_state"),
               &state = arguments.tensor("state");
  check_device(op, "z", gate, call.query);
  check_same_dtype(op, "query", call.query, "z", gate);
  check_shape(op, "z", gate, call.value.sizes(), "pass a gate for each value");
  const OptionalTensor bias = arguments.optional_tensor("conv_bias");
  const int64_t channels = 2 * problem.key_heads * problem.head_dim + problem.value_heads * problem.value_dim;
  problem.taps =
      check_convolution(op, "conv_weight", weight, "conv_bias", bias, channels, call.query, "query");
  problem.conv_dtype = dtype_of(weight.scalar_type());
  problem.conv_bias = bias.has_value();
  check_factors(op, "norm_weight", norm, {problem.value_dim}, call.query,
                "pass a number for each column of a value");
  problem.norm_dtype = dtype_of(norm.scalar_type());
  problem.gate = GateKind(choice_of(op, "gate", arguments.text("gate"), {"silu", "sigmoid"}) + kGateSilu);
  problem.eps = arguments.get<double>("eps");

  problem.conv_columns =
      check_columns(op, "conv_state", conv_state, call.query, "query", channels, problem.taps);
  check_matrices(problem, state);
  const OptionalTensor counts = arguments.optional_tensor("counts");
  add_sequences(call, problem, call.query, "query", arguments);
  check_state(problem, "conv_state", conv_state, call.query, "query");
  check_same_size(op, "states", "conv_state", conv_state.size(0), "state", state.size(0));
  call.conv_state = conv_state;
  problem.has_counts = counts.has_value();
  if (counts.has_value()) {
    call.counts = numbers_of(op, "counts", *counts, call.query, "query", problem.sequences,
                             "pass the number of tokens of each sequence");
  }

  const OptionalTensor conv_state_out = arguments.optional_tensor("conv_state_out");
  const Tensor written = conv_state_out.value_or(conv_state);
  bool share = may_share(state, conv_state);
  if (conv_state_out.has_value()) {
    TORCH_CHECK_VALUE(written.sizes() == conv_state.sizes() && written.strides() == conv_state.strides(), op,
                      ": conv_state_out has shape ", written.sizes(), " and strides ", written.strides(),
                      " and must have those of conv_state; allocate it with torch.empty_like(conv_state)");
    check_state(problem, "conv_state_out", written, call.query, "query");
    check_same_dtype(op, "conv_state", conv_state, "conv_state_out", written);
    share = share || may_share(written, conv_state) || may_share(written, state);
    call.conv_state_out = written;
    problem.conv_state_out = problem.writes_state;
  }
  TORCH_CHECK_VALUE(!share, op, ": states share memory; allocate separate memory for each");
  const auto readable = [&](const Tensor& operand) { return apart(apart(operand, state), written); };
  call.gate = with_close_tokens(readable(gate));
  call.conv_weight = readable(weight).contiguous();
  if (bias.has_value()) call.conv_bias = readable(*bias).contiguous();
  call.norm_weight = readable(norm).contiguous();
  add_layout(call, problem, split, written);
  problem.step.gate =
      token_strides(call.gate, split, problem.key_heads > 0 ? problem.value_heads / problem.key_heads : 1);
  problem.step.conv_state = conv_state.stride(0);
  problem.step.conv_channel = conv_state.stride(1);
  return call;
}

CausalConv1dCall describe_causal_conv1d(const Arguments& arguments) {
  const char* op = name_of(Op::kCausalConv1d);
  const Tensor &x = arguments.tensor("x"), &weight = arguments.tensor("weight");
  const OptionalTensor bias = arguments.optional_tensor("bias"), state = arguments.optional_tensor("state");
  check_rank(op, "x", x, 3, "[batch, length, channels]");
  check_float(op, "x", x);
  CausalConv1dCall call;
  CausalConv1dProblem& problem = call.problem;
  problem.op = Op::kCausalConv1d;
  problem.channels = x.size(2);
  problem.taps = check_convolution(op, "weight", weight, "bias", bias, problem.channels, x, "x");
  problem.dtype = dtype_of(x.scalar_type());
  problem.weight_dtype = dtype_of(weight.scalar_type());
  problem.silu = choice_of(op, "activation", arguments.text("activation"), {"none", "silu"}) == 1;
  problem.biased = bias.has_value();
  if (state.has_value()) {
    problem.params.columns = check_columns(op, "state", *state, x, "x", problem.channels, problem.taps);
  }
  add_sequences(call, problem, x, "x", arguments);
  call.x = apart(x, call.state);
  call.weight = apart(weight, call.state).contiguous();
  if (bias.has_value()) call.bias = apart(*bias, call.state).contiguous();
  problem.params.x = {call.x.stride(0), call.x.stride(2), call.x.stride(1)};
  if (state.has_value()) {
    problem.params.state = state->stride(0);
    problem.params.state_channel = state->stride(1);
  }
  return call;
}

}  // namespace fattn
