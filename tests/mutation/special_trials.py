"""Trials with numbers that must not spread: NaN and infinities in keys that are hidden from some rows and in
values that are hidden from all, and scores far below 0."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.helpers import problems
from torch_fattn.reference import quantise

from .trial import Trial, of_call, of_operands, of_problem, randn


def hidden_nan(
    op: str, dtype: torch.dtype, head_dim: int, value_dim: int, group: int = 2, kv_format: str = "float"
) -> Trial:
    """The values of keys 21, 40 and 67, in three steps of prefill and staged by three simdgroups, are NaN or
    infinite, and no row sees them; key 50 is NaN, and some rows do. An fp8 cache has NaN alone, and an int4
    cache in whole groups."""
    rows, length = (40, 70) if op == "prefill" else (3, 70)
    query = randn(dtype, 1, group, rows, head_dim)
    key, value = randn(dtype, 1, 1, length, head_dim), randn(dtype, 1, 1, length, value_dim)
    mask = torch.zeros(1, group, rows, length)
    mask[:, 1:, 0, 30:] = -1e4
    mask[..., [21, 40, 67]] = -torch.inf
    mask[:, 0, :, 50] = mask[:, 1:, 1, 50] = -torch.inf
    key[:, :, 50, ::3] = torch.nan
    value[:, :, 67, 2::3] = torch.nan
    value[:, :, 21, ::3] = torch.nan
    value[:, :, 40, 1::2] = torch.inf
    operands: dict[str, Any] = {"key": key, "value": value}
    if kv_format != "float":
        value[:, :, 40] = value[:, :, 40].abs().clamp(max=1)
        value[:, :, 40, :5] = torch.nan
        operands = {"kv_format": kv_format}
        for name, values in (("key", key), ("value", value)):
            stored, scales = quantise(values, kv_format, scales=kv_format == "int4")
            operands[name] = stored
            if scales is not None:
                operands[f"{name}_scales"] = scales
    name = "-".join([op, problems.SHORT[dtype], *([kv_format] if kv_format != "float" else []), "hidden-nan"])
    return of_operands(f"{name}-{head_dim}", op, query=query, attn_mask=mask, **operands)


def hidden_scales(op: str, dtype: torch.dtype, head_dim: int, value_dim: int, group: int) -> Trial:
    """The scales of keys that a mask hides from all rows are NaN."""
    return of_problem(
        f"{op}-hidden-scales-{head_dim}", op, dtype, 1, group, 1, 3, 75, head_dim, value_dim, seq_lens=(70,),
        mask=torch.bool, mask_broadcast=(True, True, True, False), kv_format="int8",
    )  # fmt: skip


def chains(name: str, op: str, **operands: Any) -> Trial:
    """All columns are 1, except the first of the query. Its product is so large that the 31 other products of
    its chain are lost when they are added to it one by one."""
    query = operands["query"].clone()
    query[..., 0] = 2.0**24

    def check(out: Tensor, lse: Tensor) -> None:
        lost = 2**24 + query.shape[-1] - 1 - lse.double()
        assert torch.all(lost == 31), f"{lost.unique().tolist()} products are lost"

    return of_call(name, op, operands | {"query": query, "scale": 1.0}, check)


def unlikely(op: str, dtype: torch.dtype, head_dim: int, value_dim: int) -> Trial:
    """Every key has a score far below 0, in some rows of 1,000 below the others."""
    query = randn(dtype, 1, 2, 3, head_dim)
    key, value = randn(dtype, 1, 1, 70, head_dim), randn(dtype, 1, 1, 70, value_dim)
    mask = torch.full((1, 2, 3, 70), -1000.0)
    mask[:, :, 1, :40] = -2000.0
    return of_operands(f"{op}-unlikely-{head_dim}", op, query=query, key=key, value=value, attn_mask=mask)


def huge_sinks(op: str, dtype: torch.dtype, head_dim: int, value_dim: int) -> Trial:
    """Sinks and a slope that score units do not hold, and infinite ones; some rows see no key."""
    largest = torch.finfo(torch.float32).max
    rows, length = (40, 37) if op == "prefill" else (3, 70)
    sinks = torch.tensor([0.5, -largest, largest, torch.inf, -torch.inf, -1.0])
    options: dict[str, Any] = {"is_causal": True} if op == "prefill" else {"seq_lens": lengths(0, 70)}
    return of_operands(
        f"{op}-huge-sinks-{head_dim}", op,
        query=randn(dtype, 2, 6, rows, head_dim),
        key=randn(dtype, 2, 2, length, head_dim), value=randn(dtype, 2, 2, length, value_dim),
        sinks=torch.stack((sinks, torch.zeros(6)), 1)[:, 0],
        alibi_slopes=torch.tensor([largest, 0.1, 0.1, 0.1, 0.1, 0.1]),
        **options,
    )  # fmt: skip


def lengths(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)
