"""Refusals of functions across ranks, of which this process is the only one; see __init__.py."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.helpers.public_calls import heads, one_rank
from tests.helpers.refusals import Refusal
from torch_fattn import distributed
from torch_fattn.distributed import Shards, context_parallel, explain, unshard

OWN = heads(1, 4, 6, 16)
PACKED = OWN[0].transpose(0, 1)


def _prefill(*operands: Tensor, **options: Any) -> Callable[[], Any]:
    return lambda: one_rank(distributed.prefill)(*(operands or (OWN,) * 3), **options)


def _packed(*operands: Any, **options: Any) -> Callable[[], Any]:
    return lambda: one_rank(distributed.varlen_prefill)(PACKED, PACKED, PACKED, *operands, **options)


def _no_sequences(**options: Any) -> Any:
    return one_rank(distributed.varlen_prefill)(PACKED[:0], PACKED[:0], PACKED[:0], [], **options)


def _in_context(*operands: Tensor, **options: Any) -> Callable[[], Any]:
    """A call of torch's function inside `context_parallel`."""

    def call() -> Any:
        own = OWN.clone()
        with one_rank(context_parallel)(None, buffers=[own], buffer_seq_dims=[2]):
            return F.scaled_dot_product_attention(*(operands or (own,) * 3), **options)

    return call


def _buffers(buffers: list[Tensor], dims: list[int], **options: Any) -> Callable[[], None]:
    def call() -> None:
        with one_rank(context_parallel)(None, buffers=buffers, buffer_seq_dims=dims, **options):
            pass

    return call


def _decode(key: Tensor) -> Callable[[], Any]:
    return lambda: one_rank(distributed.decode)(OWN[:, :, :1], key, key, shards=Shards.sizes([6]))


REFUSALS = [
    Refusal("make them for", _prefill(shards=Shards.contiguous(6, 2)),
            _prefill(shards=Shards.contiguous(6, 1))),
    Refusal("pass those of this rank", _prefill(shards=Shards.sizes([5])),
            _prefill(shards=Shards.sizes([6]))),
    Refusal("pass 'keys', 'replicated' or Shards", _prefill(query_shards="all"),
            _prefill(query_shards="keys")),
    Refusal("pass an attn_mask of the filled keys", _prefill(seq_lens=torch.tensor([4])),
            _prefill(attn_mask=torch.arange(6) < 4)),
    Refusal("pass an attn_mask of the visible keys", _prefill(block_mask=torch.ones(1, 1, 1, 1).bool()),
            _prefill(attn_mask=torch.ones(6, 6).bool())),
    Refusal("use method='auto'", _prefill(query_shards="replicated", method="ring"),
            _prefill(query_shards="replicated", method="auto")),
    Refusal("pass a process group, a DeviceMesh or None", _prefill(group="mine"), _prefill(group=None)),
    Refusal("call it under torch.no_grad()", _prefill(OWN.clone().requires_grad_(), OWN, OWN),
            torch.no_grad()(_prefill(OWN.clone().requires_grad_(), OWN, OWN))),
    Refusal("pass a key with room for them", _decode(OWN[:, :, :5]), _decode(OWN)),
    Refusal("pass those of every sequence", _packed([Shards.sizes([6])], []),
            _packed([Shards.sizes([6])], [Shards.sizes([6])])),
    *(Refusal("they must be equal", _packed([Shards.sizes([3])] * 2, alibi_slopes=torch.ones(sequences, 4)),
              _packed([Shards.sizes([3])] * 2, alibi_slopes=torch.ones(2, 4))) for sequences in (1, 3)),
    Refusal("use 0 for none", lambda: _no_sequences(softcap=-1.0), lambda: _no_sequences(softcap=1.0)),
    Refusal("pass at least one buffer, and one dimension for each", _buffers([OWN.clone()], []),
            _buffers([OWN.clone()], [2])),
    Refusal("all must have the same length", _buffers([OWN.clone(), OWN.clone()], [1, 2]),
            _buffers([OWN.clone(), OWN[0].clone()], [2, 1])),
    Refusal("pass each tensor once", _buffers([OWN] * 2, [2, 2])),
    Refusal("pass the dimension of its positions", _buffers([OWN], [4])),
    Refusal("pass it there too", _buffers([OWN.clone()], [2], no_restore_buffers={OWN}),
            _buffers([own := OWN.clone()], [2], no_restore_buffers={own})),
    Refusal("pass dropout_p=0.0", _in_context(dropout_p=0.5), _in_context(dropout_p=0.0)),
    Refusal("pass enable_gqa=True", _in_context(OWN, OWN[:, :2], OWN[:, :2]),
            _in_context(OWN, OWN[:, :2], OWN[:, :2], enable_gqa=True)),
    Refusal("pass this rank's part", lambda: one_rank(unshard)(OWN, 2, Shards.sizes([5])),
            lambda: one_rank(unshard)(OWN, 2, Shards.sizes([6]))),
    Refusal("pass the whole tensor", lambda: Shards.contiguous(6, 2).take(OWN[:, :, :3], 2, 0),
            lambda: Shards.contiguous(6, 2).take(OWN, 2, 0)),
    Refusal("pass those of all ranks in order", lambda: Shards.contiguous(6, 2).join([OWN[:, :, :3]], 2),
            lambda: Shards.contiguous(6, 2).join([OWN[:, :, :3], OWN[:, :, 3:]], 2)),
    Refusal("pass 0 to", lambda: Shards.contiguous(6, 2).count(2), lambda: Shards.contiguous(6, 2).count(1)),
    *(Refusal("pass a tuple for each rank, of pairs (first position, number of positions)",
              partial(Shards, runs), lambda: Shards((((0, 6),),)))
      for runs in ([[(0, 6)]], (((0, 6.0),),))),
    Refusal("pass a tuple for each rank, () for one without positions", lambda: Shards(()),
            lambda: Shards(((),))),
    Refusal("pass a first position of at least 0, and at least 1 position",
            lambda: Shards((((-1, 0),),)), lambda: Shards((((0, 1),),))),
    *(Refusal("pass runs that have every position from 0 on once",
              partial(Shards, (((0, 2),), ((first, 3),))), lambda: Shards((((0, 2),), ((2, 3),))))
      for first in (1, 3)),
    Refusal("sort them", lambda: Shards((((2, 1), (0, 2)),)), lambda: Shards((((0, 2), (2, 1)),))),
    Refusal("pass a number from 1 to", lambda: explain("prefill", OWN, OWN, OWN, ranks=0),
            lambda: explain("prefill", OWN, OWN, OWN, ranks=1)),
]  # fmt: skip
