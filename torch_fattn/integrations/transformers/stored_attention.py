"""Attention over a `PagedCache`: stores the new tokens of a layer, and reads its blocks in place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...operators.differentiable import needs_gradient
from ...operators.head_padding import pad_heads, without_padding
from .masks import hides_nothing
from .paged_cache import Stored
from .patterns import is_packed, is_pattern, read_pattern
from .positions import restarts_of
from .refusals import (
    MeaningRefusedError,
    refusal_of_operator,
    refuse_keywords,
    refuse_meaning,
    refuse_training,
)

_USE_DYNAMIC = "use DynamicCache for this model"


def attend_stored(
    module: nn.Module,
    query: Tensor,
    key: Stored,
    value: Stored,
    mask: Tensor | None,
    *,
    scaling: float | None,
    sliding_window: int | None,
    softcap: float | None,
    s_aux: Tensor | None,
    is_causal: bool | None,
    position_bias: Tensor | None,
    dropout: float,
    **kwargs: Any,
) -> Tensor:
    """Attention of query `[B, Hq, n, D]`, the newest rows; out is `[B, n, Hq, Dv]`, 0 for padding."""
    if needs_gradient(query, key.arrived, value.arrived, s_aux):
        refuse_training(module, "a PagedCache has no backward")
    if position_bias is not None:
        refuse_meaning(module, "a position bias over a PagedCache is not implemented", _USE_DYNAMIC)
    refuse_keywords(module, mask, kwargs)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if query.shape[2] > 1 and not causal:
        refuse_meaning(module, "rows that are not causal cannot use a PagedCache", _USE_DYNAMIC)
    window, real = _window_and_padding(module, mask, query.shape[2], key.shape[2], sliding_window)
    if real is None and restarts_of(kwargs.get("position_ids"), query, key.shape[2]) is not None:
        refuse_meaning(
            module, "positions restart, and a row of a PagedCache is one sequence", "pass use_cache=False"
        )
    batch, _heads, rows, _dim = query.shape
    value_dim = value.shape[-1]
    query, new_key, new_value, scale = pad_heads(query, key.arrived, value.arrived, scaling)
    new = [operand.transpose(1, 2).flatten(0, 1) for operand in (new_key, new_value)]
    options: dict[str, Any] = {
        "scale": scale,
        "softcap": softcap or 0.0,
        "sinks": s_aux,
        "window_left": window,
    }
    layer = key.layer
    try:
        cache = layer.group.allocate(key.arrived, value.arrived)
        step, kept = layer.group.step(layer.index, batch, rows, real, 0 <= window < key.shape[2])
        if kept is not None:
            new = [operand[kept] for operand in new]
        cache.append(layer.index, step, new[0], new[1])
        if kept is None:
            out = cache.decode(layer.index, step, query, token_major_out=True, **options).transpose(1, 2)
        else:
            packed = query.transpose(1, 2).flatten(0, 1)
            out = cache.prefill(layer.index, step, packed[kept], is_causal=True, **options)
            out = torch.zeros_like(out[:1]).expand(batch * rows, -1, -1).index_copy(0, kept, out)
            out = out.unflatten(0, (batch, rows))
    except MeaningRefusedError:
        raise
    except (NotImplementedError, TypeError, ValueError) as refusal:
        raise refusal_of_operator(module, refusal) from refusal
    layer.finish(key.shape[2])
    return without_padding(out, value_dim)


def _window_and_padding(
    module: nn.Module, mask: Tensor | None, rows: int, keys: int, sliding_window: int | None
) -> tuple[int, Tensor | None]:
    """The window, and bool `[B, keys]`: which tokens are real; None if all are."""
    window = -1 if sliding_window is None else sliding_window - 1
    if mask is None or (mask.ndim == 2 and hides_nothing(mask)):
        return window, None
    if mask.ndim == 2:
        return window, mask
    if is_pattern(mask) and not is_packed(mask):
        pattern = read_pattern(mask, rows, keys)
        if pattern is not None:
            return pattern.window_left, None if pattern.padding is None else pattern.padding[:, 0, 0] == 0
    refuse_meaning(module, "a PagedCache stores no padding, to which a 4D mask could apply", _USE_DYNAMIC)
