"""Renders a record as a table."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from typing import Any

from ..peers.launch import OURS

Row = dict[str, Any]
Column = tuple[str, Callable[[Row, Row | None], str]]  # heading; cell, from a row and our row of its call

_WIDTH = 108


def render(record: dict[str, Any]) -> str:
    is_timed = record["backend"] != "counts"
    columns = _TIMED if is_timed else _COUNTED
    if any("passes_ms" in row for row in record["rows"]):
        columns = [*columns, ("ms of the passes", _passes)]
    lines = [f"{record['machine']}; {record['date']}; commit {record['versions'].get('commit', 'unknown')}"]
    if record["ceilings"]:
        read, products = record["ceilings"].get("read"), record["ceilings"].get("products")
        lines.append(
            f"ceilings measured in this run: reading {read:,.0f} GB/s, products {products:.1f} TFLOP/s"
        )
    lines += ["", *_body(record["rows"], columns)]
    lines += ["", *textwrap.wrap(_TIMED_NOTE if is_timed else _COUNTED_NOTE, _WIDTH)]
    return "\n".join(lines)


def _body(rows: list[Row], columns: list[Column]) -> Iterator[str]:
    numbers = {
        id(row): [cell(row, _ours(rows, row)) for _, cell in columns] for row in rows if "refused" not in row
    }
    headings = [heading for heading, _ in columns]
    widths = [max(map(len, column)) for column in zip(headings, *numbers.values(), strict=True)]
    margin = max(len(row["impl"]) for row in rows) + 2

    def spread(first: str, cells: list[str]) -> str:
        aligned = [f"{cell:>{width}}" for cell, width in zip(cells[:-1], widths[:-1], strict=True)]
        return f"  {first:{margin}}" + "  ".join([*aligned, cells[-1]]).rstrip()

    yield spread("", headings)
    call = None
    for row in rows:
        name = f"{row['op']:12} {row['call']}" + (f"  ({row['model']})" if row["model"] else "")
        if name != call:
            yield name
            call = name
        if "refused" in row:
            hang = " " * (margin + 2)
            text = f"  {row['impl']:{margin}}refused: {row['refused']}"
            yield from textwrap.wrap(text, _WIDTH, subsequent_indent=hang, drop_whitespace=True)
        else:
            yield spread(row["impl"], numbers[id(row)])


def _ours(rows: list[Row], row: Row) -> Row | None:
    same = ("op", "call", "model", "dtype")
    for other in rows:
        if other["impl"] == OURS and all(other[key] == row[key] for key in same) and "refused" not in other:
            return other
    return None


def _ratio(row: Row, ours: Row | None) -> str:
    if ours is None or row is ours:
        return ""
    return f"{row['ms_median'] / ours['ms_median']:.2f}"


def _over_bytes(row: Row, ours: Row | None) -> str:
    """Time divided by the time to read the bytes, for a decode, whose rate counts bytes."""
    return "" if row["op"] == "prefill" else f"{1 / row['ceiling_fraction']:.2f}"


def _passes(row: Row, ours: Row | None) -> str:
    return " + ".join(f"{time:.3f}" for time in row.get("passes_ms", ()))


def _spread(row: Row, ours: Row | None) -> str:
    return f"{(row['ms_max'] - row['ms_min']) / row['ms_median']:.0%}"


_TIMED: list[Column] = [
    ("ms", lambda row, ours: f"{row['ms_median']:.3f}"),
    ("time / ours", _ratio),
    ("rate", lambda row, ours: f"{row['rate']:,.1f} {row['rate_unit']}"),
    ("of ceiling", lambda row, ours: f"{row['ceiling_fraction']:.0%}"),
    ("time / bytes", _over_bytes),
    ("spread", _spread),
    ("max error", lambda row, ours: f"{row['max_error']:.1e}"),
]
_TIMED_NOTE = (
    "Decode: bytes that must move (each key and value once per key-value head) over time; the ceiling is "
    "pure reading. time / bytes: the time over that of reading these bytes. Prefill: operations of visible "
    "pairs over time; the ceiling is 8x8x8 products from registers. Linear attention: its operands and "
    "result once and its states twice over time, as for a decode; gated_delta_rule is the rule alone; "
    "gated_delta_step of ours is also the convolution, gates and norms of the layer, but the peers' is the "
    "rule alone, on operands of its own. Spread: (slowest - fastest) / median of the batches."
)


def _times(key: str) -> Callable[[Row, Row | None], str]:
    return lambda row, ours: f"{row['counts'][key]:.3f}"


def _products(row: Row, ours: Row | None) -> str:
    done = sum(dispatch["products"] for dispatch in row["counts"]["dispatches"])
    return f"{row['counts']['products_ratio']:.3f}" if done else "none"


def _staged(row: Row, ours: Row | None) -> str:
    """Bytes read and written in threadgroup memory, per least product."""
    dispatches = row["counts"]["dispatches"]
    moved = sum(d["threadgroup_read"] + d["threadgroup_written"] for d in dispatches)
    return f"{moved / row['counts']['least_products']:.0f}"


def _per_thousand(key: str) -> Callable[[Row, Row | None], str]:
    """The count per thousand least products, which makes samples of different sizes comparable."""

    def cell(row: Row, ours: Row | None) -> str:
        total = sum(dispatch[key] for dispatch in row["counts"]["dispatches"])
        return f"{1000 * total / row['counts']['least_products']:.1f}"

    return cell


def _counted_as(row: Row, ours: Row | None) -> str:
    return row["counted_as"] if row["counted_as"] != row["call"] else ""


_COUNTED: list[Column] = [
    ("K,V read", _times("cache_ratio")),
    ("bytes", _times("bytes_ratio")),
    ("partials", _times("partial_ratio")),
    ("products", _products),
    ("staged B", _staged),
    ("exps/pair", _times("exps_per_pair")),
    ("barriers", _per_thousand("threadgroup_barriers")),
    ("reductions", _per_thousand("simd_reductions")),
    ("shuffles", _per_thousand("shuffles")),
    ("counted as", _counted_as),
]
_COUNTED_NOTE = (
    "Counts, not times. K,V read: bytes read, as a multiple of each visible key and value once per "
    "key-value head. bytes, partials: multiples of the least bytes, which are those, the query and the "
    "output; partials are results that one dispatch leaves to the next, and are not part of `bytes`. Every "
    "lane's load counts, even if the lanes of a simdgroup share it. products: multiple of the 8x8x8 blocks "
    "that touch a visible pair. staged B: threadgroup bytes read and written per such block. barriers, "
    "reductions, shuffles: per 1,000 such blocks. counted as: the smaller call that was counted; its K,V "
    "read is that of the whole call, its `bytes` and `partials` are its own."
)
