"""Parses csrc/plan/tuning.h: the kernel of each row, and the text of the row in `explain`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

TUNING = Path(__file__).resolve().parents[2] / "csrc/plan/tuning.h"
LIMITS = {
    "dtypes": "{}",
    "formats": "{}",
    "max_dim": "D <= {}",
    "min_family": "family {} and later",
    "registers": "scores in registers",
}
SETS = {
    "k16Bit": "16-bit",
    "kFloat32s": "float32",
    "kFloat16s": "float16",
    "kBFloat16s": "bfloat16",
    "kQuantised": "quantised cache",
    "kInt8AndFp8": "int8 or fp8 cache",
    "kInt4s": "int4 cache",
}


class Row(NamedTuple):
    kernel: str
    text: str


def rows(text: str, family: int | None = None) -> set[Row]:
    """The rows of a text like tuning.h. `family`: those of simdgroup matrices, whose min_family is this."""
    sources = dict(re.findall(r'char\* (k\w+) = "(.*)";', text))
    found = set()
    for table, body in re.findall(r" k(\w+)Tuning\{\{\n(.*?)^\}\}", text, re.M | re.S):
        for scope in re.findall(r"^    \{\{(.*?)\}", body, re.M | re.S):
            fields = dict(re.findall(r"\.(\w+) = (\w+)", scope))
            values = {name: SETS.get(value, value) for name, value in fields.items()}
            limits = [text.format(values[name]) for name, text in LIMITS.items() if name in values]
            source = sources[fields["source"]]
            kernel = re.sub(r"(?<=\w)([A-Z])", r"_\1", table).lower()
            if family is None or ("tensor" not in kernel and int(fields.get("min_family", 0)) == family):
                found.add(Row(kernel, f"{', '.join(limits)} ({source})" if limits else source))
    return found


def used(kernel: str, tuning: str) -> Row:
    """The row that a kernel of a plan uses, found by its text in the plan."""
    table = kernel.removeprefix("fattn_").replace("latent_", "")
    if table.endswith("_tensor"):
        table = re.sub("_(query|key)", "", table)
    of_rows, _, of_keys = tuning.removeprefix("rows: ").partition("; keys: ")
    return Row(table, of_keys if of_keys and "_key" in kernel else of_rows)
