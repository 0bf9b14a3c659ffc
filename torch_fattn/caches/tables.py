"""`Tables`: block tables and lengths of a cache's sequences, on the device. Indices are built there from runs
of consecutive numbers: copying them from the host would wait for the GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from .sequences import CachedSequence

FIRST_ROWS = 256  # of new tables


class Tables:
    """A row for each sequence. If an update fails midway, its rows are stale: they are rewritten from the
    host's sequences before their next use. Entries of released blocks are arbitrary: no query row sees
    them."""

    def __init__(self, blocks: int, max_rows: int, device: torch.device | str) -> None:
        self.blocks = torch.empty(0, blocks, dtype=torch.int32, device=device)
        self.lengths = torch.empty(0, dtype=torch.int32, device=device)
        self.max_rows = max_rows
        self._free_rows: list[int] = []
        self._stale: set[int] = set()
        self._add_rows(min(max_rows, FIRST_ROWS))

    @property
    def nbytes(self) -> int:
        return self.blocks.nbytes + self.lengths.nbytes

    @property
    def device(self) -> torch.device:
        return self.lengths.device

    def new_row(self) -> int | None:
        """A row of length 0, or None if `max_rows` are in use."""
        if not self._free_rows:
            rows = len(self.lengths)
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
        self, sequences: Sequence[CachedSequence], counts: Sequence[int], blocks: int, block_size: int
    ) -> dict[str, Any]:
        """Adds new tokens to the lengths of these rows, whose tables already have the blocks. Returns the
        tensors of a step."""
        rows = on_device([sequence.row for sequence in sequences], self.device)
        tables = self.blocks[:, :blocks][rows]
        before = self.lengths[rows]
        new, sequence, offset, starts = _new_tokens(counts, self.device)
        positions = before[sequence] + offset
        slot_blocks = tables[sequence, positions // block_size].long()
        after = (before + new).int()
        slots = slot_blocks * block_size + positions % block_size
        self.lengths[rows] = after
        return {
            "seq_lens": after,
            "positions": positions,
            "slot_mapping": slots,
            "block_tables": tables,
            "cu_seqlens_q": starts,
        }

    @torch.inference_mode(False)  # rows outlive inference mode
    def _add_rows(self, count: int) -> None:
        """Rows are added on demand: a large `max_rows` allocates nothing."""
        first = len(self.lengths)
        blocks = torch.cat((self.blocks, self.blocks.new_full((count, self.blocks.shape[1]), -1)))
        lengths = torch.cat((self.lengths, self.lengths.new_zeros(count)))
        self.blocks, self.lengths = blocks, lengths
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


def on_device(numbers: Sequence[int], device: torch.device) -> Tensor:
    """The numbers as int64 on the device."""
    out = torch.empty(len(numbers), dtype=torch.int64, device=device)
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
