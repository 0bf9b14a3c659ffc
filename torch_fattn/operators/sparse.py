"""Decode of rows that each see selected positions of the cache, with `paged_decode`: every key is a block of
one token, a row's selection is a block table, and a row is a sequence.
"""

from __future__ import annotations

from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..runtime.signatures import public
from ..runtime.tensor_checks import check_integers, check_shape
from .attention import paged_decode
from .return_lse import with_lse

__all__ = ["is_one_cache", "sparse_decode"]

NAME = "torch_fattn.sparse_decode"
MOST_BLOCKS = 2**31 - 1  # block numbers of an int32 table


@with_lse
@public(NAME, names={"key_cache": "key", "value_cache": "value"})
def sparse_decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    indices: Tensor,
    seq_lens: Tensor | None = None,
    *,
    block_tables: Tensor | None = None,
    is_causal: bool = True,
    softcap: float = 0.0,
    scale: float | None = None,
    sinks: Tensor | None = None,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
    kv_format: str = "auto",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of the newest rows over keys that an indexer selected per row: DeepSeek's sparse attention.
    Only these keys are read, once for all query heads that share them.

    Args:
        query: `[B, Hq, Lq, D]`, any Lq. Row i is the token at position `seq_len - Lq + i`.
        key, value: a cache of `decode`, `[B, Hkv, capacity, D]` and `[.., Dv]`; with block_tables a pool of
            `paged_decode`, `[num_blocks, block_size, Hkv, D]`. It is never copied, so the strides of key and
            value must be proportional, as in the cache classes and in a latent cache whose value is a view of
            its key.
        indices: int32 or int64, `[B, Lq, K]` for all heads or `[B, Hkv, Lq, K]` for each key-value head: the
            positions of a row's keys in their sequence, in any order, without repetitions. Positions below 0,
            after the row's own, or past the end of the sequence are ignored.
        seq_lens: int32 `[B]`, as in `decode`; block_tables needs it.
        block_tables: int32 `[B, max_blocks]`, as in `paged_decode`.
        is_causal: if False, rows also see selected keys after their own.
        softcap, scale, sinks, key_scales, value_scales, kv_format: as in `decode`. `sinks` needs indices for
            all heads.
        return_lse: also return lse `[B, Hq, Lq]`, float32.

    Returns:
        out `[B, Hq, Lq, Dv]`. A row without keys is 0, with lse -inf.

    Many rows that select most keys are faster in `prefill` with a mask, which reads a key once per tile of
    rows. There is no backward.

    Raises:
        ValueError: shapes, devices, strides.
        TypeError: dtypes.
        NotImplementedError: sinks with indices for each head.

    The selection is that of DeepSeek-V3.2 (DeepSeek-AI 2025).
    """
    stored = {"key": key, "value": value, "key_scales": key_scales, "value_scales": value_scales}
    given = {what: each for what, each in stored.items() if each is not None}
    _check(query, given, indices, seq_lens, block_tables)
    batch, heads, rows, _dim = query.shape
    per_head = indices.dim() == 4
    if per_head and sinks is not None:
        raise NotImplementedError(
            f"{NAME}: sinks with indices for each key-value head are not implemented; call it for each "
            "key-value head, with indices [B, Lq, K]"
        )
    if block_tables is None:
        given = {what: each.transpose(1, 2) for what, each in given.items()}
    pools = {what: _Pool.of(each, per_head) for what, each in given.items()}
    pool = pools["key"]
    for what, each in pools.items():
        if each.steps != pool.steps:
            raise ValueError(
                f"{NAME}: the strides of {what} and key are not in one proportion; allocate both in the same "
                "layout, as StaticKVCache and PagedKVCache do"
            )
        if each.view.shape[0] > MOST_BLOCKS:
            raise ValueError(
                f"{NAME}: {what} spans {each.view.shape[0]} times the greatest common divisor of its "
                f"strides, {each.view.stride(0)}, and an int32 table numbers {MOST_BLOCKS} blocks; use a "
                "smaller cache, or strides with a larger common divisor"
            )
    block_size = 0 if block_tables is None else given["key"].shape[1]
    capacity = given["key"].shape[1] if block_tables is None else block_tables.shape[1] * block_size
    selected = indices.long() if per_head else indices.long()[:, None]
    selected, seen = _seen(selected, seq_lens, capacity, rows, is_causal)
    if block_tables is None:
        first = torch.arange(batch, device=query.device)[:, None, None, None]
    else:
        entry = (
            block_tables.long().gather(1, (selected // max(block_size, 1)).flatten(1))
            if capacity
            else selected
        )
        first, selected = entry.view_as(selected), selected % max(block_size, 1)
        seen = seen & (first >= 0) & (first < given["key"].shape[0])
    head = torch.arange(selected.shape[1], device=query.device)[:, None, None]
    at = first * pool.steps[0] + selected * pool.steps[1] + head * pool.steps[2]
    queries = (
        query.unflatten(1, (pool.kv_heads, heads // max(pool.kv_heads, 1))) if per_head else query[:, None]
    )
    queries = queries.transpose(2, 3).flatten(0, 2)[:, :, None]
    views: dict[str, Any] = {what: each.view for what, each in pools.items()}
    out, lse = paged_decode(
        queries,
        views.pop("key"),
        views.pop("value"),
        _to_the_front(at, seen),
        seen.sum(-1, dtype=torch.int32).flatten(),
        softcap=softcap,
        scale=scale,
        sinks=sinks,
        kv_format=kv_format,
        return_lse=True,
        **views,
    )
    out, lse = (each[:, :, 0].unflatten(0, (batch, selected.shape[1], rows)) for each in (out, lse))
    out, lse = (each.transpose(2, 3).flatten(1, 2) for each in (out, lse))
    return (out, lse) if return_lse else out


def is_one_cache(key: Tensor, value: Tensor, per_head: bool) -> bool:
    """Whether key and value `[B, Hkv, L, ..]` have proportional strides."""
    one, other = (_Pool.of(each.transpose(1, 2), per_head) for each in (key, value))
    return one.steps == other.steps


def _seen(
    selected: Tensor, seq_lens: Tensor | None, capacity: int, rows: int, is_causal: bool
) -> tuple[Tensor, Tensor]:
    """The positions `[B, H, Lq, K]`, 0 where hidden, and whether each is visible."""
    later = torch.arange(rows - 1, -1, -1, device=selected.device)[:, None] if is_causal else 0
    filled = capacity if seq_lens is None else seq_lens.clamp(max=capacity)[:, None, None, None]
    seen = (selected >= 0) & (selected < filled - later)
    return selected.where(seen, 0), seen


def _to_the_front(at: Tensor, seen: Tensor) -> Tensor:
    """int32 `[B * H * Lq, K]`: the visible entries, in order, then the others."""
    count = at.shape[-1]
    place = torch.where(seen, seen.cumsum(-1, dtype=torch.int32) - 1, count).long()
    tables = torch.full((*at.shape[:-1], count + 1), -1, dtype=torch.int32, device=at.device)
    return tables.scatter_(-1, place, at.int())[..., :count].flatten(0, 2)


def _common_divisor(a: int, b: int) -> int:
    """The greatest common divisor; math.gcd does not take symbolic strides."""
    while b:
        a, b = b, a % b
    return a


class _Pool(NamedTuple):
    """A cache as blocks of one token. A block begins at every multiple of the strides' greatest common
    divisor, so that every token is a block."""

    view: Tensor  # [blocks, 1, Hkv, ..]; with a selection for each head [blocks, 1, 1, ..]
    steps: tuple[int, int, int]  # strides of the first dimension, slot and head, in blocks
    kv_heads: int

    @classmethod
    def of(cls, stored: Tensor, per_head: bool) -> _Pool:
        """stored: `[sequences or blocks, slots, Hkv, ..]`."""
        sizes, strides = stored.shape[:3], stored.stride()
        counted = [stride if size > 1 else 0 for size, stride in zip(sizes, strides, strict=False)]
        if not per_head:
            counted[2] = 0
        unit = reduce(_common_divisor, counted) or 1
        first, slot, head = (stride // unit for stride in counted)
        last = sum((size - 1) * stride for size, stride in zip(sizes, counted, strict=True)) // unit
        view = stored.as_strided(
            (0 if 0 in sizes else last + 1, 1, 1 if per_head else sizes[2], *stored.shape[3:]),
            (unit, unit, *strides[2:]),
        )
        return cls(view, (first, slot, head), sizes[2])


def _check(
    query: Tensor,
    stored: dict[str, Tensor],
    indices: Tensor,
    seq_lens: Tensor | None,
    block_tables: Tensor | None,
) -> None:
    """Checks arguments that errors of `paged_decode` would not name."""
    check_shape(NAME, "query", query, ("B", "Hq", "Lq", "D"))
    batch, heads, rows, _dim = query.shape
    cache = (batch, "Hkv", "capacity") if block_tables is None else ("num_blocks", "block_size", "Hkv")
    check_shape(NAME, "key", stored["key"], (*cache, "D"))
    check_shape(NAME, "value", stored["value"], (*cache, "Dv"))
    if seq_lens is not None:
        check_integers(NAME, "seq_lens", seq_lens, (batch,), query)
    if block_tables is not None:
        if seq_lens is None:
            raise ValueError(f"{NAME}: block_tables came without seq_lens; pass the length of each sequence")
        check_integers(NAME, "block_tables", block_tables, (batch, "max_blocks"), query)
    kv_heads = stored["key"].shape[1 if block_tables is None else 2]
    if heads % max(kv_heads, 1):
        raise ValueError(
            f"{NAME}: {heads} query heads cannot share {kv_heads} key-value heads; pass a multiple of "
            f"{kv_heads}"
        )
    for what, each in stored.items():
        if each.shape[:3] != stored["key"].shape[:3]:
            raise ValueError(
                f"{NAME}: {what} of shape {list(each.shape)} and key of {list(stored['key'].shape)} are not "
                "one cache; the first three sizes must be equal"
            )
    shapes = [[batch, rows], [batch, kv_heads, rows]]
    if indices.dim() not in (3, 4) or list(indices.shape[:-1]) != shapes[indices.dim() - 3]:
        raise ValueError(
            f"{NAME}: indices of shape {list(indices.shape)} do not fit; pass {[*shapes[0], 'K']}, or "
            f"{[*shapes[1], 'K']} to select for each key-value head"
        )
    check_integers(NAME, "indices", indices, indices.shape, query, or_int64=True)
