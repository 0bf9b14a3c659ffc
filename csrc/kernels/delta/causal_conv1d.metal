// causal_conv1d: a thread per channel walks over kConvTokens tokens of a sequence, with a window in
// registers.
//
// The thread of the first tokens of a channel also writes its state, which no other thread reads: a piece is
// longer than a window.
#include "delta_params.h"

FATTN_DECLARE_CONSTANT(bool, packed)
FATTN_DECLARE_CONSTANT(bool, sliced)
FATTN_DECLARE_CONSTANT(bool, slots)
FATTN_DECLARE_CONSTANT(uint, gate)
FATTN_DECLARE_CONSTANT(bool, has_state)
FATTN_DECLARE_CONSTANT(bool, has_initial)
FATTN_DECLARE_CONSTANT(bool, biased)

#include "../common/activations.h"
#include "../common/grid.h"
#include "sequences.h"

namespace fattn {

typedef FATTN_T Element;
typedef FATTN_WEIGHT_T Weight;  // Element or float

FATTN_CONSTEXPR int kTaps = FATTN_TAPS;
FATTN_CONSTEXPR int kThreads = FATTN_SIMDGROUPS * kSimdWidth;
static_assert(kTaps <= kConvTokens, "the second piece of a sequence would read its state");

}  // namespace fattn

using namespace fattn;

[[kernel, max_total_threads_per_threadgroup(fattn::kThreads)]] void fattn_causal_conv1d(
    const device Element* x [[buffer(fattn::kBufferRows)]],
    const device Weight* weight [[buffer(fattn::kBufferWeight)]],
    const device Weight* bias [[buffer(fattn::kBufferConvBias), function_constant(fc_biased)]],
    device Element* states [[buffer(fattn::kBufferState), function_constant(fc_has_state)]],
    const device bool* initial [[buffer(fattn::kBufferHasInitial), function_constant(fc_has_initial)]],
    const device int* slots [[buffer(fattn::kBufferStateSlots), function_constant(fc_slots)]],
    const device int* cu_seqlens [[buffer(fattn::kBufferSeqlens), function_constant(fc_packed)]],
    device Element* out [[buffer(fattn::kSlotOut)]],
    constant CausalConv1dParams& params [[buffer(fattn::kSlotParams)]],
    constant GridSlice& slice [[buffer(fattn::kSlotSlice), function_constant(fc_sliced)]],
    uint3 dispatched [[threadgroup_position_in_grid]], ushort index [[thread_index_in_threadgroup]]) {
  const uint3 group = group_in_grid(dispatched, slice);
  const int channel = group.x * kThreads + index;
  if (channel >= params.channels) {
    return;
  }
  const int number = fc_packed
                         ? sequence_of(group.y, kConvTokens, cu_seqlens, params.sequences, params.length)
                         : int(group.z);
  const Sequence of = sequence_at(number, cu_seqlens, params.length);
  const int piece = int(group.y) - (fc_packed ? first_piece(of, kConvTokens, params.length) : 0);
  const int first = piece * kConvTokens;
  // The first packed sequence also clears the tokens before it, and the last one those after it.
  const int room = fc_packed && number + 1 == params.sequences ? params.length - of.first : of.length;
  if (first < 0 || (first > 0 && first >= room)) {
    return;
  }
  const int state_index = fc_slots ? slots[number] : number;
  const bool kept = !fc_slots || uint(state_index) < uint(params.states);
  const int end = kept ? of.length : 0;

  device Element* state = nullptr;
  bool begins = false;
  if (fc_has_state && kept) {
    state = states + state_index * params.state + channel * params.state_channel;
    begins = !fc_has_initial || initial[number];
  }
  const device Element* input =
      x + of.batch * params.x.batch + channel * params.x.head + of.first * params.x.row;
  const int columns = int(params.columns);

  float taps[kTaps], window[kTaps];
  FATTN_UNROLL
  for (int w = 0; w < kTaps; w++) {
    taps[w] = float(weight[long(channel) * kTaps + w]);
    const int token = first + w - kTaps;  // of window[1] and on; window[0] leaves it first
    window[w] = 0.0f;
    if (w > 0 && token >= 0 && token < end) {
      window[w] = float(input[token * params.x.row]);
    } else if (w > 0 && token < 0 && begins) {
      window[w] = float(state[columns + token]);
    }
  }
  const float offset = fc_biased ? float(bias[channel]) : 0.0f;
  device Element* target = out + token_index(of, 0, params.length) * params.channels + channel;
  const int start = fc_packed && number == 0 && first == 0 ? -of.first : first;
  for (int token = start; token < min(first + kConvTokens, room); token++) {
    float sum = 0.0f;
    if (token >= 0 && token < end) {
      FATTN_UNROLL
      for (int w = 0; w + 1 < kTaps; w++) {
        window[w] = window[w + 1];
      }
      window[kTaps - 1] = float(input[token * params.x.row]);
      sum = offset;
      FATTN_UNROLL
      for (int w = 0; w < kTaps; w++) {
        sum = fma(window[w], taps[w], sum);
      }
      sum = fc_gate == kGateSilu ? silu(sum) : sum;
    }
    target[long(token) * params.channels] = Element(sum);
  }

  if (fc_has_state && kept && first == 0) {
    for (int column = 0; column < columns; column++) {  // upwards: what is read lies ahead of what is written
      const int token = end + column - columns;
      Element newest = Element(0.0f);
      if (token >= 0) {
        newest = input[token * params.x.row];
      } else if (begins) {
        newest = state[columns + token];
      }
      state[column] = newest;
    }
  }
}
