"""Decomposes the trace of a `score_mod`: a soft cap, then biases; -inf hides keys."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from operator import mul, neg, pos, truediv
from typing import Any, NoReturn

import torch
from torch import Tensor

from .tracing import INDICES, Expression, Sum, evaluate, everywhere, is_linear, parts_of, symbols_of, trace

NAME = "torch_fattn.integrations.flex_attention.flex_attention"
_TOLERANCE = 1e-6
_OF_SLOPES: dict[str, Callable[..., Any]] = {
    "mul": mul,
    "div": truediv,
    "truediv": truediv,
    "neg": neg,
    "float": pos,
}
_NOT_A_CAP = "does not return softcap * tanh(score / softcap) + bias; compute it with torch's flex_attention"


def modified_by(score_mod: Callable[..., Tensor], device: torch.device) -> tuple[float, Sum]:
    """The soft cap, the biases with their factors, and the conditions for a visible key."""
    traced = trace(score_mod, ("score", *INDICES), device)
    if traced is None:
        _refuse("cannot be traced, as it branches or writes in place; compute it with torch's flex_attention")
    if torch.is_grad_enabled() and any(getattr(each, "requires_grad", False) for each in traced.reads):
        _refuse(
            "has tensors that require grad, which would get no gradient; pass trained slopes as alibi_slopes "
            "to torch_fattn.attention"
        )
    biases, conditions = parts_of(traced)
    scores = [part for part in biases if "score" in symbols_of(part)]
    if len(scores) != 1 or "score" in symbols_of(*(value for value, _ in conditions)):
        _refuse(_NOT_A_CAP)
    score, factor = scores[0], biases.pop(scores[0])
    if isinstance(score, str):
        if factor != 1.0:
            _refuse(f"multiplies the score by {factor:.4g}; pass scale=, multiplied by it, instead")
        return 0.0, (biases, conditions)
    is_tanh = score.name == "tanh" and not score.keywords
    inner, hidden = parts_of(score.arguments[0]) if is_tanh else ({}, [])
    is_cap = inner.keys() == {"score"} and not hidden and 0.0 < factor < inf
    if not is_cap or not abs(factor * inner["score"] - 1.0) <= _TOLERANCE:
        _refuse(_NOT_A_CAP)
    return float(factor), (biases, conditions)


def biases_of(
    biases: dict[Any, Any], options: dict[str, Any], shape: tuple[int, int, int, int], device: torch.device
) -> tuple[Tensor | None, Tensor | None]:
    """The slopes `[Hq]` or `[B, Hq]` of ALiBi, and the sum of the other biases, float32, broadcastable to
    `[B, Hq, Lq, Lk]`. Its values for keys that the options hide are arbitrary."""
    is_past = options["is_causal"] or options.get("window_right") == 0 and "sink_tokens" not in options
    slopes: dict[Any, Any] = {}
    others = dict(biases)
    if others.get("kv_idx", 0) == -others.get("q_idx", 0) != 0:
        slopes[1] = others.pop("kv_idx")
        del others["q_idx"]
    for bias in list(others):
        if (slope := _slope_of(bias, is_past)) is not None:
            slopes[slope] = slopes.get(slope, 0) + others.pop(bias)

    def summed(parts: dict[Any, Any], symbols: frozenset[str]) -> Tensor:
        def at(known: dict[str, Tensor]) -> Tensor:
            total = torch.zeros((), dtype=torch.float32, device=device)
            for part, factor in parts.items():
                total = total + (known[part] if isinstance(part, str) else evaluate(part, known)) * factor
            return total.float()

        return everywhere(at, symbols_of(*parts) | symbols, shape, device)

    of_heads = summed(slopes, frozenset("h"))[:, :, 0, 0] if slopes else None
    of_all = of_heads[0] if of_heads is not None and len(of_heads) == 1 else of_heads
    return of_all, summed(others, frozenset()) if any(others.values()) else None


def _slope_of(bias: Any, is_past: bool) -> Any:
    """The slope, if the bias is `slope * (kv_idx - q_idx)`; else None."""
    if is_linear(found := parts_of(bias)):
        q, k, number = (found[0].get(part, 0) for part in ("q_idx", "kv_idx", 1))
        return float(k) if k == -q != 0 and number == 0 else None
    if not isinstance(bias, Expression) or bias.keywords:
        return None
    name, (one, *others) = bias.name, bias.arguments
    if name == "abs" and is_past:
        slope = _slope_of(one, is_past)
        return -abs(slope) if isinstance(slope, float) else None
    if name == "mul" and not symbols_of(one) & {"q_idx", "kv_idx"}:
        one, others = others[0], [one]
    if name not in _OF_SLOPES or symbols_of(*others) & {"q_idx", "kv_idx"}:
        return None
    slope = _slope_of(one, is_past)
    return None if slope is None else Expression(_OF_SLOPES[name], (slope, *others))


def _refuse(what: str) -> NoReturn:
    raise NotImplementedError(f"{NAME}: score_mod {what}")
