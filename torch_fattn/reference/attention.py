"""The attention operators, and `cache_write`, in float64."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from ..operators.options import (
    DecodeOptions,
    PagedPrefillOptions,
    PrefillOptions,
    ScoreOptions,
    StorageOptions,
    VarlenPrefillOptions,
)
from ..operators.parts import token_major
from ..operators.visibility import Visibility, expanded_blocks, tree_visible
from ..runtime.options import with_defaults
from ..runtime.signatures import check_writable, public
from .kv_formats import dequantise, quantise

_INF = float("inf")


@public("torch_fattn.reference.prefill", options="prefill", refused_by="prefill")
def prefill(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    **options: Unpack[PrefillOptions],
) -> tuple[Tensor, Tensor]:
    """Query `[B,Hq,Lq,D]` over key `[B,Hkv,Lk,D]` and value `[B,Hkv,Lk,Dv]`. `mask_map` has no effect."""
    with torch.no_grad():
        return differentiable_prefill(query, key, value, attn_mask, **options)


def differentiable_prefill(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, **options: Unpack[PrefillOptions]
) -> tuple[Tensor, Tensor]:
    """`prefill`, differentiable."""
    every = with_defaults("prefill", options)
    batch, q_len, kv_len = query.shape[0], query.shape[2], key.shape[2]
    offset = every["q_offset"]
    lengths = _lengths(every["seq_lens"], batch, kv_len)
    # int64 cannot overflow.
    first = lengths[:, None] - q_len if offset is None else max(-(2**60), min(offset, 2**60))
    positions = (first + torch.arange(q_len, device="cpu")).expand(batch, q_len)
    visible = _visible(positions, lengths, kv_len, every["is_causal"], every)
    if (block_mask := every["block_mask"]) is not None:
        visible = visible & expanded_blocks(block_mask.cpu(), every["block_size"], q_len, kv_len)
    out, lse = _attend(query, key, value, positions, visible, attn_mask, every)
    return (token_major(out) if every["token_major_out"] else out), lse


@public("torch_fattn.reference.decode", options="decode", refused_by="decode")
def decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seq_lens: Tensor | None = None,
    **options: Unpack[DecodeOptions],
) -> tuple[Tensor, Tensor]:
    """The newest `Lq` tokens, causal, over a cache with `seq_lens[b]` of `Lk` keys filled."""
    every = with_defaults("decode", options)
    key, value = _numbers(key, value, every)
    batch, q_len, capacity = query.shape[0], query.shape[2], key.shape[2]
    lengths = _lengths(seq_lens, batch, capacity)
    positions = lengths[:, None] - q_len + torch.arange(q_len, device="cpu")
    visible = _visible(positions, lengths, capacity, True, every)
    if (tree_mask := every["tree_mask"]) is not None:
        token = torch.arange(capacity, device="cpu") - (lengths[:, None] - q_len)
        visible = visible & tree_visible(tree_mask.cpu(), token)[:, None]
    out, lse = _attend(query, key, value, positions, visible, every["attn_mask"], every)
    return (token_major(out) if every["token_major_out"] else out), lse


@public("torch_fattn.reference.paged_decode", options="paged_decode", refused_by="paged_decode")
def paged_decode(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    **options: Unpack[DecodeOptions],
) -> tuple[Tensor, Tensor]:
    """`decode` over pools `[num_blocks, block_size, Hkv, D]`; `block_tables` `[B, max_blocks]` names the
    blocks of each sequence in order. Keys in blocks outside the pool do not exist."""
    every = with_defaults("paged_decode", options)
    key, value, in_pool = _from_blocks(key_cache, value_cache, block_tables, every)
    mask = in_pool[:, None, None, :]
    if (attn_mask := every["attn_mask"]) is not None:
        attn_mask = attn_mask.cpu()
        mask = mask & attn_mask if attn_mask.dtype == torch.bool else attn_mask.double().where(mask, -_INF)
    return decode(query, key, value, seq_lens, **{**_without_storage(every), "attn_mask": mask})


@public("torch_fattn.reference.paged_prefill", options="paged_prefill", refused_by="paged_prefill")
def paged_prefill(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    *,
    is_causal: bool,
    **options: Unpack[PagedPrefillOptions],
) -> tuple[Tensor, Tensor]:
    """Query `[T,Hq,D]`: rows `cu_seqlens_q[b]` to `cu_seqlens_q[b + 1]` are the newest of sequence b over the
    pools of `paged_decode`. A row of no sequence sees no key. Returns out `[T,Hq,Dv]` and lse `[Hq,T]`."""
    every = with_defaults("paged_prefill", options)
    rows, heads, _ = query.shape
    key, value, in_pool = _from_blocks(key_cache, value_cache, block_tables, every)
    out, lse = _no_key_results(rows, heads, value.shape[-1], every["sinks"])
    bounds = cu_seqlens_q.cpu().long().clamp(0, rows).cummax(0).values.tolist()
    for b, (first, end) in enumerate(pairwise(bounds)):
        length = int(seq_lens[b].clamp(0, key.shape[2]))
        sequence_out, sequence_lse = prefill(
            query[first:end].transpose(0, 1)[None],
            key[b : b + 1, :, :length],
            value[b : b + 1, :, :length],
            in_pool[b, :length],
            is_causal=is_causal,
            **of_sequence(_without_storage(every), b),
        )
        out[first:end] = sequence_out[0].transpose(0, 1)
        lse[:, first:end] = sequence_lse[0]
    return out, lse


@public("torch_fattn.reference.varlen_prefill", options="varlen_prefill", refused_by="varlen_prefill")
def varlen_prefill(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    **options: Unpack[VarlenPrefillOptions],
) -> tuple[Tensor, Tensor]:
    """Query `[Tq,Hq,D]` and key `[Tk,Hkv,D]`, value `[Tk,Hkv,Dv]`: `prefill` of rows `cu_seqlens_q[b]` to
    `cu_seqlens_q[b + 1]` over keys `cu_seqlens_k[b]` to `cu_seqlens_k[b + 1]`. A row of no sequence sees no
    key. Returns out `[Tq,Hq,Dv]` and lse `[Hq,Tq]`."""
    with torch.no_grad():
        return differentiable_varlen_prefill(query, key, value, cu_seqlens_q, cu_seqlens_k, **options)


def differentiable_varlen_prefill(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    **options: Unpack[VarlenPrefillOptions],
) -> tuple[Tensor, Tensor]:
    """`varlen_prefill`, differentiable."""
    every = with_defaults("varlen_prefill", options)
    rows, heads, _ = query.shape
    out, lse = _no_key_results(rows, heads, value.shape[-1], every["sinks"])
    bounds = cu_seqlens_q.cpu().long().clamp(0, rows).cummax(0).values.tolist()
    key_bounds = cu_seqlens_k.cpu().long().clamp(0, key.shape[0]).tolist()
    sequences = zip(pairwise(bounds), pairwise(key_bounds), strict=True)
    for b, ((first, end), (first_key, end_key)) in enumerate(sequences):
        keys = slice(first_key, end_key)
        sequence_out, sequence_lse = differentiable_prefill(
            query[first:end].transpose(0, 1)[None],
            key[keys].transpose(0, 1)[None],
            value[keys].transpose(0, 1)[None],
            None,
            **of_sequence(every, b),
        )
        out[first:end] = sequence_out[0].transpose(0, 1)
        lse[:, first:end] = sequence_lse[0]
    return out, lse


@public("torch_fattn.reference.merge", refused_by="merge")
def merge(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Merges `N` partial results over disjoint keys, outs `[N,B,H,L,D]` and lses `[N,B,H,L]`, or packed
    `[N,T,H,D]` and `[N,H,T]`. A part whose lse is -inf saw no key: its out is not read."""
    if outs.dim() == 4 and lses.dim() == 3:
        out, lse = merge(outs.transpose(1, 2)[:, None], lses[:, None])
        return out[0].transpose(0, 1), lse[0]
    outs, lses = outs.cpu().double(), lses.cpu().double()
    top = _finite_top(lses.amax(0))
    weights = (lses - top).exp()
    total = weights.sum(0)
    weighted = (weights[..., None] * outs).masked_fill((lses == -_INF)[..., None], 0.0).sum(0)
    out = (weighted / total[..., None]).masked_fill((total == 0)[..., None], 0.0)
    return out, top + total.log()


@public("torch_fattn.reference.cache_write", options="cache_write", refused_by="cache_write")
def cache_write(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    **options: Unpack[StorageOptions],
) -> None:
    """Writes the rows of key `[T,Hkv,D]` and value `[T,Hkv,Dv]` into the slots of the caches `[num_blocks,
    block_size, Hkv, D]`, in place. Tokens whose slots are outside the cache are dropped."""
    check_writable("torch_fattn.reference.cache_write", key_cache=key_cache, value_cache=value_cache)
    every = with_defaults("cache_write", options)
    kv_format = every["kv_format"]
    kv_format = "int8" if kv_format == "auto" and key_cache.dtype == torch.int8 else kv_format
    sides = ((key, key_cache, every["key_scales"]), (value, value_cache, every["value_scales"]))
    for rows, cache, scales in sides:
        if cache.is_floating_point():
            stored, stored_scales = rows.detach(), None
        else:
            stored, stored_scales = quantise(rows, kv_format, scales=scales is not None)
        for token, slot in enumerate(slot_mapping.tolist()):
            block, place = divmod(slot, cache.shape[1])
            if not 0 <= block < cache.shape[0]:
                continue
            cache[block, place] = stored[token].to(cache.device)
            if scales is not None and stored_scales is not None:
                scales[block, place] = stored_scales[token].to(cache.device)


def _lengths(seq_lens: Tensor | None, batch: int, capacity: int) -> Tensor:
    if seq_lens is None:
        return torch.full((batch,), capacity, device="cpu")
    return seq_lens.cpu().long().clamp(0, capacity)


def _visible(
    positions: Tensor, lengths: Tensor, kv_len: int, is_causal: bool, options: ScoreOptions
) -> Tensor:
    """Keys that rows at `positions` `[B,Lq]` may see by position: bool `[B,1,Lq,Lk]`."""
    j = torch.arange(kv_len, device="cpu")
    visibility = Visibility.of(options, is_causal=is_causal)
    return visibility.mask(positions[:, None, :, None], j) & (j < lengths[:, None, None, None])


def _from_blocks(
    key_cache: Tensor, value_cache: Tensor, block_tables: Tensor, options: StorageOptions
) -> tuple[Tensor, Tensor, Tensor]:
    """Gathers key and value `[B, Hkv, capacity, D]` by the tables, with bool `[B, capacity]`: whether the
    pool has the key."""
    num_blocks, block_size = key_cache.shape[:2]
    tables = block_tables.cpu().long()
    in_pool = ((tables >= 0) & (tables < num_blocks)).repeat_interleave(block_size, dim=1)
    key, value = (
        cache.cpu()[tables.clamp(0, num_blocks - 1)].flatten(1, 2).transpose(1, 2)
        if num_blocks
        else cache.new_zeros(in_pool.shape[0], cache.shape[2], in_pool.shape[1], cache.shape[3])
        for cache in _numbers(key_cache, value_cache, options)
    )
    return key, value, in_pool


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    visible: Tensor,
    attn_mask: Tensor | None,
    options: ScoreOptions,
) -> tuple[Tensor, Tensor]:
    """Scores as specified, then the softmax over visible keys."""
    heads, head_dim = query.shape[1], query.shape[3]
    visible = visible.expand(*query.shape[:3], key.shape[2])
    if attn_mask is not None:
        attn_mask = attn_mask.detach().cpu()
        visible = visible & (attn_mask if attn_mask.dtype == torch.bool else attn_mask != -_INF)
    sees, seen = visible.any(-1), visible.any(-2)
    # Otherwise, 0 times NaN would reach the gradients of other rows and keys.
    q = query.cpu().double().masked_fill(~sees[..., None], 0.0)
    k, v = (_share_heads(t.cpu().double(), heads).masked_fill(~seen[..., None], 0.0) for t in (key, value))
    scale = options["scale"]
    scores = modified((q @ k.mT) * (head_dim**-0.5 if scale is None else float(scale)), positions, options)
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        scores = scores + attn_mask.double()
    scores = scores.masked_fill(~visible, -_INF)

    sinks = options["sinks"]
    sink = torch.full((heads,), -_INF, device="cpu") if sinks is None else sinks.cpu()
    sink = sink.double()[:, None].expand(scores.shape[:3])
    top = _finite_top(torch.cat([scores, sink[..., None]], dim=-1).detach().amax(-1))
    weights = (scores - top[..., None]).exp()
    total = weights.sum(-1) + (sink - top).exp()
    nothing = total == 0
    total = total.masked_fill(nothing, 1.0)
    # NaN in a visible value reaches the rows that see it and leaves the others undefined.
    out = (weights @ v) / total[..., None]
    out = out.where(sees[..., None], out.detach())  # the sink alone makes it 0, or NaN
    return out, (top + total.log()).masked_fill(nothing, -_INF)


def modified(scores: Tensor, positions: Tensor, options: ScoreOptions) -> Tensor:
    """Applies the score options to scaled products `[B,Hq,Lq,Lk]` of rows at `positions` `[B,Lq]`."""
    if (softcap := float(options["softcap"])) > 0:
        scores = softcap * torch.tanh(scores / softcap)
    if (alibi_slopes := options["alibi_slopes"]) is not None:
        distance = torch.arange(scores.shape[3], device="cpu") - positions[:, None, :, None]
        scores = scores + alibi_slopes.cpu().to(scores.dtype)[..., None, None] * distance
    return scores


def _numbers(key: Tensor, value: Tensor, options: StorageOptions) -> tuple[Tensor, Tensor]:
    """The dequantised key and value."""
    kv_format = options["kv_format"]
    return (
        dequantise(key, options["key_scales"], kv_format),
        dequantise(value, options["value_scales"], kv_format),
    )


def _without_storage(options: StorageOptions) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in StorageOptions.__annotations__}


def of_sequence(options: Mapping[str, Any], b: int) -> dict[str, Any]:
    """The options of sequence `b` alone."""
    slopes = options["alibi_slopes"]
    own = slopes if slopes is None or slopes.dim() == 1 else slopes[b]
    return {**options, "alibi_slopes": own}


def _no_key_results(rows: int, heads: int, value_dim: int, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """out and lse of packed rows that see no key."""
    out = torch.zeros(rows, heads, value_dim, dtype=torch.float64, device="cpu")
    lse = torch.full((heads, rows), -_INF, dtype=torch.float64, device="cpu")
    if sinks is not None:
        logits = sinks.detach().cpu()
        lse[:] = logits.masked_fill(logits == _INF, torch.nan)[:, None]
        out.masked_fill_(lse.isnan().T[..., None], torch.nan)
    return out, lse


def _share_heads(x: Tensor, q_heads: int) -> Tensor:
    """Grouped-query attention: query head h uses key-value head h // (Hq / Hkv)."""
    return x.repeat_interleave(q_heads // x.shape[1], dim=1) if x.shape[1] else x


def _finite_top(top: Tensor) -> Tensor:
    """The row maximum, or 0 for a row without a finite score, so that it can be subtracted."""
    return top.masked_fill(top == -_INF, 0.0)
