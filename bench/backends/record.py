"""The record of a run, as `--json` writes it: one field per line, and one measured row per line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Record = dict[str, Any]
DIGITS = 7  # significant digits of a float; timing noise begins at the third


def text(record: Record) -> str:
    rows = ",\n".join(json.dumps(_rounded(row)) for row in record["rows"])
    fields = [
        f"{json.dumps(name)}: " + (f"[\n{rows}\n]" if name == "rows" else json.dumps(_rounded(value)))
        for name, value in record.items()
    ]
    return "{\n" + ",\n".join(fields) + "\n}\n"


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {name: _rounded(one) for name, one in value.items()}
    return [_rounded(one) for one in value] if isinstance(value, list | tuple) else value


def write(record: Record, path: Path) -> None:
    path.write_text(text(record))


def read(path: Path) -> Record:
    record: Record = json.loads(path.read_text())
    return record
