"""Mutants that compute the same, at the same cost: equivalents.json, each group of them with the reason."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from .operators import Key, Mutant

FILE = Path(__file__).with_name("equivalents.json")


def load(path: Path = FILE) -> dict[Key, str]:
    """The reasons. An entry names a mutant by file, function, line and what the line becomes, so it outlives
    edits of all other lines."""
    return {
        Key(**entry): group["reason"] for group in json.loads(path.read_text()) for entry in group["mutants"]
    }


def stale(reasons: Iterable[Key], mutants: Iterable[Mutant]) -> list[Key]:
    """Entries that name no mutant: their line has changed, and what was said of it is to be thought over."""
    known = {mutant.key for mutant in mutants}
    return [key for key in reasons if key not in known]
