"""Groups of sequences that share a prefix. A decode reads the prefix once per group. Host numbers only."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .tables import on_device


@dataclass(frozen=True)
class Group:
    members: list[int]  # indices in the batch
    blocks: int  # length of the common prefix

    @property
    def saved(self) -> int:
        """The number of block reads that the group saves."""
        return (len(self.members) - 1) * self.blocks

    def of(self, tensor: Tensor) -> Tensor:
        """The rows of the members."""
        first, end = self.members[0], self.members[-1] + 1
        if self.members == list(range(first, end)):
            return tensor[first:end]
        return tensor[on_device(self.members, tensor.device)]


def common_beginning(tables: Sequence[list[int]]) -> int:
    """The length of the common prefix of all tables: it is that of the smallest and the largest."""
    if not tables:
        return 0
    least, greatest = min(tables), max(tables)
    pairs = enumerate(zip(least, greatest, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(least), len(greatest)))


def find_groups(tables: Sequence[list[int]]) -> list[Group]:
    """The groups that save the most reads, then one of all sequences that share nothing. A sequence's group
    depends only on sequences with the same first block."""
    groups = _split(tables, list(range(len(tables))), 0)
    alone = {*range(len(tables))} - {member for group in groups for member in group.members}
    return groups + ([Group(sorted(alone), 0)] if alone else [])


def _split(tables: Sequence[list[int]], members: list[int], depth: int) -> list[Group]:
    """Groups of members whose first `depth` blocks are equal."""
    by_block = defaultdict(list)
    for member in members:
        if len(tables[member]) > depth:
            by_block[tables[member][depth]].append(member)
    groups = []
    for own in by_block.values():
        if len(own) > 1:
            whole = Group(own, common_beginning([tables[member] for member in own]))
            parts = _split(tables, own, whole.blocks)
            groups += parts if sum(part.saved for part in parts) > whole.saved else [whole]
    return groups


def in_order(results: Sequence[Tensor], groups: Sequence[Group]) -> Tensor:
    """The rows of all groups, in batch order."""
    joined = torch.cat(list(results))
    places = [member for group in groups for member in group.members]
    if places == sorted(places):
        return joined
    return joined[on_device(sorted(range(len(places)), key=places.__getitem__), joined.device)]
