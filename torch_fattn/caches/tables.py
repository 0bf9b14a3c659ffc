"""`Tables`: block tables and lengths of a cache's sequences, on the device. Indices are built there from runs
of consecutive numbers, or from those of the step before: copying them from the host would wait for the GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from .sequences import CachedSequence

FIRST_ROWS = 256  # of new tables


class StepTensors(NamedTuple):
    """The tensors of a `CacheStep`, which describes them."""

    rows: Tensor  # of its sequences in the tables, int64 [batch]
    seq_lens: Tensor
    numbers: Tensor  # positions and slots, int64 [2, tokens]
    block_tables: Tensor
    cu_seqlens_q: Tensor


class Tables:
    """A row for each sequence. If an update fails midway, its rows are stale: they are rewritten from the
    host's sequences before their next use. Entries of released blocks are arbitrary: no query row sees
    them."""

    def __init__(self, blocks: int, max_rows: int, block_size: int, device: torch.device | str) -> None:
        self.blocks = torch.empty(0, blocks, dtype=torch.int32, device=device)
        self._lengths = torch.empty(0, dtype=torch.int32, device=device)
        self._newest: StepTensors | None = None  # of `continued`, whose lengths are not among these
        self.max_rows = max_rows
        self._block_size = block_size
        self._free_rows: list[int] = []
        self._stale: set[int] = set()
        self._add_rows(min(max_rows, FIRST_ROWS))

    @property
    def nbytes(self) -> int:
        return self.blocks.nbytes + self._lengths.nbytes

    @property
    def device(self) -> torch.device:
        return self.blocks.device

    @property
    def lengths(self) -> Tensor:
        """`continued` leaves them as they are, since the next such step does not read them."""
        if self._newest is not None:
            self._lengths[self._newest.rows] = self._newest.seq_lens
            self._newest = None
        return self._lengths

    def new_row(self) -> int | None:
        """A row of length 0, or None if `max_rows` are in use."""
        if not self._free_rows:
            rows = len(self.blocks)
            self._add_rows(min(rows, self.max_rows - rows))
        if not self._free_rows:
            return None
        self.set_length(self._free_rows[-1], 0)
        return self._free_rows.pop()

    def free_row(self, row: int) -> None:
        self._stale.discard(row)
        self._free_rows.append(row)

    def set_length(self, row: int, length: int) -> None:
        self.lengths[row].fill_(length)

    def copy_row(self, source: int, copy: int, blocks: int) -> None:
        """Copies the first `blocks` entries and the length."""
        self.blocks[copy, :blocks].copy_(self.blocks[source, :blocks])
        self.lengths[copy].copy_(self.lengths[source])
        if source in self._stale:
            self._stale.add(copy)

    def write(self, row: int, first: int, blocks: Sequence[int]) -> None:
        if first + len(blocks) > self.blocks.shape[1]:  # with a window, a sequence can outgrow the pool
            self._add_columns(first + len(blocks))
        fill(self.blocks[row, first : first + len(blocks)], blocks)

    def begin(self, sequences: Sequence[CachedSequence]) -> None:
        """Call it before an update of these rows, and `done` after it. Writes stale rows again."""
        for sequence in sequences:
            if sequence.row in self._stale:
                self.write(sequence.row, 0, [max(block, 0) for block in sequence.blocks])
                self.set_length(sequence.row, sequence.length)
        self._stale.update(sequence.row for sequence in sequences)

    def done(self, sequences: Sequence[CachedSequence]) -> None:
        self._stale.difference_update(sequence.row for sequence in sequences)

    def extended(
        self, sequences: Sequence[CachedSequence], counts: Sequence[int], blocks: int
    ) -> StepTensors:
        """For a step with new tokens of these rows, whose tables already have the blocks."""
        rows, size = on_device([sequence.row for sequence in sequences], self.device), self._block_size
        tables = self.blocks[:, :blocks][rows]
        before = self.lengths[rows]
        new, sequence, offset, starts = _new_tokens(counts, self.device)
        numbers = torch.empty(2, sum(counts), dtype=torch.int64, device=self.device)
        positions = torch.add(before[sequence], offset, out=numbers[0])
        slot_blocks = tables[sequence, positions // size].long()
        torch.add(positions % size, slot_blocks, alpha=size, out=numbers[1])
        after = (before + new).int()
        self.lengths[rows] = after
        return StepTensors(rows, after, numbers, tables, starts)

    def continued(
        self, last: StepTensors, sequences: Sequence[CachedSequence], count: int, after: Sequence[list[int]]
    ) -> StepTensors:
        """`extended`, for as many new tokens of the same sequences as in the step before, if they have not
        changed since: two launches, and a few more for sequences that enter a block. `after`: their blocks
        then."""
        numbers, tables, size = last.numbers + count, last.block_tables, self._block_size
        changed = [blocks != own.blocks for own, blocks in zip(sequences, after, strict=True)]
        for n, (own, blocks) in enumerate(zip(sequences, after, strict=True)):
            new = range(own.length, own.length + count)
            if changed[n] or (new[0] - count) // size < new[-1] // size:
                slots = [blocks[p // size] * size + p % size for p in new]
                fill(numbers[1, n * count : (n + 1) * count], slots)
        if any(changed):
            tables = self.blocks[:, : max(map(len, after))][last.rows]
        self._newest = StepTensors(last.rows, last.seq_lens + count, numbers, tables, last.cu_seqlens_q)
        return self._newest

    @torch.inference_mode(False)  # rows outlive inference mode
    def _add_rows(self, count: int) -> None:
        """Rows are added on demand: a large `max_rows` allocates nothing."""
        first = len(self.blocks)
        blocks = torch.cat((self.blocks, self.blocks.new_full((count, self.blocks.shape[1]), -1)))
        lengths = torch.cat((self._lengths, self._lengths.new_zeros(count)))
        self.blocks, self._lengths = blocks, lengths
        self._free_rows += range(first + count - 1, first - 1, -1)

    @torch.inference_mode(False)
    def _add_columns(self, least: int) -> None:
        rows, columns = self.blocks.shape
        more = self.blocks.new_full((rows, max(least - columns, columns)), -1)
        self.blocks = torch.cat((self.blocks, more), 1)


def fill(out: Tensor, numbers: Sequence[int]) -> None:
    """Writes the numbers into a tensor on the device."""
    start = 0
    for end in range(1, len(numbers) + 1):
        if end == len(numbers) or numbers[end] != numbers[end - 1] + 1:
            run = out[start:end]
            torch.arange(numbers[start], numbers[end - 1] + 1, out=run, device=run.device)
            start = end


def on_device(numbers: Sequence[int], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """The numbers on the device."""
    out = torch.empty(len(numbers), dtype=dtype, device=device)
    fill(out, numbers)
    return out


def _new_tokens(counts: Sequence[int], device: torch.device) -> tuple[Tensor | int, Tensor, Tensor, Tensor]:
    """Packed tokens of several sequences: their counts (an int if all are equal), the index in the batch of
    each token's sequence, the token's index among the new ones of its sequence, and the first token of each
    sequence, and the end, int32."""
    token = torch.arange(sum(counts), device=device)
    if len(set(counts)) <= 1:
        each = counts[0] if counts else 0
        starts = torch.arange(len(counts) + 1, dtype=torch.int32, device=device) * each
        return each, token // max(each, 1), token % max(each, 1), starts
    numbers = on_device(counts, device)
    batch = torch.arange(len(counts), device=device)
    sequence = torch.repeat_interleave(batch, numbers, output_size=len(token))
    starts = pad(numbers.cumsum(0), (1, 0))
    return numbers, sequence, token - starts[sequence], starts.int()
