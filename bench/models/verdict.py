"""One aim beside what a record of the bench says of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]


@dataclass(frozen=True)
class Verdict:
    aim: str
    wanted: str
    found: str
    met: bool
