"""Refusals of sparse_decode; see __init__.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.helpers.public_calls import heads
from tests.helpers.refusals import Refusal
from torch_fattn import reference, sparse_decode

QUERY, KEY, VALUE = heads(2, 4, 3, 16), heads(2, 2, 10, 16, seed=1), heads(2, 2, 10, 16, seed=2)
EVERY = torch.arange(10, dtype=torch.int32).expand(2, 3, 10)
LENGTHS = torch.tensor([10, 10], dtype=torch.int32)
TABLES = torch.arange(2, dtype=torch.int32)[:, None]
SINKS = torch.tensor([1.0, -1.0, 0.0, 2.0])


def call(**changes: Any) -> Callable[[], Tensor]:
    operands = {"query": QUERY, "key": KEY, "value": VALUE, "indices": EVERY}
    return lambda: sparse_decode(**(operands | changes))


def paged(**changes: Any) -> Callable[[], Tensor]:
    pools = {"key": KEY.transpose(1, 2), "value": VALUE.transpose(1, 2)}
    return call(**pools, **({"block_tables": TABLES, "seq_lens": LENGTHS} | changes))


def _head_by_head() -> Tensor:
    parts = [
        call(
            query=QUERY[:, 2 * h : 2 * h + 2],
            key=KEY[:, h : h + 1],
            value=VALUE[:, h : h + 1],
            sinks=SINKS[2 * h : 2 * h + 2],
        )()
        for h in range(2)
    ]
    return torch.cat(parts, 1)


OTHER_LAYOUT = VALUE.transpose(1, 2).contiguous().transpose(1, 2)
FAR_APART = torch.empty_strided((2, 2, 10, 16), (2**35, 160, 16, 1), device="meta")  # has no memory
REFUSALS = [
    Refusal(
        "call it for each key-value head, with indices [B, Lq, K]",
        call(indices=EVERY[:, None].expand(-1, 2, -1, -1), sinks=SINKS),
        _head_by_head,
        lambda: reference.prefill(QUERY, KEY, VALUE, is_causal=True, sinks=SINKS)[0],
    ),
    Refusal("pass the length of each sequence", paged(seq_lens=None), paged()),
    Refusal("max_blocks]", paged(block_tables=TABLES[:, 0])),
    Refusal("pass [2]", call(seq_lens=LENGTHS[:1]), call(seq_lens=LENGTHS)),
    Refusal("pass a multiple of", call(query=QUERY[:, :3])),
    Refusal(
        "to select for each key-value head",
        call(indices=EVERY[0]),
        call(indices=EVERY[:, None].expand(-1, 2, -1, -1)),
    ),
    Refusal(
        "allocate both in the same layout, as StaticKVCache and PagedKVCache do", call(value=OTHER_LAYOUT)
    ),
    Refusal(
        "use a smaller cache, or strides with a larger common divisor",
        call(query=QUERY.to("meta"), key=FAR_APART, value=FAR_APART, indices=EVERY.to("meta")),
    ),
]
