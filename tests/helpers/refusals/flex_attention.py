"""Refusals of flex_attention; see __init__.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask

from tests.helpers.public_calls import heads
from tests.helpers.refusals import Refusal
from torch_fattn import reference
from torch_fattn.integrations.flex_attention import flex_attention, mask_of

Q, KV = heads(2, 4, 40, 16), heads(2, 4, 48, 16, seed=1)
ROW, KEY = torch.arange(40)[:, None], torch.arange(48)


def causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return q_idx >= kv_idx


def block_mask(rows: int = 40, **options: Any) -> BlockMask:
    return create_block_mask(causal, None, None, rows, 48, device="cpu", **options)


def flex(*arguments: Any, **options: Any) -> Callable[[], Any]:
    return lambda: flex_attention(Q, KV, KV, *arguments, **options)


def _slice(**changes: Any) -> BlockMask:
    found = block_mask(BLOCK_SIZE=16)[:, :, 1:]
    for name, value in changes.items():
        setattr(found, name, value)
    return found


REFUSALS = [
    Refusal(
        "pass enable_gqa=True",
        lambda: flex_attention(Q, KV[:, :2], KV[:, :2]),
        lambda: flex_attention(Q, KV[:, :2], KV[:, :2], enable_gqa=True),
    ),
    Refusal(
        "make it with create_block_mask(mask_mod, None, None,",
        flex(block_mask=block_mask(rows=32)),
        flex(block_mask=block_mask()),
    ),
    Refusal('move it with .to("', flex(block_mask=block_mask().to("meta"))),
    Refusal(
        "set seq_lengths, and in a slice also mask_mod, to those of its rows",
        lambda: mask_of(_slice()),
        lambda: mask_of(_slice(mask_mod=lambda b, h, q, k: q + 16 >= k, seq_lengths=(24, 48))),
        lambda: (ROW[16:] >= KEY)[None, None],
    ),
    Refusal("in a slice also mask_mod", lambda: mask_of(_slice(seq_lengths=(24, 48)))),
    Refusal(
        "pass scale=, multiplied by it",
        flex(lambda s, b, h, q, k: 2 * s, scale=0.3),
        flex(scale=0.6),
        lambda: reference.prefill(Q, KV, KV, scale=0.6)[0],
    ),
    Refusal("pass return_aux alone", flex(return_lse=True, return_aux=AuxRequest(lse=True))),
    Refusal(
        "pass AuxRequest(lse=True) only",
        flex(return_aux=AuxRequest(lse=True, max_scores=True)),
        flex(return_aux=AuxRequest(lse=True)),
    ),
]
