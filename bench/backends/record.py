"""The record of a run, as `--json` writes it: one field per line, and one call per line.

In memory, `rows` has a row for each call and implementation. In the file, a line has the fields of the call
and, in `impls`, what was found for each implementation.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Record = dict[str, Any]
DIGITS = 7  # significant digits of a float; timing noise begins at the third
_OF_THE_CALL = (
    *("op", "model", "call", "part", "dtype", "batch", "q_heads", "kv_heads", "head_dim", "q_len", "kv_len"),
    *("causal", "options"),
)


def text(record: Record) -> str:
    rows = ",\n".join(json.dumps(_rounded(line)) for line in _lines(record["rows"]))
    fields = [
        f"{json.dumps(name)}: " + (f"[\n{rows}\n]" if name == "rows" else json.dumps(_rounded(value)))
        for name, value in record.items()
    ]
    return "{\n" + ",\n".join(fields) + "\n}\n"


def _lines(rows: list[Record]) -> list[Record]:
    lines: dict[str, Record] = {}
    for row in rows:
        call = {name: row[name] for name in _OF_THE_CALL if name in row}
        line = lines.setdefault(repr(call), {**call, "impls": {}})
        line["impls"][row["impl"]] = {name: row[name] for name in row if name not in ("impl", *call)}
    return list(lines.values())


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
    lines, record["rows"] = record["rows"], []
    for line in lines:
        impls = line.pop("impls")
        record["rows"] += [{**line, "impl": impl, **found} for impl, found in impls.items()]
    return record
