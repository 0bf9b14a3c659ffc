"""The accuracy rule of gradients: at most twice as far from float64 as those of an attention layer that is
written with whole matrices in the dtype of its operands, plus an epsilon.

The epsilon has three terms, because that layer can be exact by chance, in one row or with one key:

- half a unit in the last place of the largest element, by which any result of the dtype is rounded;
- 2^-22 of the sum of the magnitudes of the terms, since each is rounded to float32 about four times: as an
  exponential, by the sum of the weights, as a product, in a sum. Terms can cancel, as dP - delta does in a
  row with one dominant key. A weight counts 1 + t times, where t is the sum of the magnitudes of its score's
  terms, since each of them is rounded before the exponential: the capped product, ALiBi, the mask, and twice
  the root of the product's sum of squares, about the size of its partial sums. Twice, because the passes over
  rows and over keys add products up in different orders: even the weight of a row's only key is not quite 1.
  If the mean t of the row is larger, it counts instead, as the sum of the weights has the errors of them all;
- the smallest normal float32 of the magnitudes without their weights: a GPU flushes smaller weights to 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tests.helpers.backward_problems import NAMES, BackwardCase, pack, pack_rows
from torch_fattn.operators.backward import Gradients

HALF_ULP = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
ROUNDINGS = 2.0**-22
SMALLEST_WEIGHT = 2.0**-126


@dataclass
class Layer:
    """Gradients of the eager layer, padded to whole sequences, and the magnitudes of their terms."""

    gradients: dict[str, Tensor]
    magnitudes: dict[str, float]
    unweighted: float  # of all rows


def eager_layer(case: BackwardCase, dtype: torch.dtype) -> Layer:
    """Weights and results are rounded to `dtype`, and so are their gradients. Scores, which are as large as
    the problem likes, are in float32 at least: rounding them would permit nearly any error."""
    p, clean = case.problem.forward, case.forward.clean
    wide = torch.promote_types(dtype, torch.float32)
    leaves = {name: clean[name].detach().to(dtype).requires_grad_() for name in ("query", "key", "value")}
    leaves |= {
        name: clean[name].detach().to(wide).requires_grad_()
        for name in ("sinks", "alibi_slopes")
        if name in clean
    }
    group = p.q_heads // p.kv_heads
    query = leaves["query"]
    key, value = (leaves[name].repeat_interleave(group, dim=1) for name in ("key", "value"))
    scale = p.head_dim**-0.5 if p.scale is None else p.scale
    products = query.to(wide) @ key.to(wide).mT * scale
    scores = p.softcap * torch.tanh(products / p.softcap) if p.softcap > 0 else products
    sizes = scores.detach().abs()
    rows = torch.tensor(p.first_positions)[:, None] + torch.arange(p.q_len)
    distances = torch.arange(p.kv_len) - rows[:, None, :, None]
    if "alibi_slopes" in leaves:
        bias = leaves["alibi_slopes"][..., None, None] * distances
        scores, sizes = scores + bias, sizes + bias.detach().abs()
    visible, mask = case.forward.visible, clean.get("attn_mask")
    if mask is not None and mask.dtype != torch.bool:
        bias = mask.to(wide).masked_fill(mask == -torch.inf, 0.0)
        scores, sizes = scores + bias, sizes + bias.abs()
    sinks = leaves.get("sinks", torch.full((p.q_heads,), -torch.inf, dtype=wide))
    sinks = sinks[:, None, None].expand(*scores.shape[:3], 1)
    logits = torch.cat([scores.masked_fill(~visible, -torch.inf), sinks], dim=-1)
    nothing = (logits == -torch.inf).all(dim=-1, keepdim=True)
    logits = logits.masked_fill(nothing, 0.0)
    weights = logits.softmax(-1).masked_fill(nothing, 0.0)
    of_keys = weights[..., :-1].to(dtype)
    loss = ((of_keys @ value) * case.grad_out.to(dtype)).sum()
    if case.grad_lse is not None:
        lse = logits.logsumexp(-1).masked_fill(nothing[..., 0], 0.0)
        loss = loss + (lse * case.grad_lse.to(wide)).sum()
    gradients = torch.autograd.grad(loss, [*leaves.values()])

    with torch.no_grad():
        # 1 - tanh^2 would be 0 in float32 where the cap is reached.
        slope = (products.double() / p.softcap).cosh().pow(-2).to(wide) if p.softcap > 0 else 1.0
        partial_sums = 2 * (query.to(wide) ** 2 @ key.to(wide).mT ** 2).sqrt()
        sink_sizes = sinks.masked_fill(sinks == -torch.inf, 0.0).abs()
        sizes = torch.cat([sizes + partial_sums * scale * slope, sink_sizes], dim=-1)
        rounded = weights * (1 + torch.maximum(sizes, (weights * sizes).sum(-1, keepdim=True)))
        of_weights = case.grad_out.to(wide).abs() @ value.to(wide).abs().mT
        delta = (weights[..., :-1] * of_weights).sum(-1, keepdim=True)
        if case.grad_lse is not None:
            delta = delta + case.grad_lse.to(wide).abs()[..., None]
        of_scores = rounded[..., :-1] * (of_weights + delta)
        of_products = of_scores * slope * scale
        own = query.to(wide).abs(), key.to(wide).abs()
        terms = {
            "query": of_products @ own[1],
            "key": _sum_of_group(of_products.mT @ own[0], group),
            "value": _sum_of_group(rounded[..., :-1].mT @ case.grad_out.to(wide).abs(), group),
            "sinks": (rounded[..., -1:] * delta).sum((0, 2, 3)),
            "alibi_slopes": (of_scores * distances.abs()).sum((2, 3)),
        }
        if "alibi_slopes" in leaves and leaves["alibi_slopes"].dim() == 1:
            terms["alibi_slopes"] = terms["alibi_slopes"].sum(0)
    magnitudes = {name: each.max().item() if each.numel() else 0.0 for name, each in terms.items()}
    return Layer(dict(zip(leaves, gradients, strict=True)), magnitudes, delta.sum().item())


def limits_of(case: BackwardCase) -> dict[str, float]:
    """The largest error that each gradient may have."""
    p = case.problem.forward
    layer = eager_layer(case, p.dtype)
    limits = {}
    for name, exact in zip(NAMES, case.exact, strict=True):
        if exact is None:
            continue
        own_dtype = case.forward.clean[name].dtype
        error = (_as_returned(case, name, layer.gradients[name]).double() - exact).abs()
        rounding = HALF_ULP[own_dtype] * max(_largest(exact), torch.finfo(own_dtype).tiny)
        epsilon = ROUNDINGS * layer.magnitudes[name] + SMALLEST_WEIGHT * layer.unweighted
        limits[name] = 2 * _largest(error) + rounding + epsilon
    return limits


def errors_of(case: BackwardCase, gradients: Gradients) -> dict[str, float]:
    """The largest error of each gradient (CPU tensors); NaN is an error."""
    errors = {}
    for name, exact, found in zip(NAMES, case.exact, gradients, strict=True):
        if exact is None:
            assert found is None or found.shape == (0,), f"there are no {name}"
            continue
        assert found is not None and found.shape == exact.shape and found.is_contiguous(), name
        assert found.dtype == case.forward.clean[name].dtype, name
        assert not found.isnan().any(), f"NaN in the gradient of {name}"
        most = torch.finfo(found.dtype).max  # what is beyond becomes infinite
        errors[name] = _largest(found.double().clamp(-most, most) - exact.clamp(-most, most))
    return errors


def assert_gradients_close(case: BackwardCase, gradients: Gradients) -> None:
    limits = limits_of(case)
    for name, error in errors_of(case, gradients).items():
        assert error <= limits[name], f"error {error:.3g} of the gradient of {name} > {limits[name]:.3g}"
    p = case.problem.forward
    visible = case.forward.visible
    sees = pack_rows(p, visible.any(-1).double())
    unseen_rows = sees == 0 if p.q_lens is None else sees.T == 0
    assert (gradients[0][unseen_rows] == 0).all(), "a row that sees no key has gradient 0"
    for name, gradient in zip(NAMES[1:3], gradients[1:3], strict=True):
        seen = visible.reshape(p.batch, p.kv_heads, -1, p.kv_len).any(2)[..., None].double()
        unseen = (seen if p.q_lens is None else pack(seen, p.lengths, p.spare_rows))[..., 0] == 0
        assert (gradient[unseen] == 0).all(), f"the gradient of a {name} that no row sees is 0"


def _as_returned(case: BackwardCase, name: str, gradient: Tensor) -> Tensor:
    p = case.problem.forward
    if name == "query":
        return pack_rows(p, gradient)
    packs = name in ("key", "value") and p.q_lens is not None
    return pack(gradient, p.lengths, p.spare_rows) if packs else gradient


def _sum_of_group(terms: Tensor, group: int) -> Tensor:
    return terms.unflatten(1, (-1, group)).sum(2)


def _largest(values: Tensor) -> float:
    return values.abs().max().item() if values.numel() else 0.0
