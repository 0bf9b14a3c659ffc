"""`context_parallel`: `F.scaled_dot_product_attention` over sequences that are sharded over ranks."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ..operators.head_padding import pad_heads, without_padding
from ..runtime.signatures import public, shown
from ..runtime.tensor_checks import check_shape
from .call import check_ranks
from .exchange import Exchange, Facts, is_dtensor, refuse_dtensors
from .prefill import prefill
from .shards import Shards

NAME = "torch_fattn.distributed.context_parallel"
LAYOUTS = ("zigzag", "contiguous")

_lock = threading.Lock()
_open = 0  # open blocks in all threads
_torchs: Callable[..., Tensor] = F.scaled_dot_product_attention
_local = threading.local()


@dataclass(frozen=True)
class _Block:
    exchange: Exchange
    group: Any
    shards: Shards

    def has(self, operand: Tensor) -> bool:
        """Whether an operand `[.., length, dim]` has this rank's number of positions."""
        return operand.dim() >= 2 and operand.shape[-2] == self.shards.count(self.exchange.rank)


@public(NAME)
@contextmanager
def context_parallel(
    mesh: Any,
    *,
    buffers: Sequence[Tensor] | None = None,
    buffer_seq_dims: Sequence[int] | None = None,
    no_restore_buffers: set[Tensor] | None = None,
    layout: Literal["zigzag", "contiguous"] = "zigzag",
) -> Iterator[Shards]:
    """Inside the block, `F.scaled_dot_product_attention` attends over the sequences of all ranks, as in
    `torch.distributed.tensor.experimental.context_parallel`, whose arguments these are.

    Args:
        mesh: a DeviceMesh of one dimension, or a process group.
        buffers: whole tensors, the same on every rank: tokens, position ids, embeddings. Inside the block,
            each holds only this rank's positions. Other tensors that share its memory, such as its base, are
            unchanged.
        buffer_seq_dims: the dimension of the positions in each buffer. All have the same length.
        no_restore_buffers: buffers that need not be restored after the block.
        layout: "zigzag" gives all ranks equal work under a causal mask; "contiguous" gives each one run.

    Yields:
        The `Shards` of the positions, for `unshard`.

    Inside the block and in this thread, a call whose query and key have this rank's number of positions
    becomes `prefill` over the positions of all ranks, with or without `torch_fattn.install()`. Other calls,
    such as attention to a text that every rank has, are unchanged. An attn_mask has this rank's rows and the
    keys of all ranks in the order of their positions.

    Raises:
        ValueError: buffers of different lengths, a duplicate, or a wrong number of dimensions.
        NotImplementedError: from a call inside with dropout or gradients.
    """
    buffers, dims = list(buffers or ()), list(buffer_seq_dims or ())
    exchange = Exchange(NAME, mesh)
    length = _length(buffers, dims)
    if layout not in LAYOUTS:
        raise ValueError(f"{NAME}: layout is {shown(layout)}; use one of {', '.join(map(repr, LAYOUTS))}")
    kept = list(no_restore_buffers or ())
    if any(all(each is not buffer for buffer in buffers) for each in kept):
        raise ValueError(f"{NAME}: no_restore_buffers has a tensor that is not in buffers; pass it there too")
    shards = (Shards.zigzag if layout == "zigzag" else Shards.contiguous)(length, exchange.ranks)
    whole = [buffer.data for buffer in buffers]
    own = [shards.take(each, dim, exchange.rank).clone() for each, dim in zip(whole, dims, strict=True)]
    try:
        for buffer, part in zip(buffers, own, strict=True):
            buffer.data = part
        with _routed(_Block(exchange, mesh, shards)):
            yield shards
    finally:
        for buffer, before in zip(buffers, whole, strict=True):
            if all(buffer is not each for each in kept):
                buffer.data = before


@public("torch_fattn.distributed.unshard")
def unshard(own: Tensor, dim: int, shards: Shards, group: Any = None) -> Tensor:
    """Gathers, on every rank, the whole tensor whose dimension `dim` is sharded.

    Raises:
        RuntimeError: as in `decode`.
        ValueError: as in `decode`.
    """
    name = "torch_fattn.distributed.unshard"
    exchange = Exchange(name, group)

    def prepare() -> tuple[Facts, int]:
        refuse_dtensors(name, {"own": own})
        check_ranks(name, "shards", shards, exchange.ranks)
        if not -own.dim() <= dim < own.dim() or own.shape[dim] != shards.count(exchange.rank):
            raise ValueError(
                f"{name}: dimension {dim} of shape {list(own.shape)} does not have the "
                f"{shards.count(exchange.rank)} positions of rank {exchange.rank}; pass this rank's part"
            )
        along = dim % own.dim()
        others = own.shape[:along] + own.shape[along + 1 :]
        facts = {"call": name, "dtype": own.dtype, "dimension": along, "other dimensions": others}
        return facts | {"shards": shards.checksum}, along

    along = exchange.agree(prepare)
    return shards.join(exchange.gather_rows(own, along, shards.counts), along)


def _length(buffers: list[Tensor], dims: list[int]) -> int:
    if not buffers or len(buffers) != len(dims):
        raise ValueError(
            f"{NAME}: {len(dims)} buffer_seq_dims are given for {len(buffers)} buffers; pass at least one "
            "buffer, and one dimension for each"
        )
    for n, (buffer, dim) in enumerate(zip(buffers, dims, strict=True)):
        if any(buffer is other for other in buffers[:n]):
            raise ValueError(f"{NAME}: buffers[{n}] is there twice; pass each tensor once")
        if not -buffer.dim() <= dim < buffer.dim():
            raise ValueError(
                f"{NAME}: buffer_seq_dims[{n}] is {dim} and buffers[{n}] has {buffer.dim()} dimensions; pass "
                "the dimension of its positions"
            )
    lengths = {buffer.shape[dim] for buffer, dim in zip(buffers, dims, strict=True)}
    if len(lengths) > 1:
        raise ValueError(f"{NAME}: buffers have {sorted(lengths)} positions; all must have the same length")
    return lengths.pop()


@contextmanager
def _routed(block: _Block) -> Iterator[None]:
    """Replaces torch's function while a block is open in any thread; only threads with an open block are
    routed."""
    global _open, _torchs
    with _lock:
        if _open == 0:
            _torchs = F.scaled_dot_product_attention
            F.scaled_dot_product_attention = _attention()
        _open += 1
    before = getattr(_local, "block", None)
    _local.block = block
    try:
        yield
    finally:
        _local.block = before
        with _lock:
            _open -= 1
            if _open == 0:
                F.scaled_dot_product_attention = _torchs


@functools.cache
def _attention() -> Callable[..., Tensor]:
    """Replaces torch's function. Created on first use, because `torch.compiler.disable` imports
    torch._dynamo."""
    attention: Callable[..., Tensor] = torch.compiler.disable(_attend)
    return functools.wraps(torch._C._nn.scaled_dot_product_attention)(attention)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    block: _Block | None = getattr(_local, "block", None)
    is_placed = is_dtensor(query)
    if block is None or not (is_placed or (block.has(query) and block.has(key))):
        return _torchs(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    _check(query, key, dropout_p, enable_gqa)
    options: dict[str, Any] = {"is_causal": is_causal, "q_offset": 0}
    if is_placed:
        return prefill(query, key, value, attn_mask, scale=scale, **options)
    padded = pad_heads(query, key, value, scale)
    options |= {"group": block.group, "shards": block.shards, "scale": padded[3]}
    out: Tensor = prefill(*padded[:3], attn_mask, **options)
    return without_padding(out, value.shape[-1])


def _check(query: Tensor, key: Tensor, dropout_p: float, enable_gqa: bool) -> None:
    if dropout_p > 0:
        raise NotImplementedError(f"{NAME}: there is no dropout across ranks; pass dropout_p=0.0")
    for what, operand in (("query", query), ("key", key)):
        check_shape(NAME, what, operand, ("batch", "heads", "length", "head_dim"))
    if query.shape[1] != key.shape[1] and not enable_gqa:
        raise ValueError(
            f"{NAME}: query has {query.shape[1]} heads and key {key.shape[1]}; pass enable_gqa=True"
        )
