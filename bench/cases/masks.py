"""Masks by name, as bool tensors `[rows, keys]`: those of packed samples, prefix language models and
block-sparse attention."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

BLOCK = 64
DESCRIPTIONS = {
    "documents": "packed documents",
    "causal-documents": "packed documents, causal",
    "prefix": "a prefix that all rows see",
    "blocks": f"blocks of {BLOCK}",
}


@functools.lru_cache(maxsize=4)
def named(name: str, rows: int, keys: int) -> Tensor:
    """In `documents:512` and `causal-documents:512`, documents have 512 to 768 tokens."""
    kind, _, shortest = name.partition(":")
    causal = torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows)
    if kind == "prefix":
        return causal | (torch.arange(keys) < keys * 3 // 10)
    if kind == "blocks":
        blocks = torch.rand(-(-rows // BLOCK), -(-keys // BLOCK), generator=torch.Generator().manual_seed(0))
        return (blocks < 0.3).repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:rows, :keys]
    documents = _documents(max(rows, keys), int(shortest))
    same = documents[-rows:, None] == documents[None, -keys:]
    return same & causal if kind == "causal-documents" else same


def _documents(length: int, shortest: int) -> Tensor:
    """Returns the number of each token's document."""
    ends, end = torch.zeros(length, dtype=torch.int64), 0
    while (end := end + shortest + 37 * (end + 1) % (shortest // 2 + 1)) < length:
        ends[end] = 1
    return ends.cumsum(0)


def blocks_of_8(mask: Tensor) -> int:
    """Counts the blocks of 8 rows x 8 keys that hold a visible pair."""
    rows, keys = mask.shape
    padded = torch.nn.functional.pad(mask, (0, -keys % 8, 0, -rows % 8))
    return int(padded.unflatten(1, (-1, 8)).unflatten(0, (-1, 8)).any(3).any(1).sum())
