// A step of a gated delta layer in one launch, for a few tokens of each sequence: the convolution of queries,
// keys and values, their norms, the gates, the delta rule and the gated norm of its result. Both states are
// read once and replaced.
//
// The value heads of a key head share the convolution of query and key. If its state is replaced in place,
// one threadgroup takes them all, and replaces it after the last of them has read it. A simdgroup has
// kTileColumns columns of a value head's state in registers: a lane two of them, in every kRowLanes-th row.
#include "delta_params.h"

FATTN_DECLARE_CONSTANT(bool, sliced)
FATTN_DECLARE_CONSTANT(bool, slots)
FATTN_DECLARE_CONSTANT(uint, gate)
FATTN_DECLARE_CONSTANT(bool, raw_gates)
FATTN_DECLARE_CONSTANT(bool, writes_state)
FATTN_DECLARE_CONSTANT(bool, biased)
FATTN_DECLARE_CONSTANT(bool, counts)
FATTN_DECLARE_CONSTANT(bool, conv_state_out)

#include "../common/grid.h"
#include "gates.h"

namespace fattn {

typedef FATTN_T Element;
typedef FATTN_DECAY_T Decay;
typedef FATTN_BETA_T Beta;
typedef FATTN_WEIGHT_T Weight;
typedef FATTN_NORM_T Norm;

FATTN_CONSTEXPR int kHeadDim = FATTN_HEAD_DIM;
FATTN_CONSTEXPR int kValueDim = FATTN_VALUE_DIM;
FATTN_CONSTEXPR int kMatrix = kHeadDim * kValueDim;
FATTN_CONSTEXPR int kTaps = FATTN_TAPS;
FATTN_CONSTEXPR bool kChannelDecay = FATTN_CHANNEL_DECAY;
FATTN_CONSTEXPR int kSimdgroups = FATTN_SIMDGROUPS;
FATTN_CONSTEXPR int kThreads = kSimdgroups * kSimdWidth;

FATTN_CONSTEXPR int kRowLanes = step_row_lanes(kHeadDim);
FATTN_CONSTEXPR int kColumnLanes = kSimdWidth / kRowLanes;
FATTN_CONSTEXPR int kLaneRows = kHeadDim / kRowLanes;
FATTN_CONSTEXPR int kTileColumns = 2 * kColumnLanes;
FATTN_CONSTEXPR int kRoundColumns = kSimdgroups * kTileColumns;
// Value heads at a time, or rounds over the columns of one.
FATTN_CONSTEXPR int kHeads = kRoundColumns > kValueDim ? kRoundColumns / kValueDim : 1;
FATTN_CONSTEXPR int kRounds = (kHeads * kValueDim + kRoundColumns - 1) / kRoundColumns;
FATTN_CONSTEXPR bool kWholeRounds = kHeads * kValueDim % kRoundColumns == 0;
// Columns of a result per lane.
FATTN_CONSTEXPR int kResultColumns = (kValueDim + kSimdWidth - 1) / kSimdWidth;
// Tokens whose results wait for the other rounds, for the norm.
FATTN_CONSTEXPR int kWaiting = kRounds > 1 ? kMaxStepLength : 1;
FATTN_CONSTEXPR int kDecays = kChannelDecay ? kHeadDim : kHeads;
static_assert(kHeads == 1 || !kChannelDecay, "the value heads of a round would share decays");

// Offsets of the first token of a threadgroup. M1 and M2 would keep them in registers of every lane.
struct StepPlaces {
  long query;
  long key;
  long value;
  long past;  // of its sequence, in the convolution's state
  long gate;
  long decay;
  long beta;
  long out;
};

// A token as the rule takes it.
struct StepToken {
  float channels[2 * kHeadDim + kRoundColumns];  // query, key, values
  float decay[kDecays];
  float beta[kHeads];
};

// A channel of the convolution.
struct Channel {
  const device Element* input;  // of the first token
  long step;                    // to the next one
  device Element* past;         // the end of its state
  int index;
};

// A channel of a key head. They are the query, the key, then the values of each value head.
inline Channel channel_of(int own, int head, threadgroup const StepPlaces& places,
                          const device Element* query, const device Element* key, const device Element* value,
                          device Element* conv_state, constant GatedDeltaStepParams& params) {
  Channel channel;
  if (own < kHeadDim) {
    channel.input = query + places.query + own;
    channel.step = params.query.token;
    channel.index = head * kHeadDim + own;
  } else if (own < 2 * kHeadDim) {
    channel.input = key + places.key + (own - kHeadDim);
    channel.step = params.key.token;
    channel.index = (params.key_heads + head - 1) * kHeadDim + own;
  } else {
    const int column = own - 2 * kHeadDim;
    channel.input = value + places.value + column / kValueDim * params.value.head + column % kValueDim;
    channel.step = params.value.token;
    channel.index = 2 * params.key_heads * kHeadDim + head * params.group_size * kValueDim + column;
  }
  channel.past = conv_state + places.past + channel.index * params.conv_channel;
  return channel;
}

// A channel of a token; of a negative one, from the state.
inline Element element_at(Channel channel, int token) {
  const device Element* place = channel.past + token;
  if (token >= 0) {
    place = channel.input + token * channel.step;
  }
  return *place;
}

// Here and below, a thread loads all that it needs before it computes or stores: a step is a chain of waits
// for memory.
inline float convolved(Channel channel, int token, const device Weight* weight, const device Weight* bias) {
  Element x[kTaps];
  Weight factors[kTaps];
  FATTN_UNROLL
  for (int tap = 0; tap < kTaps; tap++) {
    x[tap] = element_at(channel, token + tap + 1 - kTaps);
    factors[tap] = weight[channel.index * kTaps + tap];
  }
  float sum = 0.0f;
  if (fc_biased) {
    sum = float(bias[channel.index]);
  }
  FATTN_UNROLL
  for (int tap = 0; tap < kTaps; tap++) {
    sum = fma(float(x[tap]), float(factors[tap]), sum);
  }
  return silu(sum);
}

// Sums of the columns of a tile.
template <typename T>
inline T column_sum(T x) {
  FATTN_UNROLL
  for (ushort step = kColumnLanes; step < kSimdWidth; step *= 2) {
    x += simd_shuffle_xor(x, step);
  }
  return x;
}

// Moves the state over a token. `own` is the value head, `column` that of its value in the round. Returns the
// result by sums over the old state's rows: q (decay S + k delta) = decay (q S) + (q k) delta.
inline float2 apply_rule(thread float2 (&state)[kLaneRows], threadgroup const StepToken& token, int own,
                         int column, float scale, ushort first_row) {
  float2 seen = float2(0.0f), asked = float2(0.0f);  // k S, q S
  float3 dots = float3(0.0f);                        // k k, q q, q k
  FATTN_UNROLL
  for (int f = 0; f < kLaneRows; f++) {
    const int row = kRowLanes * f + first_row;
    const float query = token.channels[row], key = token.channels[kHeadDim + row];
    if (kChannelDecay) {
      state[f] *= token.decay[row];
    }
    seen = fma(state[f], float2(key), seen);
    asked = fma(state[f], float2(query), asked);
    dots = fma(float3(key, query, query), float3(key, query, key), dots);
  }
  seen = column_sum(seen);
  asked = column_sum(asked);
  dots = column_sum(dots);
  const float key_norm = inverse_length(dots[0]), query_norm = scale * inverse_length(dots[1]);
  threadgroup const float* values = token.channels + 2 * kHeadDim + column;
  const float decay = kChannelDecay ? 1.0f : token.decay[own];
  const float2 update =
      token.beta[own] * key_norm * (float2(values[0], values[1]) - seen * (decay * key_norm));
  FATTN_UNROLL
  for (int f = 0; f < kLaneRows; f++) {
    state[f] = fma(float2(token.channels[kHeadDim + kRowLanes * f + first_row]), update, state[f] * decay);
  }
  return query_norm * (asked * decay + dots[2] * update);
}

// Normalises and stores the result of a token and head; `gate` is its row of z.
inline void store_result(threadgroup const float* result, const device Element* gate,
                         const device Norm* weight, device Element* out, float eps, ushort lane) {
  float factors[kResultColumns];
  float squares = 0.0f;
  FATTN_UNROLL
  for (int i = 0; i < kResultColumns; i++) {
    const int column = min(i * kSimdWidth + lane, kValueDim - 1);
    const float x = float(gate[column]);
    factors[i] = float(weight[column]) * (fc_gate == kGateSilu ? silu(x) : sigmoid(x));
  }
  for (int column = lane; column < kValueDim; column += kSimdWidth) {
    squares = fma(result[column], result[column], squares);
  }
  const float scale = inverse_rms(simd_sum(squares), kValueDim, eps);
  FATTN_UNROLL
  for (int i = 0; i < kResultColumns; i++) {
    const int column = i * kSimdWidth + lane;
    if (column < kValueDim) {
      out[column] = Element(result[column] * scale * factors[i]);
    }
  }
}

}  // namespace fattn

using namespace fattn;

[[kernel, max_total_threads_per_threadgroup(fattn::kThreads)]] void fattn_gated_delta_step(
    const device Element* query [[buffer(fattn::kSlotQuery)]],
    const device Element* key [[buffer(fattn::kSlotKey)]],
    const device Element* value [[buffer(fattn::kSlotValue)]],
    const device Element* gate [[buffer(fattn::kBufferOutGate)]],
    const device Decay* raw_decay [[buffer(fattn::kBufferDecay)]],
    const device Beta* raw_beta [[buffer(fattn::kBufferBeta)]],
    const device ALog* a_log [[buffer(fattn::kBufferALog)]],
    const device DtBias* dt_bias [[buffer(fattn::kBufferDtBias)]],
    const device Weight* weight [[buffer(fattn::kBufferConvWeight)]],
    const device Weight* bias [[buffer(fattn::kBufferConvBias), function_constant(fc_biased)]],
    const device Norm* norm [[buffer(fattn::kBufferNormWeight)]],
    device Element* conv_state [[buffer(fattn::kBufferConvState)]],
    device Element* conv_state_out
    [[buffer(fattn::kBufferConvStateOut), function_constant(fc_conv_state_out)]],
    device float* states [[buffer(fattn::kBufferState)]],
    const device int* slots [[buffer(fattn::kBufferStateSlots), function_constant(fc_slots)]],
    const device int* counts [[buffer(fattn::kBufferCounts), function_constant(fc_counts)]],
    device Element* out [[buffer(fattn::kSlotOut)]],
    constant GatedDeltaStepParams& params [[buffer(fattn::kSlotParams)]],
    constant GridSlice& slice [[buffer(fattn::kSlotSlice), function_constant(fc_sliced)]],
    uint3 dispatched [[threadgroup_position_in_grid]], ushort thread_index [[thread_index_in_threadgroup]],
    ushort simdgroup_index [[simdgroup_index_in_threadgroup]], ushort lane [[thread_index_in_simdgroup]]) {
  threadgroup StepPlaces places;
  threadgroup StepToken token;
  threadgroup float results[kWaiting][kHeads * kValueDim];

  const uint3 group = group_in_grid(dispatched, slice);
  const int sequence = group.y;
  const int shares = params.group_size / params.heads;
  const int head = int(group.x) / shares;
  const int first_head = int(group.x) % shares * params.heads;  // among the value heads of the key head

  int slot = sequence, count = params.length;
  if (fc_slots) {
    slot = slots[sequence];
  }
  if (fc_counts) {
    count = clamp(counts[sequence], 0, params.length);
  }
  count = uint(slot) < uint(params.states) ? count : 0;

  const int value_heads = params.key_heads * params.group_size;
  const long out_step = long(value_heads) * kValueDim;
  if (thread_index == 0) {
    const long n = sequence;
    places.query = n * params.query.batch + head * params.query.group;
    places.key = n * params.key.batch + head * params.key.group;
    places.value = n * params.value.batch + head * params.value.group;
    places.past = slot * params.conv_state + params.conv_columns;
    places.gate = n * params.gate.batch + head * params.gate.group;
    places.decay = n * params.decay.batch + head * params.decay.group;
    places.beta = n * params.beta.batch + head * params.beta.group;
    places.out = n * params.length * out_step + head * params.group_size * kValueDim;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  const int width = params.heads * kValueDim;
  for (int i = thread_index; i < (params.length - count) * width; i += kThreads) {
    out[places.out + (count + i / width) * out_step + first_head * kValueDim + i % width] = Element(0.0f);
  }
  if (count == 0) {
    return;
  }

  for (int member = first_head; member < first_head + params.heads; member += kHeads) {
    const int value_head = head * params.group_size + member;  // the first of kHeads
    for (int round = 0; round < kRounds; round++) {
      const int first_column = round * kRoundColumns;
      const int columns = min(kRoundColumns, kHeads * kValueDim - first_column);
      const int in_round = simdgroup_index * kTileColumns + lane % kColumnLanes * 2;
      const bool has_tile = kWholeRounds || in_round < columns;
      const int own = (first_column + in_round) / kValueDim;  // among kHeads
      device float* matrix = states + slot * params.state + (value_head + own) * long(kMatrix) +
                             (lane / kColumnLanes * kValueDim + (first_column + in_round) % kValueDim);
      float2 state[kLaneRows];
      FATTN_UNROLL
      for (int f = 0; f < kLaneRows; f++) {
        if (has_tile) {
          state[f] = float2(*(const device packed_float2*)(matrix + f * kRowLanes * kValueDim));
        }
      }

      for (int t = 0; t < count; t++) {
        for (int i = thread_index; i < 2 * kHeadDim + columns; i += kThreads) {
          const int place = i < 2 * kHeadDim ? i : i + member * kValueDim + first_column;
          token.channels[i] = convolved(
              channel_of(place, head, places, query, key, value, conv_state, params), t, weight, bias);
        }
        // By the last threads, which have the fewest channels.
        for (int i = kThreads - 1 - thread_index; i < kDecays; i += kThreads) {
          const int of = kChannelDecay ? value_head : value_head + i;
          const int channel = kChannelDecay ? value_head * kHeadDim + i : of;
          const long place = kChannelDecay ? i : (member + i) * params.decay.head;
          const Decay decay = raw_decay[places.decay + t * params.decay.token + place];
          if (i < kHeads) {
            token.beta[i] = beta_of(
                float(raw_beta[places.beta + t * params.beta.token + (member + i) * params.beta.head]));
          }
          token.decay[i] = decay_of(float(decay), a_log, dt_bias, of, channel);
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);

        threadgroup float* row = results[kRounds > 1 ? t : 0];
        if (has_tile) {
          const float2 result = apply_rule(state, token, own, in_round, params.scale, lane / kColumnLanes);
          if (lane < kColumnLanes) {
            row[first_column + in_round] = result.x;
            row[first_column + in_round + 1] = result.y;
          }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (kRounds == 1 && simdgroup_index < kHeads) {
          const int ready = member + simdgroup_index;
          store_result(row + simdgroup_index * kValueDim,
                       gate + places.gate + t * params.gate.token + ready * params.gate.head, norm,
                       out + places.out + t * out_step + ready * kValueDim, params.eps, lane);
        }
      }
      if (fc_writes_state && has_tile) {
        FATTN_UNROLL
        for (int f = 0; f < kLaneRows; f++) {
          *(device packed_float2*)(matrix + f * kRowLanes * kValueDim) = packed_float2(state[f]);
        }
      }
    }
    for (int t = simdgroup_index; kRounds > 1 && t < count; t += kSimdgroups) {
      store_result(results[t], gate + places.gate + t * params.gate.token + member * params.gate.head, norm,
                   out + places.out + t * out_step + member * kValueDim, params.eps, lane);
    }
  }

  if (fc_writes_state) {
    // All that was read of the state is in threadgroup memory since the barrier of the last token.
    device Element* written = fc_conv_state_out ? conv_state_out : conv_state;
    const int shared = first_head == 0 ? 2 * kHeadDim : 0;  // channels of query and key
    for (int i = thread_index; i < shared + width; i += kThreads) {
      const int own = i < shared ? i : i - shared + 2 * kHeadDim + first_head * kValueDim;
      const Channel channel = channel_of(own, head, places, query, key, value, conv_state, params);
      device Element* columns = written + (channel.past - conv_state) - params.conv_columns;
      for (int first = 0; first < params.conv_columns;
           first += kTaps) {  // upwards: reads are ahead of writes
        Element kept[kTaps];
        FATTN_UNROLL
        for (int c = 0; c < kTaps; c++) {
          kept[c] = element_at(channel, count - max(params.conv_columns - first - c, 1));
        }
        FATTN_UNROLL
        for (int c = 0; c < kTaps; c++) {
          if (first + c < params.conv_columns) {
            columns[first + c] = kept[c];
          }
        }
      }
    }
  }
}
