"""`CacheStep`, the new tokens of a step, and `CacheFullError`."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from torch import Tensor

from .groups import Group
from .memory import Layers
from .tables import StepTensors


class CacheFullError(RuntimeError):
    """The cache has no room for the new tokens. It is unchanged."""


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class CacheStep:
    """New tokens of some sequences, packed in the order of the sequences, with the tensors that the kernels
    need. Do not write to them: steps share block tables and starts that stay the same."""

    sequences: tuple[int, ...]
    lengths: tuple[int, ...]  # including the new tokens
    seq_lens: Tensor  # the same on the device, int32 [batch]
    positions: Tensor  # of each new token in its sequence, int64 [tokens]
    slot_mapping: Tensor  # slot of each new token, int64 [tokens]
    block_tables: Tensor  # int32 [batch, blocks of the longest]; static: [batch, 1]
    cu_seqlens_q: Tensor  # where each sequence's new tokens begin, int32 [batch + 1]
    max_seqlen_q: int  # the largest number of new tokens of a sequence
    shared_blocks: int = 0  # paged: leading blocks common to all sequences
    _tensors: StepTensors
    _layers: Layers  # of the cache that made this step
    _counts: tuple[int, ...]  # new tokens of each sequence
    _change: int  # the count of changes to the cache when this step was made
    _lacking: AbstractSet[int]  # layers that already lacked tokens when this step was made
    _appended: set[int] = field(default_factory=set)
    _groups: dict[int, list[Group]] = field(default_factory=dict)  # by the number of rows

    def __repr__(self) -> str:  # without tensors: reading them waits for the GPU
        return (
            f"CacheStep(sequences={self.sequences}, lengths={self.lengths}, "
            f"max_seqlen_q={self.max_seqlen_q}, shared_blocks={self.shared_blocks})"
        )

    def _check_appended(self, method: str, layer: int) -> None:
        if layer not in self._appended and self.slot_mapping.numel() > 0:
            raise ValueError(
                f"{method}: layer {layer} does not have this step's tokens yet; append() them first"
            )

    def _check_query(self, method: str, query: Tensor) -> None:
        if query.dim() != 4:
            raise ValueError(
                f"{method}: query has {query.dim()} dimensions; its shape must be [batch, heads, rows, "
                "head_dim] or [tokens, heads, head_dim]"
            )
        if query.shape[0] != len(self.sequences):
            raise ValueError(
                f"{method}: query has batch size {query.shape[0]} and the step {len(self.sequences)} "
                "sequences; pass the rows of each"
            )
        most = max(self.max_seqlen_q, 1)  # a step without new tokens may repeat the newest row
        if query.shape[2] > most:
            raise ValueError(
                f"{method}: query has {query.shape[2]} rows of each sequence and the step at most "
                f"{self.max_seqlen_q} new tokens; pass at most {most}"
            )

    def _unpacked(self, method: str, query: Tensor) -> Tensor:
        """Reshapes the packed rows of a decode to `[batch, heads, rows, head_dim]`."""
        if len(set(self._counts)) > 1:
            raise ValueError(
                f"{method}: query is packed and the step has {min(self._counts)} to {self.max_seqlen_q} new "
                "tokens of a sequence; pass the packed rows of such a step to prefill()"
            )
        batch, rows = len(self.sequences), max(self.max_seqlen_q, 1)
        if query.shape[0] != batch * rows:
            raise ValueError(
                f"{method}: query has {query.shape[0]} packed rows and the step {batch} sequences of {rows}; "
                f"pass {batch * rows} rows"
            )
        return query.unflatten(0, (batch, rows)).transpose(1, 2)

    def _check_packed(self, method: str, rows: Tensor, what: str, shape: str) -> None:
        """`shape`: of a row."""
        tokens, dims = self.slot_mapping.shape[0], shape.count(",") + 2
        if rows.dim() != dims:
            raise ValueError(
                f"{method}: {what} has {rows.dim()} dimensions; its shape must be [tokens, {shape}]"
            )
        if rows.shape[0] != tokens:
            raise ValueError(
                f"{method}: {what} has {rows.shape[0]} rows and the step {tokens} new tokens; pass one row "
                "for each"
            )
