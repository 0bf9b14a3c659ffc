"""Mutants that compute the same, at the same cost: equivalents.txt has them by the reason.

A line at the margin is a reason. The indented lines below it are the mutants it holds for, as the report of
survivors prints them: file, function, line, and what the line becomes. So an entry outlives edits of other
lines.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from .operators import Key, Mutant

FILE = Path(__file__).with_name("equivalents.txt")


def load(path: Path = FILE) -> dict[Key, str]:
    """The reasons."""
    reasons: dict[Key, str] = {}
    reason = ""
    for line in path.read_text().splitlines():
        if line.startswith("  "):
            reasons[Key.of(line.strip())] = reason
        else:
            reason = line
    return reasons


def stale(reasons: Iterable[Key], mutants: Iterable[Mutant]) -> list[Key]:
    """Entries that name no mutant: their line has changed, so the reason has to be considered again."""
    known = {mutant.key for mutant in mutants}
    return [key for key in reasons if key not in known]
