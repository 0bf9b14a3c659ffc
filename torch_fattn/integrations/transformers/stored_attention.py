"""Attention over a `PagedCache`: stores the new tokens of a layer, and reads its blocks in place."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from ...operators.differentiable import needs_gradient
from ...operators.head_padding import pad_heads, without_padding
from .call import Call
from .packing import restarts_of
from .paged_cache import Stored
from .unsupported import (
    MeaningRefusedError,
    refusal_of_operator,
    refuse_keywords,
    refuse_meaning,
    refuse_training,
)
from .visibility import read

_USE_DYNAMIC = "use DynamicCache for this model"


def attend_stored(call: Call, attention_mask: Tensor | None) -> Tensor:
    """Attention of the newest rows over keys and values that are `Stored`; out is `[B, n, Hq, Dv]`, 0 for
    padding."""
    module, key, value = call.module, cast(Stored, call.key), cast(Stored, call.value)
    if needs_gradient(call.query, key.arrived, value.arrived, call.s_aux):
        refuse_training(module, "a PagedCache has no backward")
    if call.position_bias is not None:
        refuse_meaning(module, "a position bias over a PagedCache is not implemented", _USE_DYNAMIC)
    refuse_keywords(module, call.keywords, separates=attention_mask is not None and attention_mask.ndim == 4)
    causal = getattr(module, "is_causal", True) if call.is_causal is None else call.is_causal
    if call.rows > 1 and not causal:
        refuse_meaning(module, "rows that are not causal cannot use a PagedCache", _USE_DYNAMIC)
    real = None
    if attention_mask is not None:
        mask = read(attention_mask, call.rows, call.keys)
        if mask is None or not mask.is_causal or mask.packed is not None:
            refuse_meaning(
                module, "a PagedCache stores no padding, to which a 4D mask could apply", _USE_DYNAMIC
            )
        call, real = replace(call, mask=mask), mask.real_tokens
    if real is None and restarts_of(call.keywords.get("position_ids"), call.query, call.keys) is not None:
        refuse_meaning(
            module, "positions restart, and a row of a PagedCache is one sequence", "pass use_cache=False"
        )
    batch, rows = call.query.shape[0], call.rows
    query, new_key, new_value, scale = pad_heads(call.query, key.arrived, value.arrived, call.scaling)
    new = [operand.transpose(1, 2).flatten(0, 1) for operand in (new_key, new_value)]
    options = call.options | {"scale": scale, "window_left": call.window_left}
    layer = key.layer
    try:
        cache = layer.group.allocate(key.arrived, value.arrived)
        real = None if real is None else real[:, 0, 0]
        has_window = 0 <= call.window_left < call.keys
        step, kept = layer.group.step(layer.index, batch, rows, real, has_window)
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
    layer.finish(call.keys)
    return without_padding(out, value.shape[-1])
