"""flash-attn's ALiBi, `-slope * |row - key|`, for rows that see later keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..operators.parts import merge_parts, shifted

# Computes out `[.., L, H, D]` and lse `[.., H, L]` of rows shifted back by a number of keys; with `part`,
# float32 out and sums `[.., H, L, 4]` over a part of the keys.
Attend = Callable[..., tuple[Tensor, Tensor]]


def sees_no_later_key(causal: bool, options: dict[str, Any]) -> bool:
    return causal or options["window_right"] == 0


def attend_by_distance(
    attend: Attend, slopes: Tensor, of_rows: Tensor, dtype: torch.dtype, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """The operators add `slope * (key - row)`, which is equal for keys before a row; a second call with
    negated slopes computes the row's own key and later ones. `of_rows`: the slopes, broadcast to lse."""
    left = options["window_left"]
    ahead = {"is_causal": False, "alibi_slopes": -slopes, **options, "window_left": 0}
    if left == 0:
        return attend(0, **ahead)
    before = {"is_causal": True, "alibi_slopes": slopes, **options, "window_left": max(left - 1, -1)}
    before["sinks"] = None  # count sinks once
    out, sums = attend(0, part=True, **ahead)
    out_before, sums_before = attend(1, part=True, **before)
    sums_before = shifted(sums_before, of_rows.float())  # that call shifted the rows by one key
    shape, lse_shape = out.shape, sums.transpose(-2, -3).shape[:-1]
    rows = (1, lse_shape[:-1].numel(), lse_shape[-1])
    parts = [x.reshape(*rows, shape[-1]) for x in (out_before, out)]
    of_parts = [x.transpose(-2, -3).reshape(*rows, 4) for x in (sums_before, sums)]
    merged, lse = merge_parts(parts, of_parts, dtype)
    return merged.view(shape), lse.view(lse_shape).transpose(-1, -2).contiguous()
