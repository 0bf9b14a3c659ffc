// How the planner uses the score options: refusals, function constants, parameters.
#include "score_options.h"

#include <cmath>
#include <cstdlib>
#include <limits>

#include "planners.h"
#include "refuse.h"

namespace fattn {

using Kind = Refusal::Kind;

bool reads_positions(const ScoreOptions& options) { return options.alibi_slopes.given; }

bool changes_scores(const ScoreOptions& options) {
#define FATTN_TENSOR(slot, name, shapes) \
  if (options.name.given) return true;
  FATTN_SCORE_OPTIONS(FATTN_NOTHING, FATTN_TENSOR)
#undef FATTN_TENSOR
  return options.softcap != 0.0;
}

std::optional<Refusal> check_score_options(const Problem& p) {
  const char* op = name_of(p.op);
  const ScoreOptions& options = p.options;
  if (options.window_left < -1 || options.window_right < -1) {
    const bool left = options.window_left < -1;
    return refuse(Kind::kValue, op, left ? "window_left " : "window_right ",
                  left ? options.window_left : options.window_right,
                  " is negative; use -1 for no limit or a number of keys >= 0");
  }
  if (options.sink_tokens < 0) {
    return refuse(Kind::kValue, op, "sink_tokens ", options.sink_tokens, " is negative; use 0 for none");
  }
  if (!(options.softcap >= 0.0 && std::isfinite(options.softcap))) {
    return refuse(Kind::kValue, op, "softcap ", options.softcap,
                  " is not a finite number >= 0; use 0 for none");
  }
  if (options.softcap > kMaxSoftcap) {
    return refuse(Kind::kValue, op, "softcap ", options.softcap, " is above ", kMaxSoftcap,
                  "; use 0 for none");
  }
  // GPUs flush subnormal numbers to 0, and the gradient divides by the cap.
  const bool tiny = static_cast<float>(options.softcap) < std::numeric_limits<float>::min();
  if (options.softcap > 0.0 && (tiny || !std::isfinite(static_cast<float>(p.scale / options.softcap)))) {
    return refuse(Kind::kValue, op, "softcap ", options.softcap, " is too small for scale ", p.scale,
                  ", which is divided by it in float32; use a larger one, or 0 for none");
  }
  const bool by_position = options.window_left >= 0 || options.window_right >= 0 || reads_positions(options);
  if (by_position && std::abs(p.q_offset) > kMaxLength) {
    return refuse(
        Kind::kValue, op, "q_offset ", p.q_offset, " is beyond ", kMaxLength,
        ", the last position for windows and alibi_slopes; use one nearer to 0: beyond all keys and ",
        "windows the result does not change");
  }
  return std::nullopt;
}

void set_score_features(Features& features, const Problem& p) {
  features.softcap = p.options.softcap > 0.0;
  features.alibi = p.options.alibi_slopes.given;
  features.sinks = p.options.sinks.given;
  features.sinks_kind = p.options.sinks.kind;
  features.slopes_kind = p.options.alibi_slopes.kind;
  features.tree = p.options.tree_mask;
}

ScoreParams score_params(const Problem& p) {
  const ScoreOptions& options = p.options;
  ScoreParams params{};
  params.sinks_stride = options.sinks.stride;
  params.alibi_slopes_batch_stride = options.alibi_slopes.batch_stride;
  params.alibi_slopes_stride = options.alibi_slopes.stride;
  params.tree_mask_batch_stride = options.tree_mask_batch_stride;
  params.tree_mask_row_stride = options.tree_mask_row_stride;
  params.score_scale = float(options.softcap > 0.0 ? p.scale / options.softcap : p.scale * score_unit(p));
  params.softcap = float(options.softcap * score_unit(p));
  params.slope_scale = float(score_unit(p));
  return params;
}

}  // namespace fattn
