"""Checks of the arguments that only flash_attn_with_kvcache takes: slots, lengths, new keys."""

from __future__ import annotations

import torch
from torch import Tensor

from ..runtime.signatures import check_writable
from ..runtime.tensor_checks import check_device, check_integers, check_shape
from .arguments import (
    ROWS,
    check_between,
    check_operands,
    check_sizes,
    integer,
)

_ANGLES = ("positions", "rotary_dim / 2")


def table_of(
    op: str, q: Tensor, k_cache: Tensor, cache_batch_idx: Tensor | None, block_table: Tensor | None
) -> Tensor:
    """The block table, int32 `[B, blocks]`. Every sequence of a dense cache is one block."""
    batch = q.shape[0]
    if block_table is not None:
        check_integers(op, "block_table", block_table, (batch, "blocks"), q, "q")
        if cache_batch_idx is not None:
            raise ValueError(
                f"{op}: block_table already says where the keys of a sequence are; leave out cache_batch_idx"
            )
        return block_table
    if cache_batch_idx is not None:
        check_integers(op, "cache_batch_idx", cache_batch_idx, (batch,), q, "q", or_int64=True)
        return cache_batch_idx.clamp(-1, k_cache.shape[0]).to(torch.int32)[:, None]
    if k_cache.shape[0] < batch:
        raise ValueError(
            f"{op}: q has batch size {batch} and k_cache {k_cache.shape[0]}; pass a cache of as "
            "many sequences, or cache_batch_idx"
        )
    return torch.arange(batch, device=q.device, dtype=torch.int32)[:, None]


def check_new_keys(
    op: str, q: Tensor, k: Tensor | None, v: Tensor | None, k_cache: Tensor, v_cache: Tensor,
    cos: Tensor | None, sin: Tensor | None, capacity: int,
) -> None:  # fmt: skip
    if (k is None) != (v is None):
        raise ValueError(f"{op}: one of k and v is None; pass both or neither")
    if (cos is None) != (sin is None) or (cos is not None and k is None):
        raise ValueError(f"{op}: rotary_cos needs rotary_sin, and both need k and v to rotate; pass all four")
    if k is None or v is None:
        return
    check_operands(op, q, k=(k, ROWS), v=(v, ROWS))
    check_sizes(op, "batch size", q=q.shape[0], k=k.shape[0], v=v.shape[0])
    check_sizes(op, "length", k=k.shape[1], v=v.shape[1])
    check_sizes(op, "head count", k=k.shape[2], v=v.shape[2], k_cache=k_cache.shape[2])
    check_sizes(op, "head size", k=k.shape[3], k_cache=k_cache.shape[3])
    check_sizes(op, "head size", v=v.shape[3], v_cache=v_cache.shape[3])
    check_written(op, k_cache=k_cache, v_cache=v_cache)
    if _begin_together(k_cache, v_cache) and (cos is not None or not _begin_together(k, v)):
        raise ValueError(
            f"{op}: k_cache and v_cache begin at the same address, to which both k and v would be "
            "written; pass separate memory for each"
        )
    if cos is None or sin is None:
        return
    for what, table in (("rotary_cos", cos), ("rotary_sin", sin)):
        check_shape(op, what, table, _ANGLES)
        check_device(op, what, table, q, "q")
        if not table.is_floating_point():
            raise TypeError(f"{op}: {what} is {table.dtype}; convert it with .to(q.dtype)")
    if cos.shape != sin.shape:
        raise ValueError(
            f"{op}: rotary_cos has shape {list(cos.shape)} and rotary_sin {list(sin.shape)}; they "
            "must be equal"
        )
    if 2 * cos.shape[1] > q.shape[-1]:
        raise ValueError(
            f"{op}: rotary_cos of {cos.shape[1]} columns rotates {2 * cos.shape[1]} of the "
            f"{q.shape[-1]} columns of a head; pass at most {q.shape[-1] // 2}"
        )
    if cos.shape[0] < capacity:
        raise ValueError(
            f"{op}: rotary_cos has {cos.shape[0]} positions and the cache has room for {capacity} "
            f"keys; pass a table of at least {capacity}"
        )


def _begin_together(a: Tensor, b: Tensor) -> bool:
    if a is b or torch.compiler.is_compiling():
        return a is b
    same = a.untyped_storage()._cdata == b.untyped_storage()._cdata
    return same and a.storage_offset() == b.storage_offset()


def check_written(op: str, **caches: Tensor) -> None:
    check_writable(op, **caches)
    for what, cache in caches.items():
        steps = zip(cache.shape, cache.stride(), strict=True)
        if cache.numel() and any(size > 1 and step == 0 for size, step in steps):
            raise ValueError(
                f"{op}: {what} has shape {list(cache.shape)} and strides {list(cache.stride())}, so "
                "that elements share memory; allocate separate memory for every element, without .expand()"
            )


def lengths(op: str, given: int | Tensor | None, q: Tensor, k: Tensor | None, capacity: int) -> Tensor:
    """The lengths, int32 `[B]`, not clamped."""
    batch = q.shape[0]
    if given is None:
        if k is not None:
            raise ValueError(f"{op}: k and v are appended at cache_seqlens, which is None; pass it")
        given = capacity
    if not isinstance(given, Tensor):
        given = integer(
            op, "cache_seqlens", given, "a number of keys, or an int32 tensor of one per sequence"
        )
        new = 0 if k is None else k.shape[1]
        if given + new > capacity:
            more = f" and {new} new keys are" if new else " is"
            raise ValueError(
                f"{op}: cache_seqlens {given}{more} above the capacity {capacity} of the cache; "
                f"pass {f'at most {capacity - new}' if new <= capacity else 'a larger cache'}"
            )
        return torch.full((batch,), given, dtype=torch.int32, device=q.device)
    check_integers(op, "cache_seqlens", given, (batch,), q, "q", or_int64=True)
    check_between(op, "cache_seqlens", given, capacity - (0 if k is None else k.shape[1]))
    return given if given.dtype == torch.int32 else given.clamp(-1, capacity).to(torch.int32)
