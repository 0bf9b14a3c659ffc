"""Mutants with the same results at the same cost: equivalents.txt lists them by reason.

A line at the margin is a reason. The indented lines below it are its mutants, as the report of survivors
prints them: file, function, line, and the changed line. An entry stays valid when other lines change.
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
    """Entries that name no mutant, because their line has changed: the reason must be checked again."""
    known = {mutant.key for mutant in mutants}
    return [key for key in reasons if key not in known]
