// The state of a row that backward_query writes for the passes that follow: a float4.
#pragma once

#include "../common/score_units.h"

namespace fattn {

struct RowState {
  float lse;  // in score units; +inf: no key has a weight, and a sink then has weight 1
  float delta;
  float inverse;     // 1 / sum of the weights
  float slope_grad;  // the row's part of the gradient of its ALiBi slope
};

inline RowState row_state_of(float4 stored) {
  RowState row;
  row.lse = stored[0];
  row.delta = stored[1];
  row.inverse = stored[2];
  row.slope_grad = stored[3];
  return row;
}

}  // namespace fattn
