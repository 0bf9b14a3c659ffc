"""The options that are equivalent to a `score_mod`, found by evaluating it.

A score_mod may do what the operators do to a score, in their order: a soft cap, then ALiBi; and hide keys by
a window or behind a prefix. It is evaluated with several scores at some places: all keys of some rows, all
rows of some keys, and random places of every head. Each value must be what the options give. With
FATTN_CHECK=1 in the environment every place is evaluated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_mask

from ...runtime.signatures import is_checked
from .positions import HOST, Places, fit, some_places, visible

ScoreMod = Callable[..., Tensor]
NAME = "torch_fattn.integrations.flex_attention.flex_attention"
_PLACES_PER_HEAD = 64
_HUGE = 1e9  # a score of which a soft cap leaves the cap
_SCORES = (0.0, _HUGE, _HUGE / 2, 0.5, -3.0, 20.0, -100.0)
_TOLERANCE = 1e-4
_ALL_AT_A_TIME = 2**20
_NOT_A_CAP = "does not return softcap * tanh(score / softcap) + bias; compute it with torch's flex_attention"


class _Points(NamedTuple):
    """Places of all heads: int64 `[n]` on the host."""

    b: Tensor
    h: Tensor
    q_idx: Tensor
    kv_idx: Tensor

    def where(self, chosen: Tensor) -> _Points:
        return _Points(*(each[chosen] for each in self))

    @property
    def ahead(self) -> Tensor:
        return self.kv_idx - self.q_idx


def options_of(
    score_mod: ScoreMod,
    shape: tuple[int, int, int, int],
    sees: Callable[..., Tensor] | None,
    device: torch.device,
) -> dict[str, Any]:
    """The options of the operators for a score_mod of `[B, H, Lq, Lk]`. `sees(b, h, q_idx, kv_idx)`: what a
    block mask leaves visible, if there is one; the score_mod does not matter elsewhere."""
    if min(shape) == 0:
        return {}
    points = _some_points(shape)
    values = _evaluate(score_mod, points, device)
    hidden = values[0].isneginf()
    options: dict[str, Any] = {}
    if sees is not None:
        seen = sees(*(each.to(device) for each in points)).cpu()
        if bool((hidden & seen).any()):
            _refuse("hides keys that block_mask shows; hide them in its mask_mod, with and_masks")
    else:
        seen = ~hidden
        if bool(hidden.any()):
            found = fit(Places(points.q_idx, points.kv_idx), seen)
            if found is None:
                _refuse(
                    "hides keys that no window and no prefix hides; pass "
                    "block_mask=create_block_mask(mask_mod, ...)"
                )
            options |= found
    if bool(seen.any()):
        of_seen, values = points.where(seen), values[:, seen]
        if not bool(values[0].isfinite().all()):
            _refuse(
                "makes a score of 0 infinite or NaN; return -inf for hidden keys and finite scores for others"
            )
        options |= _cap_of(values)
        slopes = _slopes_of(shape, of_seen, values[0])
        if slopes is not None:
            options["alibi_slopes"] = slopes
        _check(of_seen, values, options)
    if is_checked():
        _check_all(score_mod, shape, sees, options, device)
    if (slopes := options.get("alibi_slopes")) is not None:
        same = bool((slopes == slopes[0]).all())
        options["alibi_slopes"] = (slopes[0] if same else slopes).to(device)
    return options


def _some_points(shape: tuple[int, int, int, int]) -> _Points:
    batch, heads, rows, keys = shape
    generator = torch.Generator(HOST).manual_seed(0)
    lines = some_places(rows, keys)
    every = (torch.arange(n, device=HOST) for n in (batch, heads, _PLACES_PER_HEAD))
    b_of_heads, h_of_heads, _ = torch.cartesian_prod(*every).T

    def drawn(most: int, like: Tensor) -> Tensor:
        return torch.randint(most, like.shape, generator=generator, device=HOST)

    b, h = drawn(batch, lines.q_idx), drawn(heads, lines.q_idx)
    q_idx, kv_idx = drawn(rows, b_of_heads), drawn(keys, b_of_heads)
    parts = (b, b_of_heads), (h, h_of_heads), (lines.q_idx, q_idx), (lines.kv_idx, kv_idx)
    return _Points(*map(torch.cat, parts))


def _evaluate(score_mod: ScoreMod, points: _Points, device: torch.device) -> Tensor:
    """The values `[scores, n]` of _SCORES at these points, float32 on the host. torch's public way to
    evaluate a function of four indices is create_mask, which returns what the function returns."""
    scores = torch.tensor(_SCORES, dtype=torch.float32, device=device)
    b, h, q_idx, kv_idx = (each.to(device) for each in points)
    values: Tensor = create_mask(
        lambda s, n, _0, _1: score_mod(scores[s], b[n], h[n], q_idx[n], kv_idx[n]),
        len(_SCORES),
        len(b),
        1,
        1,
        device=device.type,
    )
    if values.requires_grad:
        _refuse(
            "has tensors that require grad, which would get no gradient; pass trained slopes as alibi_slopes "
            "to torch_fattn.attention"
        )
    return values[:, :, 0, 0].float().cpu()


def _cap_of(values: Tensor) -> dict[str, Any]:
    at = values[0].abs().argmin()  # where a bias costs the fewest digits
    most, half = (float(values[n, at] - values[0, at]) for n in (1, 2))
    if abs(most / _HUGE - 1) < _TOLERANCE:
        return {}
    if abs(half - most / 2) < _TOLERANCE * abs(most):
        _refuse(f"multiplies the score by {most / _HUGE:.4g}; pass scale=, multiplied by it, instead")
    if not 0 < most < _HUGE / 100:
        _refuse(_NOT_A_CAP)
    return {"softcap": most}


def _slopes_of(shape: tuple[int, int, int, int], points: _Points, base: Tensor) -> Tensor | None:
    """`[B, H]` slopes, from the places of each head that are farthest from their rows; None if there is no
    bias."""
    if not bool(base.any()):
        return None
    batch, heads = shape[:2]
    head, distance = points.b * heads + points.h, points.ahead.abs()
    farthest = distance.new_zeros(batch * heads).scatter_reduce_(0, head, distance, "amax")
    at = ((distance == farthest[head]) & (distance > 0)).nonzero()[:, 0]
    slopes = base.new_zeros(batch * heads)
    slopes[head[at]] = base[at] / points.ahead[at]
    return slopes.view(batch, heads)


def _expected(score: float, options: dict[str, Any], points: _Points) -> Tensor:
    value = torch.full(points.b.shape, score, dtype=torch.float32, device=HOST)
    if cap := options.get("softcap", 0.0):
        value = cap * torch.tanh(value / cap)
    slopes = options.get("alibi_slopes")
    return value if slopes is None else value + slopes[points.b, points.h] * points.ahead


def _check(points: _Points, values: Tensor, options: dict[str, Any]) -> None:
    biases = _expected(0.0, options, points)
    if not bool(_close(values[0], biases).all()):
        _refuse(
            "adds a bias that is not alibi_slopes[h] * (kv_idx - q_idx); pass such a bias as attn_mask to "
            "torch_fattn.prefill"
        )
    for score, found in zip(_SCORES[3:], values[3:], strict=True):
        if not bool(_close(found, _expected(score, options, points)).all()):
            _refuse(_NOT_A_CAP)


def _close(found: Tensor, expected: Tensor) -> Tensor:
    return (found - expected).abs() <= _TOLERANCE * (1 + expected.abs())


def _check_all(
    score_mod: ScoreMod,
    shape: tuple[int, int, int, int],
    sees: Callable[..., Tensor] | None,
    options: dict[str, Any],
    device: torch.device,
) -> None:
    batch, heads, rows, keys = shape
    for some in torch.arange(batch * heads * rows * keys, device=HOST).split(_ALL_AT_A_TIME):
        head = some // (rows * keys)
        points = _Points(head // heads, head % heads, some // keys % rows, some % keys)
        values = _evaluate(score_mod, points, device)
        seen = torch.ones_like(some, dtype=torch.bool)
        if sees is not None:
            seen = sees(*(each.to(device) for each in points)).cpu()
        elif "is_causal" in options:
            seen = visible(Places(points.q_idx, points.kv_idx), options)
        right = torch.where(seen, _expected(0.0, options, points), -torch.inf)
        same = _close(values[0], right) | (values[0] == right)
        if not bool((same | ~seen if sees is not None else same).all()):
            raise ValueError(
                f"{NAME}: score_mod is not {' and '.join(sorted(options)) or 'the identity'} everywhere; "
                "pass what it hides as block_mask, and what it adds as attn_mask to torch_fattn.prefill"
            )


def _refuse(what: str) -> NoReturn:
    raise NotImplementedError(f"{NAME}: score_mod {what}")
