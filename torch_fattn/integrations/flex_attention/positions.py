"""Which keys a row sees, as options of the operators: causal, a window, and a prefix that every row sees."""

from __future__ import annotations

from itertools import combinations
from typing import Any, NamedTuple

import torch
from torch import Tensor

HOST = torch.device("cpu")  # whatever the default is
_LINES = 7
_ROWS_AT_A_TIME = 1024


class Places(NamedTuple):
    """Some places of a mask, each with its row and key: int64 `[n]`."""

    q_idx: Tensor
    kv_idx: Tensor


def some_places(rows: int, keys: int) -> Places:
    """On the host: all keys of some rows, and all rows of some keys."""
    all_rows, all_keys = (torch.arange(n, device=HOST) for n in (rows, keys))
    some_rows, some_keys = (
        torch.tensor(sorted({0, n - 1, *(n * part // _LINES for part in range(_LINES))}), device=HOST)
        for n in (rows, keys)
    )
    lines = torch.cartesian_prod(some_rows, all_keys), torch.cartesian_prod(all_rows, some_keys)
    return Places(*torch.cat(lines).T)


def fit(places: Places, seen: Tensor) -> dict[str, Any] | None:
    """The fewest options under which exactly the keys `seen` bool `[n]` of these places are visible, rows
    counted from 0; None if no options do that."""
    ahead = places.kv_idx - places.q_idx
    for causal in (True, False):
        allowed = ahead <= 0 if causal else torch.ones_like(seen)
        hidden = allowed & ~seen
        ends = {"sink_tokens": 0, "window_left": -1, "window_right": -1}
        if bool(hidden.any()):
            ends["sink_tokens"] = int(places.kv_idx[hidden].min())
            near = ahead[seen & (places.kv_idx >= ends["sink_tokens"])]
            if near.numel() > 0:
                ends |= {"window_left": -int(near.min()), "window_right": int(near.max())}
        for count in range(len(ends) + 1):
            for some in combinations(ends, count):
                options = {"is_causal": causal, "q_offset": 0, **{name: ends[name] for name in some}}
                if all(ends[name] >= 0 for name in some) and torch.equal(visible(places, options), seen):
                    return options
    return None


def visible(places: Places, options: dict[str, Any]) -> Tensor:
    """bool, which of these places are visible. The indices may be of any shapes that broadcast."""
    q_idx, kv_idx = places
    ahead = kv_idx - q_idx
    near = torch.ones_like(ahead, dtype=torch.bool)
    if (left := options.get("window_left", -1)) >= 0:
        near &= ahead >= -left
    if (right := options.get("window_right", -1)) >= 0:
        near &= ahead <= right
    near |= kv_idx < options.get("sink_tokens", 0)
    return near & (ahead <= 0) if options["is_causal"] else near


def options_of_mask(mask: Tensor) -> dict[str, Any] | None:
    """The options that are equivalent to a bool mask `[B, H, Lq, Lk]`; None if there are none."""
    rows, keys = mask.shape[2:]
    if mask.numel() == 0:
        return None
    places = some_places(rows, keys)
    q_idx, kv_idx = (each.to(mask.device) for each in places)
    options = fit(places, mask[0, 0, q_idx, kv_idx].cpu())
    if options is None:
        return None
    row, key = (torch.arange(count, dtype=torch.int32, device=mask.device) for count in (rows, keys))
    for some in row.split(_ROWS_AT_A_TIME):
        expected = visible(Places(some[:, None], key), options)
        if not bool((mask[:, :, some] == expected).all()):
            return None
    return options
