"""`decode` and `paged_decode` over keys that are sharded across ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from ..operators.options import DecodeOptions
from ..operators.parts import result_dtype, token_major
from ..operators.prefix_and_suffix import Keys
from ..operators.return_lse import with_lse
from ..runtime.signatures import public
from .call import check_ranks
from .exchange import Exchange, Facts, facts_of, refuse_dtensors, refuse_gradients
from .local import Part, attend_newest, merge_ranks
from .shards import Shards


@with_lse
@public("torch_fattn.distributed.decode", options="decode")
def decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seq_lens: Tensor | None = None,
    *,
    group: Any = None,
    shards: Shards | None = None,
    return_lse: bool = False,
    **options: Unpack[DecodeOptions],
) -> Tensor | tuple[Tensor, Tensor]:
    """`torch_fattn.decode` over a cache whose positions are sharded across the ranks of `group`.

    Args:
        query: `[B, Hq, Lq, D]`, the same on every rank; Lq as in `torch_fattn.decode`.
        key, value: this rank's keys and values, `[B, Hkv, own capacity, D]` and `[.., Dv]`, in the order of
            their positions.
        seq_lens: int32 `[B]`, the same on every rank: the number of keys of each sequence, over all ranks.
            Default: the number of positions of `shards`.
        group: a process group, a DeviceMesh of one dimension, or None for the default group.
        shards: which positions each rank holds. Default: rank r has the r-th run of own-capacity positions;
            the capacity must then be the same on every rank.
        attn_mask: the columns of this rank's keys, broadcastable to `[B, Hq, Lq, own capacity]`, of the same
            dtype on all ranks.
        options: those of `torch_fattn.decode`, the same on every rank. Windows, sink_tokens, a tree_mask and
            ALiBi count positions of the whole sequence; a sink counts once.

    Returns:
        As `torch_fattn.decode`, bit-identical on every rank.

    Raises:
        RuntimeError: a rank exited, exceeded the group's timeout, refused its arguments, or is in another
            call. Nothing is written.
        ValueError: ranks pass different shapes, options or shards; others as in `torch_fattn.decode`.
        NotImplementedError: gradients.

    Each rank attends to its own keys. One all_gather then exchanges out and the softmax sums in float32, `4 *
    B * Hq * Lq * (Dv + 4)` bytes per rank, and every rank merges them in rank order.
    """
    capacity = key.shape[2] if key.dim() == 4 else 0
    keys = Keys(key, value, capacity)
    return _run("torch_fattn.distributed.decode", query, keys, seq_lens, group, shards, return_lse, options)


@with_lse
@public("torch_fattn.distributed.paged_decode", options="paged_decode")
def paged_decode(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    group: Any = None,
    shards: Shards | None = None,
    return_lse: bool = False,
    **options: Unpack[DecodeOptions],
) -> Tensor | tuple[Tensor, Tensor]:
    """`torch_fattn.paged_decode` over one pool on each rank of `group`.

    Args:
        query: `[B, Hq, Lq, D]`, the same on every rank; Lq as in `torch_fattn.decode`.
        key_cache, value_cache: this rank's pools, as in `torch_fattn.paged_decode`. Their sizes may differ
            between ranks.
        block_tables: int32 `[B, max_blocks]`, the blocks of this rank's pool that hold its positions of each
            sequence, in order.
        seq_lens: int32 `[B]`, the same on every rank: the number of keys of each sequence, over all ranks.
        group: as in `decode`.
        shards: which positions each rank holds; `Shards.round_robin` with the block size fills all pools
            evenly. Default: rank r has the r-th run of `max_blocks * block_size` positions.
        attn_mask: the columns of this rank's keys, broadcastable to `[B, Hq, Lq, max_blocks * block_size]`.
        key_scales, value_scales: of this rank's pools.
        options: those of `torch_fattn.paged_decode`, as in `decode`.

    Results, errors and bytes are those of `decode`.
    """
    is_pool = key_cache.dim() == 4 and block_tables.dim() == 2
    capacity = key_cache.shape[1] * block_tables.shape[1] if is_pool else 0
    keys = Keys(key_cache, value_cache, capacity, block_tables=block_tables)
    name = "torch_fattn.distributed.paged_decode"
    return _run(name, query, keys, seq_lens, group, shards, return_lse, options)


def _run(
    name: str,
    query: Tensor,
    keys: Keys,
    seq_lens: Tensor | None,
    group: Any,
    shards: Shards | None,
    return_lse: bool,
    options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    exchange = Exchange(name, group)

    def prepare() -> tuple[Facts, Part]:
        _check(name, query, keys, seq_lens, options)
        placed = shards or Shards.sizes([keys.length] * exchange.ranks)
        check_ranks(name, "shards", placed, exchange.ranks)
        if keys.block_tables is None and keys.length < (own := placed.count(exchange.rank)):
            raise ValueError(
                f"{name}: key has room for {keys.length} positions and shards give {own} to rank "
                f"{exchange.rank}; pass a key with room for them"
            )
        lengths = seq_lens
        if lengths is None:
            lengths = torch.full((query.shape[0],), placed.length, dtype=torch.int32, device=query.device)
        part = attend_newest(query, keys, placed, exchange.rank, lengths, dict(options))
        kv_heads = keys.key.shape[1 if keys.block_tables is None else 2]
        return facts_of(name, query, query.shape[2], kv_heads, part[0].shape[-1], options, placed), part

    out, lse = merge_ranks(exchange, exchange.agree(prepare), result_dtype(query))
    if options.get("token_major_out"):
        out = token_major(out)
    return (out, lse) if return_lse else out


def _check(name: str, query: Tensor, keys: Keys, seq_lens: Tensor | None, options: Any) -> None:
    """Raises the operator's own errors. Those raised in `attend_newest` would name other shapes."""
    what = "key", "value"
    if keys.block_tables is not None:
        what = "key_cache", "value_cache"
    operands = {"query": query, what[0]: keys.key, what[1]: keys.value}
    refuse_dtensors(name, operands)
    refuse_gradients(name, operands)
    if keys.block_tables is None:
        torch.ops.fattn._plan_decode(query, keys.key, keys.value, seq_lens, **options)
    else:
        torch.ops.fattn._plan_paged_decode(
            query, keys.key, keys.value, keys.block_tables, seq_lens, **options
        )
