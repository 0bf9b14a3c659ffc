"""flash-attn's ALiBi, by distance, where a row sees later keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# Out `[.., L, H, D]` and lse `[.., H, L]` of rows that lie so many keys before where they are.
Attend = Callable[..., tuple[Tensor, Tensor]]


def sees_no_later_key(causal: bool, options: dict[str, Any]) -> bool:
    return causal or options["window_right"] == 0


def attend_by_distance(
    attend: Attend, slopes: Tensor, of_rows: Tensor, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """`-slope * |row - key|` where rows see later keys. The operators add `slope * (key - row)`, which is the
    same for the keys before a row; the row's own and the later ones are a call of their own, with slopes of
    the other sign. `of_rows` are the slopes as they are broadcast to lse."""
    left = options["window_left"]
    ahead, ahead_lse = attend(0, is_causal=False, alibi_slopes=-slopes, **options | {"window_left": 0})
    if left == 0:
        return ahead, ahead_lse
    own = options | {"window_left": max(left - 1, -1)}
    before, before_lse = attend(1, is_causal=True, alibi_slopes=slopes, **own)
    before_lse = before_lse - of_rows.float()  # the rows stood one key nearer to all that they saw
    outs = torch.stack((before, ahead))
    lses = torch.stack((before_lse, ahead_lse)).transpose(-1, -2)
    heads, dim = outs.shape[-2:]
    out, lse = torch.ops.fattn.merge(
        outs.reshape(2, 1, -1, heads, dim), lses.reshape(2, 1, -1, heads).contiguous()
    )
    return out.view_as(ahead), lse.view(lses.shape[1:]).transpose(-1, -2).contiguous()
