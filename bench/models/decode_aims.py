"""What decode is held to on an NVIDIA GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ..peers.launch import OURS, OURS_ON_M1
from .verdict import Row, Verdict

LONG = 131072


def verdicts(record: dict[str, Any]) -> Iterator[Verdict]:
    """Of every aim. A call that is not in the record, or that was refused, misses its aim."""
    ours = [row for row in record["rows"] if row["impl"] == OURS]
    for batch, keys, share in ((1, LONG, 0.85), (1, 32768, 0.72), (16, 8192, 0.88)):
        yield _share(ours, share, batch=batch, kv_len=keys)
    for group in (1, 4, 8, 16):
        yield _share(ours, 0.75, f"group of {group}, ", kv_heads=32 // group)
    for head_dim in (64, 96, 256):
        yield _share(ours, 0.75, f"D={head_dim}, ", head_dim=head_dim)
    dense = _find(ours)
    paged = _find(ours, op="paged_decode", options={"block_size": 16})
    yield _faster("pages of 16 beside a dense cache", 0.95, paged, dense)
    yield _faster("int8 cache beside float16", 1.7, _find(ours, options={"kv_format": "int8"}), dense)
    yield _uneven(ours)
    yield from _ahead(record["rows"], ours)


def _find(rows: Sequence[Row], **wanted: Any) -> Row | None:
    """The timed decode with these fields; what is not named is 32/8 heads of 128, B1, N=131072, float16."""
    plain = {"op": "decode", "batch": 1, "q_heads": 32, "kv_heads": 8, "head_dim": 128, "q_len": 1}
    fields = {**plain, "kv_len": LONG, "dtype": "float16", "options": {}, **wanted}
    for row in rows:
        if "refused" not in row and all(row[name] == value for name, value in fields.items()):
            return row
    return None


def _share(rows: Sequence[Row], wanted: float, words: str = "", **fields: Any) -> Verdict:
    row = _find(rows, **fields)
    found = row["ceiling_fraction"] if row else 0.0
    name = f"decode {words}B{fields.get('batch', 1)} N={fields.get('kv_len', LONG)}"
    return Verdict(
        f"{name}: share of read bandwidth", f">= {wanted:.0%}", _shown(row, f"{found:.0%}"), found >= wanted
    )


def _faster(name: str, wanted: float, row: Row | None, base: Row | None) -> Verdict:
    found = base["ms_median"] / row["ms_median"] if row and base else 0.0
    return Verdict(
        f"{name}: speed", f">= {wanted:.2f}x", _shown(row and base, f"{found:.2f}x"), found >= wanted
    )


def _uneven(rows: Sequence[Row], wanted: float = 1.3) -> Verdict:
    lengths = [65536, *[512] * 15]
    row = _find(rows, batch=16, kv_len=lengths[0], options={"seq_lens": lengths})
    found = 1 / row["ceiling_fraction"] if row else 0.0
    name = "one sequence of 65536 and 15 of 512: time over that of its bytes"
    return Verdict(name, f"<= {wanted:.2f}x", _shown(row, f"{found:.2f}x"), 0 < found <= wanted)


def _shown(row: Row | None, text: str) -> str:
    return text if row else "not measured"


def _ahead(rows: Sequence[Row], ours: Sequence[Row]) -> Iterator[Verdict]:
    """The nearest peer of every decode."""
    for mine in ours:
        if "refused" in mine or mine["op"] == "prefill":
            continue
        same = ("op", "call", "dtype")
        peers = [
            row
            for row in rows
            if row["impl"] not in (OURS, OURS_ON_M1)
            and "refused" not in row
            and all(row[key] == mine[key] for key in same)
        ]
        if peers:
            nearest = min(peers, key=lambda row: float(row["ms_median"]))
            found = nearest["ms_median"] / mine["ms_median"]
            aim = f"{mine['op']} {mine['call']}: time of {nearest['impl']} over ours"
            yield Verdict(aim, "> 1.00x", f"{found:.2f}x", found > 1)
