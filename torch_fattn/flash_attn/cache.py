"""`flash_attn_with_kvcache`: rotary embedding, append to the cache, left padding, attention. A dense cache is
a pool with one block per sequence."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from ..operators.head_padding import pad_heads, without_padding
from ..operators.parts import result_dtype
from ..runtime.signatures import public
from ..runtime.tensor_checks import check_integers, check_shape
from .alibi import attend_by_distance, sees_no_later_key
from .arguments import (
    POOL,
    ROWS,
    Window,
    check_between,
    check_blocks,
    check_heads,
    check_operands,
    check_sizes,
    check_slopes,
    scale_of,
    softcap_of,
    window,
)
from .cache_arguments import check_new_keys, lengths, table_of
from .newer import DEFAULTS, CacheArguments, check_newer, check_out, into, one_of, sinks_of
from .results import Result, with_lse

_DENSE_CACHE = ("batch_of_cache", "capacity", "kv_heads", "head_dim")


@with_lse
@public("torch_fattn.flash_attn.flash_attn_with_kvcache", options=DEFAULTS)
def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None, v: Tensor | None = None,
    rotary_cos: Tensor | None = None, rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None, cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None, block_table: Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False, window_size: Window = (-1, -1),
    softcap: float = 0.0, rotary_interleaved: bool = True, alibi_slopes: Tensor | None = None,
    num_splits: int = 0, return_softmax_lse: bool = False, **newer: Unpack[CacheArguments],
) -> Result:  # fmt: skip
    """Attention over a cache. First appends k and v `[B, Lnew, Hkv, D]` in place at cache_seqlens; with
    rotary_cos and rotary_sin `[positions, rotary_dim / 2]`, k and q are rotated.

    q is `[B, Lq, Hq, D]`. The caches are `[batch, capacity, Hkv, D]`, optionally selected by cache_batch_idx
    `[B]`, or with a block_table `[B, blocks]` pools of blocks of any size. With cache_leftpad `[B]`, the keys
    of a sequence begin there. Returns out, shaped like q, and on request the log-sum-exp `[B, Hq, Lq]`.

    A sequence with a negative length on the device has no keys, and none are written. A length above the
    capacity is clamped, and keys beyond the cache are dropped; an int that leaves no room for k raises
    ValueError. rotary_cos and rotary_sin need at least as many positions as the cache has slots; a query row
    at a later position is NaN.
    """
    op = "torch_fattn.flash_attn.flash_attn_with_kvcache"
    check_newer(op, newer, q=q, k_cache=k_cache, v_cache=v_cache)
    block_table = one_of(op, block_table=block_table, page_table=newer.get("page_table"))
    check_shape(op, "q", q, ROWS)
    cache_shape = _DENSE_CACHE if block_table is None else POOL
    check_operands(op, q, k_cache=(k_cache, cache_shape), v_cache=(v_cache, cache_shape))
    caches = {"k_cache": k_cache, "v_cache": v_cache}
    for dim, what in enumerate(
        ("batch size", "capacity") if block_table is None else ("num_blocks", "block_size")
    ):
        check_sizes(op, what, **{name: cache.shape[dim] for name, cache in caches.items()})
    check_heads(op, q, k_cache, v_cache, *caches)
    check_slopes(op, alibi_slopes, q, q.shape[0])
    scale = scale_of(op, softmax_scale)
    batch, q_len = q.shape[:2]
    value_dim = v_cache.shape[-1]
    options: dict[str, Any] = {**window(window_size), "softcap": softcap_of(op, softcap, scale)}
    options |= sinks_of(op, newer, q)
    target = newer.get("out")
    check_out(op, target, q, value_dim)
    table = table_of(op, q, k_cache, cache_batch_idx, block_table)
    capacity = table.shape[1] * k_cache.shape[1]
    check_new_keys(op, q, k, v, k_cache, v_cache, rotary_cos, rotary_sin, capacity)
    lens = lengths(op, cache_seqlens, q, k, capacity)
    if cache_leftpad is not None:
        check_integers(op, "cache_leftpad", cache_leftpad, (batch,), q, "q", or_int64=True)
        check_between(op, "cache_leftpad", cache_leftpad, lens)
    new = 0 if k is None else k.shape[1]
    table_name = "cache_batch_idx" if block_table is None else "block_table"
    check_blocks(op, table_name, table, lens, new, k_cache)

    if capacity == 0:  # an empty cache: no slot to write, no key to see
        out = q.new_zeros(*q.shape[:-1], value_dim)
        lse = q.new_full((batch, q.shape[2], q_len), -torch.inf, dtype=torch.float32)
        if "sinks" in options:
            lse = options["sinks"].float()[:, None].expand_as(lse)
        out = into(target, out)
        return (out, lse.contiguous()) if return_softmax_lse else out

    q, key_cache, value_cache, options["scale"] = pad_heads(q, k_cache, v_cache, scale)
    if k is not None and v is not None:
        k, _, v, _ = pad_heads(k, k, v, None)
        lens, has_slots = lens.clamp(0, capacity), lens >= 0
        if rotary_cos is not None and rotary_sin is not None and rotary_cos.numel() > 0:
            # Rows that all see the same keys have the first row's position.
            by_position = causal or max(options["window_left"], options["window_right"]) >= 0
            last = rotary_cos.shape[0] - (q_len if by_position else min(q_len, 1))
            check_between(op, "cache_seqlens", lens, last)
            q = rotate(q, lens, rotary_cos, rotary_sin, rotary_interleaved, advances=by_position)
            k = rotate(k, lens, rotary_cos, rotary_sin, rotary_interleaved, advances=True)
        append(k, v, key_cache, value_cache, lens.where(has_slots, capacity), table)
        for cache, padded in ((k_cache, key_cache), (v_cache, value_cache)):
            if padded is not cache:
                cache.copy_(padded[..., : cache.shape[-1]])
        lens = (lens + new).where(has_slots, 0)

    if q_len == 1 or causal:
        query = q.transpose(1, 2)
        options |= {"alibi_slopes": alibi_slopes, "token_major_out": True}
        if cache_leftpad is not None:
            position = torch.arange(capacity, device=q.device)
            options["attn_mask"] = (position >= cache_leftpad[:, None])[:, None, None]
        if block_table is None and cache_batch_idx is None:
            key, value = (cache[:batch].transpose(1, 2) for cache in (key_cache, value_cache))
            out, lse = torch.ops.fattn.decode(query, key, value, lens, **options)
        else:
            out, lse = torch.ops.fattn.paged_decode(query, key_cache, value_cache, table, lens, **options)
        out = out.transpose(1, 2)
    else:
        if cache_leftpad is not None:
            first = cache_leftpad.clamp(0, capacity).to(torch.int32)
            key_cache, value_cache, table = without_padding_on_the_left(key_cache, value_cache, table, first)
            lens = (lens.clamp(max=capacity) - first).clamp(min=0)
        starts = torch.arange(batch + 1, device=q.device, dtype=torch.int32) * q_len

        def attend(before: int, part: bool = False, **options: Any) -> tuple[Tensor, Tensor]:
            keys = (lens.clamp(max=capacity) - before).clamp(min=0) if before else lens
            op = torch.ops.fattn.paged_prefill.part if part else torch.ops.fattn.paged_prefill
            out, lse = op(q.flatten(0, 1), key_cache, value_cache, table, keys, starts, q_len, **options)
            return out.unflatten(0, (batch, q_len)), lse.unflatten(1, (batch, q_len)).transpose(0, 1)

        if alibi_slopes is None or sees_no_later_key(causal, options):
            out, lse = attend(0, is_causal=causal, alibi_slopes=alibi_slopes, **options)
        else:
            of_rows = alibi_slopes[..., None]
            out, lse = attend_by_distance(attend, alibi_slopes, of_rows, result_dtype(q), options)
    out = into(target, without_padding(out, value_dim))
    return (out, lse.contiguous()) if return_softmax_lse else out


def rotate(
    x: Tensor, first: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, *, advances: bool
) -> Tensor:
    """Applies rotary embedding to the first 2 * cos.shape[1] columns of x `[B, L, H, D]`, in float32. Row
    i is at position first[b] + i, or at first[b] if positions do not advance. Rows beyond cos and sin are
    NaN."""
    steps = (
        torch.arange(x.shape[1], device=x.device) if advances else x.new_zeros(x.shape[1], dtype=torch.int64)
    )
    positions = first[:, None] + steps
    known = positions.clamp(max=cos.shape[0] - 1)
    c, s = (table[known].float() for table in (cos, sin))
    c = c.masked_fill((positions != known)[..., None], math.nan)
    rows, style = x.transpose(1, 2), "pairs" if interleaved else "halves"
    out, _ = torch.ops.fattn.rotary(
        rows, rows[:, :0], c, s, style=style, rotary_dim=2 * cos.shape[1], token_major_out=True
    )
    return out.transpose(1, 2)


def append(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, lens: Tensor, table: Tensor
) -> None:
    """Writes `[B, Lnew, Hkv, D]` after the first lens[b] keys of each sequence. Drops keys without a
    block."""
    slots = _slots(lens, key.shape[1], table, key_cache.shape[1])
    torch.ops.fattn.cache_write(
        key.flatten(0, 1), value.flatten(0, 1), key_cache, value_cache, slots.flatten()
    )


def without_padding_on_the_left(
    key_cache: Tensor, value_cache: Tensor, table: Tensor, first: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The caches as blocks of one key, and a table that begins at first[b]. Copies a cache whose blocks are
    not contiguous."""
    capacity = table.shape[1] * key_cache.shape[1]
    slots = _slots(first, capacity, table, key_cache.shape[1])
    keys, values = (cache.flatten(0, 1)[:, None] for cache in (key_cache, value_cache))
    return keys, values, slots.where(slots < keys.shape[0], -1).to(torch.int32)


def _slots(first: Tensor, count: int, table: Tensor, block_size: int) -> Tensor:
    """The slots of keys first[b] to first[b] + count - 1, `[B, count]`; -1 for a key without a block."""
    positions = first[:, None].long() + torch.arange(count, device=table.device)
    column = torch.div(positions, block_size, rounding_mode="floor")
    block = table.long().gather(1, column.clamp(max=table.shape[1] - 1))
    slots = block * block_size + positions % block_size
    return slots.where((column < table.shape[1]) & (block >= 0), -1)
