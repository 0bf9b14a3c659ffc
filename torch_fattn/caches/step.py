"""What a cache says of new tokens, and that it has no room for them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ..runtime.signatures import check_tensor

__all__ = ["CacheFullError", "CacheStep"]


class CacheFullError(RuntimeError):
    """There is no room for what was asked. The cache is as it was before."""


@dataclass(frozen=True, eq=False)
class CacheStep:
    """New tokens of some sequences, packed in their order, and what the kernels must know of them."""

    sequences: tuple[int, ...]
    lengths: tuple[int, ...]  # with the new tokens
    seq_lens: Tensor  # the same on the device, int32 [batch]
    positions: Tensor  # of the new tokens in their sequences, int64 [tokens]
    slot_mapping: Tensor  # where they go, int64 [tokens]
    block_tables: Tensor | None = None  # paged: int32 [batch, blocks of the longest]
    cu_seqlens_q: Tensor | None = None  # paged: where each sequence's new tokens begin, int32 [batch + 1]
    max_seqlen_q: int = 0  # the most new tokens of a sequence
    shared_blocks: int = 0  # paged: leading blocks that are the same in all sequences
    _cache: Any = None  # whose step it is: a paged cache, or the memory of a static one, which holds its step
    _change: int = 0  # of the cache, when this was made
    _appended: set[int] = field(default_factory=set)

    def _check_appended(self, method: str, layer: int) -> None:
        if layer not in self._appended and self.slot_mapping.numel() > 0:
            raise ValueError(f"{method}: layer {layer} has not got this step's tokens; append() them first")

    def _check_query(self, method: str, query: Tensor) -> None:
        check_tensor(method, "query", query, "[batch, heads, rows, head_dim]")
        if query.dim() != 4:
            raise ValueError(
                f"{method}: query has {query.dim()} dimensions; its shape must be [batch, heads, rows, "
                "head_dim]"
            )
        if query.shape[0] != len(self.sequences):
            raise ValueError(
                f"{method}: query has batch size {query.shape[0]} and the step {len(self.sequences)} "
                "sequences; pass the rows of each"
            )
        most = max(self.max_seqlen_q, 1)  # the newest token again in a step without new ones
        if query.shape[2] > most:
            raise ValueError(
                f"{method}: query has {query.shape[2]} rows of each sequence and the step at most "
                f"{self.max_seqlen_q} new tokens; pass at most {most}"
            )
