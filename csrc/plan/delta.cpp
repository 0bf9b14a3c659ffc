// Plans linear attention. gated_delta_rule: a pass over all chunks of 8 tokens at once, with what does not
// depend on the states, and a pass that walks over the chunks of each sequence with its states in registers.
#include <cmath>

#include "planners.h"
#include "refuse.h"
#include "slices.h"

namespace fattn {
namespace {

using Kind = Refusal::Kind;

constexpr int64_t kPrepareSimdgroups = 4;  // of one key head, each with its own chunk
constexpr int64_t kScanSimdgroups = 4;     // at most, of one value head, each with its own columns
constexpr int64_t kStepSimdgroups = 16;    // at most: with more, M1 and M2 would lack registers
constexpr int64_t kStepPlaces = 8;         // 64-bit offsets in threadgroup memory
constexpr int64_t kConvSimdgroups = 8;

std::optional<Refusal> check_columns(const char* op, const char* what, int64_t dim) {
  if (dim > 0 && dim <= kMaxDeltaHeadDim && dim % kHeadDimMultiple == 0) return std::nullopt;
  return refuse(dim > kMaxDeltaHeadDim ? Kind::kNotImplemented : Kind::kValue, op, what, " head_dim ", dim,
                " is not a positive multiple of ", kHeadDimMultiple, " up to ", kMaxDeltaHeadDim,
                "; use the model's own functions for this layer");
}

std::optional<Refusal> check_sequences(const SequenceProblem& p) {
  const char* op = name_of(p.op);
  if (p.length > kMaxDeltaLength) {
    return refuse(Kind::kValue, op, "length ", p.length, " is above ", kMaxDeltaLength,
                  "; pass the tokens in pieces of a multiple of 8, each with the state of the last one");
  }
  if (const int64_t most = std::max({p.batch, p.sequences, p.states}); most > kMaxLength) {
    return refuse(Kind::kValue, op, most, " sequences or states are more than ", kMaxLength,
                  "; split the call");
  }
  return std::nullopt;
}

std::optional<Refusal> check_taps(const char* op, int64_t taps) {
  if (taps >= 2 && taps <= kMaxTaps) return std::nullopt;
  return refuse(Kind::kNotImplemented, op, "a convolution of ", taps, " taps is not one of 2 to ", kMaxTaps,
                "; use F.conv1d for this layer");
}

// The largest divisor of a number up to `limit`.
int64_t divisor_of(int64_t number, int64_t limit) {
  int64_t divisor = std::clamp<int64_t>(limit, 1, number);
  while (number % divisor != 0) --divisor;
  return divisor;
}

KernelSpec spec_of(Kernel kernel, const SequenceProblem& p, int64_t simdgroups) {
  KernelSpec spec;
  spec.kernel = kernel;
  spec.dtype = p.dtype;
  spec.simdgroups = uint16_t(simdgroups);
  spec.packed = p.packed;
  spec.has_state = p.has_state;
  spec.has_initial = p.has_initial;
  spec.slots = p.has_slots;
  return spec;
}

KernelSpec delta_spec(Kernel kernel, const GatedDeltaProblem& p, int64_t simdgroups) {
  KernelSpec spec = spec_of(kernel, p, simdgroups);
  spec.decay_dtype = p.decay_dtype;
  spec.beta_dtype = p.beta_dtype;
  spec.a_log_dtype = p.a_log_dtype;
  spec.dt_bias_dtype = p.dt_bias_dtype;
  spec.channel_decay = p.channel_decay;
  spec.head_dim = uint16_t(p.head_dim);
  spec.value_dim = uint16_t(p.value_dim);
  spec.vector_loads = p.vector_aligned;
  spec.raw_gates = p.raw_gates;
  spec.qk_norm = p.l2norm;
  spec.writes_state = p.writes_state;
  return spec;
}

Pass& add_pass(Plan& plan, const KernelSpec& spec) {
  Pass& pass = plan.add_pass();
  pass.spec = spec;
  pass.threads = {spec.simdgroups * uint32_t(kSimdWidth), 1, 1};
  return pass;
}

void bind_states(Pass& pass, const SequenceProblem& p) {
  if (p.has_state) pass.bind(kSlotState, Slot(kBufferState));
  if (p.has_initial) pass.bind(kSlotHasInitial, Slot(kBufferHasInitial));
  if (p.has_slots) pass.bind(kSlotStateSlots, Slot(kBufferStateSlots));
}

// The parameters that the rule and its step share.
template <typename Params>
void set_delta_params(Params& params, const GatedDeltaProblem& p) {
#define FATTN_COPY(type, name) params.name = p.params.name;
  FATTN_DELTA_ROWS(FATTN_COPY)
#undef FATTN_COPY
  params.length = int32_t(p.length);
  params.states = int32_t(p.states);
  params.key_heads = int32_t(p.key_heads);
  params.group_size = int32_t(p.value_heads / p.key_heads);
  params.scale = float(p.scale);
}

}  // namespace

std::optional<Refusal> check(const GatedDeltaProblem& p) {
  const char* op = name_of(p.op);
  if (auto refusal = check_columns(op, "query/key", p.head_dim)) return refusal;
  if (auto refusal = check_columns(op, "value", p.value_dim)) return refusal;
  if (p.key_heads == 0 ? p.value_heads != 0 : p.value_heads % p.key_heads != 0) {
    return refuse(Kind::kValue, op, p.value_heads, " value heads cannot share ", p.key_heads,
                  " key heads; pass a multiple of them");
  }
  if (p.channel_decay && p.value_heads != p.key_heads) {
    return refuse(Kind::kNotImplemented, op, p.value_heads, " value heads cannot share ", p.key_heads,
                  " key heads if each channel has a decay; pass query and key for each value head");
  }
  if (p.value_heads > kMaxLength) {
    return refuse(Kind::kValue, op, p.value_heads, " value heads are more than ", kMaxLength,
                  "; split the call");
  }
  if (!std::isfinite(static_cast<float>(p.scale))) {
    return refuse(Kind::kValue, op, "scale ", p.scale,
                  " is not finite in float32; leave it out for 1 / sqrt(head_dim)");
  }
  return check_sequences(p);
}

std::optional<Refusal> check(const GatedDeltaStepProblem& p) {
  const char* op = name_of(p.op);
  if (auto refusal = check(static_cast<const GatedDeltaProblem&>(p))) return refusal;
  if (p.length > kMaxStepLength) {
    return refuse(Kind::kNotImplemented, op, p.length, " tokens per sequence are more than ", kMaxStepLength,
                  "; use fattn.causal_conv1d, fattn.gated_delta_rule and fattn.rms_norm");
  }
  const int64_t channels = 2 * p.key_heads * p.head_dim + p.value_heads * p.value_dim;
  if (channels > kMaxLength / kMaxStepLength) {
    return refuse(Kind::kValue, op, channels, " channels are more than ", kMaxLength / kMaxStepLength,
                  "; pass the heads in parts");
  }
  if (auto refusal = check_eps(op, p.eps)) return refusal;
  return check_taps(op, p.taps);
}

std::optional<Refusal> check(const CausalConv1dProblem& p) {
  const char* op = name_of(p.op);
  if (auto refusal = check_taps(op, p.taps)) return refusal;
  if (p.channels > kMaxLength) {
    return refuse(Kind::kValue, op, p.channels, " channels are more than ", kMaxLength, "; split the call");
  }
  return check_sequences(p);
}

Plan plan_gated_delta(const GatedDeltaProblem& p, const DeviceFacts& device) {
  Plan plan;
  plan.tuning.source = "chunks of 8 tokens, 8 columns of a state per simdgroup";
  const int64_t tokens = p.batch * p.length;
  if (p.sequences * p.value_heads == 0 || (tokens == 0 && !(p.writes_state && p.has_initial && p.states > 0)))
    return plan;

  GatedDeltaParams params{};
  set_delta_params(params, p);
  params.sequences = int32_t(p.sequences);
  // Packed sequences begin at chunk start / 8 + number: at most one chunk is unused for each.
  params.chunks = p.packed ? p.length / kDeltaChunk + p.sequences : p.batch * ceil_div(p.length, kDeltaChunk);
  plan.scratch_chunk_floats = params.chunks * p.value_heads * kDeltaChunkFloats;

  const auto bind = [&](Pass& pass) {
    pass.bind(kSlotQuery);
    pass.bind(kSlotKey);
    pass.bind(kSlotDecay, Slot(kBufferDecay));
    if (p.raw_gates) pass.bind(kSlotALog, Slot(kBufferALog));
    if (p.raw_gates) pass.bind(kSlotDtBias, Slot(kBufferDtBias));
    if (p.packed) pass.bind(kSlotSeqlens, Slot(kBufferSeqlens));
    pass.bind(kSlotChunks, Slot(kBufferChunks));
    pass.set_params(params);
  };
  if (tokens > 0) {
    Pass& pass = add_pass(plan, delta_spec(Kernel::kGatedDeltaPrepare, p, kPrepareSimdgroups));
    pass.grid = {uint32_t(ceil_div(params.chunks, kPrepareSimdgroups)), uint32_t(p.key_heads), 1};
    bind(pass);
    pass.bind(kSlotBeta, Slot(kBufferBeta));
    limit_products(pass, device, double(kPrepareSimdgroups * kDeltaChunk * kDeltaChunk * p.head_dim));
  }
  const int64_t tiles = p.value_dim / kFragment, simdgroups = divisor_of(tiles, kScanSimdgroups);
  Pass& pass = add_pass(plan, delta_spec(Kernel::kGatedDeltaScan, p, simdgroups));
  pass.grid = {uint32_t(tiles / simdgroups), uint32_t(p.value_heads), uint32_t(p.sequences)};
  // Staged for a chunk: keys and queries with their decays, and its decays. Without them one float remains.
  const int64_t staged = p.channel_decay ? (3 * kDeltaChunk + 1) * p.head_dim : 1;
  pass.threadgroup_bytes = uint32_t(ceil_div(staged * int64_t{sizeof(float)}, 16) * 16);
  bind(pass);
  pass.bind(kSlotValue);
  pass.bind(kSlotOut);
  bind_states(pass, p);
  limit_products(pass, device, double(simdgroups * kFragment * p.length * 3 * p.head_dim));
  return plan;
}

Plan plan_gated_delta_step(const GatedDeltaStepProblem& p, const DeviceFacts& device) {
  Plan plan;
  plan.tuning.source = "value heads side by side in up to 16 simdgroups";
  if (p.sequences * p.length * p.value_heads == 0) return plan;

  const int64_t group_size = p.value_heads / p.key_heads;
  const int64_t tile = 2 * kSimdWidth / step_row_lanes(p.head_dim), tiles = p.value_dim / tile;
  // Several value heads at a time, or one in rounds over its columns.
  const int64_t together = divisor_of(group_size, kStepSimdgroups / tiles);
  const int64_t of_head = ceil_div(tiles, ceil_div(tiles, kStepSimdgroups)), simdgroups = together * of_head;
  // Value heads share the state of the convolution. It must not change while another threadgroup reads it.
  const int64_t heads = p.writes_state && !p.conv_state_out ? group_size : together;

  KernelSpec spec = delta_spec(Kernel::kGatedDeltaStep, p, simdgroups);
  spec.weight_dtype = p.conv_dtype;
  spec.norm_dtype = p.norm_dtype;
  spec.taps = uint16_t(p.taps);
  spec.gate = p.gate;
  spec.biased = p.conv_bias;
  spec.counts = p.has_counts;
  spec.conv_state_out = p.conv_state_out;
  Pass& pass = add_pass(plan, spec);
  pass.grid = {uint32_t(p.value_heads / heads), uint32_t(p.sequences), 1};
  const int64_t results = together * p.value_dim * (of_head < tiles ? kMaxStepLength : 1);
  const int64_t decays = p.channel_decay ? p.head_dim : together;
  const int64_t floats = 2 * p.head_dim + simdgroups * tile + decays + together + results;
  pass.threadgroup_bytes = uint32_t(ceil_div(kStepPlaces * 8 + floats * 4, 16) * 16);

  pass.bind(kSlotQuery);
  pass.bind(kSlotKey);
  pass.bind(kSlotValue);
  pass.bind(kSlotOutGate, Slot(kBufferOutGate));
  pass.bind(kSlotRawDecay, Slot(kBufferDecay));
  pass.bind(kSlotRawBeta, Slot(kBufferBeta));
  pass.bind(kSlotALog, Slot(kBufferALog));
  pass.bind(kSlotDtBias, Slot(kBufferDtBias));
  pass.bind(kSlotConvWeight, Slot(kBufferConvWeight));
  if (p.conv_bias) pass.bind(kSlotConvBias, Slot(kBufferConvBias));
  pass.bind(kSlotNormWeight, Slot(kBufferNormWeight));
  pass.bind(kSlotConvState, Slot(kBufferConvState));
  if (p.conv_state_out) pass.bind(kSlotConvStateOut, Slot(kBufferConvStateOut));
  bind_states(pass, p);
  if (p.has_counts) pass.bind(kSlotCounts, Slot(kBufferCounts));
  pass.bind(kSlotOut);

  GatedDeltaStepParams params = p.step;
  set_delta_params(params, p);
  params.conv_columns = int32_t(p.conv_columns);
  params.heads = int32_t(heads);
  params.eps = float(p.eps);
  pass.set_params(params);
  limit_products(pass, device, double(3 * p.length * p.head_dim * p.value_dim * heads));
  return plan;
}

Plan plan_causal_conv1d(const CausalConv1dProblem& p) {
  Plan plan;
  plan.tuning.source = "one channel per thread";
  if (p.sequences * p.channels == 0 || (p.batch * p.length == 0 && !(p.states > 0 && p.has_initial)))
    return plan;
  const int64_t simdgroups = std::min<int64_t>(ceil_div(p.channels, kSimdWidth), kConvSimdgroups);
  KernelSpec spec = spec_of(Kernel::kCausalConv1d, p, simdgroups);
  spec.weight_dtype = p.weight_dtype;
  spec.taps = uint16_t(p.taps);
  spec.gate = p.silu ? kGateSilu : kGateNone;
  spec.biased = p.biased;
  Pass& pass = add_pass(plan, spec);
  const int64_t blocks = p.packed ? p.length / kConvTokens + p.sequences  // as with chunks
                                  : std::max<int64_t>(ceil_div(p.length, kConvTokens), 1);
  pass.grid = {uint32_t(ceil_div(p.channels, simdgroups * kSimdWidth)), uint32_t(blocks),
               uint32_t(p.packed ? 1 : p.sequences)};
  pass.bind(kSlotRows, Slot(kBufferRows));
  pass.bind(kSlotWeight, Slot(kBufferWeight));
  if (p.biased) pass.bind(kSlotBias, Slot(kBufferConvBias));
  pass.bind(kSlotOut);
  bind_states(pass, p);
  if (p.packed) pass.bind(kSlotSeqlens, Slot(kBufferSeqlens));
  CausalConv1dParams params = p.params;
  params.length = int32_t(p.length);
  params.sequences = int32_t(p.sequences);
  params.states = int32_t(p.states);
  params.channels = int32_t(p.channels);
  pass.set_params(params);
  limit_groups(pass, double(int64_t(1) << 28) / double(simdgroups * kSimdWidth * kConvTokens));
  return plan;
}

}  // namespace fattn
