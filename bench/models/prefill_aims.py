"""What prefill is held to on an NVIDIA GPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..cases.calls import SHAPES, Call
from ..peers.launch import OURS, OURS_ON_M1
from .verdict import Row, Verdict

# Of the time of the faster peer.
AHEAD = {OURS: 1.8, OURS_ON_M1: 1.3}
AHEAD_SHORT = 1.5  # prompts of 512 rows
WIDE, WIDE_PEER = (256, 512), "llama-metal"  # head sizes that are ahead of llama.cpp's kernel
LONG = 8192
SHARE = 0.70  # of the measured ceiling of 8x8 products, at LONG rows
# How fast products are beside those of D=128.
BESIDE = {40: 0.85, 72: 0.85, 80: 0.85, 96: 0.85, 112: 0.85, 256: 1 / 1.5, 512: 1 / 1.5}
BASE = Call("prefill", 32, 32, 128, 2048, 2048, causal=True)


def verdicts(record: dict[str, Any]) -> Iterator[Verdict]:
    """Of every aim. A call that is not in the record, or that was refused, misses its aim."""
    rows: list[Row] = record["rows"]
    for call in SHAPES["prefill"]:
        if call.head_dim in (64, 96, 128):
            yield from _ahead(rows, call)
        if call.head_dim in WIDE:
            yield from _ahead_of_llama(rows, call)
        if call.head_dim in (64, 96, 128) and call.kv_len == LONG:
            yield _share(rows, call)
    for head_dim, wanted in BESIDE.items():
        yield _beside(rows, head_dim, wanted)


def _timed(rows: Sequence[Row], call: Call) -> dict[str, Row]:
    """By implementation."""
    same = {"op": call.op, "call": str(call), "dtype": call.dtype}
    return {
        row["impl"]: row
        for row in rows
        if "refused" not in row and all(row[name] == value for name, value in same.items())
    }


def _ahead(rows: Sequence[Row], call: Call) -> Iterator[Verdict]:
    timed = _timed(rows, call)
    peers = [row for impl, row in timed.items() if impl not in AHEAD]
    nearest = min(peers, key=lambda row: float(row["ms_median"]), default=None)
    for impl, ahead in AHEAD.items():
        wanted = min(ahead, AHEAD_SHORT) if call.kv_len < 2048 else ahead
        yield _over(call, nearest, "a peer", timed, impl, wanted)


def _ahead_of_llama(rows: Sequence[Row], call: Call) -> Iterator[Verdict]:
    timed = _timed(rows, call)
    for impl in AHEAD:
        yield _over(call, timed.get(WIDE_PEER), WIDE_PEER, timed, impl, 1.0)


def _over(
    call: Call, peer: Row | None, name: str, timed: Mapping[str, Row], impl: str, wanted: float
) -> Verdict:
    """How often the peer's time holds ours."""
    row = timed.get(impl) or timed.get(OURS)  # one plan for all chips
    found = peer["ms_median"] / row["ms_median"] if peer and row else 0.0
    shown = f"{found:.2f}x" if found else "not measured"
    aim = f"prefill {call}: time of {peer['impl'] if peer else name} over {impl}"
    return Verdict(aim, f">= {wanted:.2f}x", shown, found >= wanted)


def _share(rows: Sequence[Row], call: Call) -> Verdict:
    row = _timed(rows, call).get(OURS)
    found = row["ceiling_fraction"] if row else 0.0
    shown = f"{found:.0%}" if row else "not measured"
    return Verdict(f"prefill {call}: share of the products", f">= {SHARE:.0%}", shown, found >= SHARE)


def _beside(rows: Sequence[Row], head_dim: int, wanted: float) -> Verdict:
    row, base = (next((row for row in rows if _is(row, dim)), None) for dim in (head_dim, BASE.head_dim))
    found = row["rate"] / base["rate"] if row and base else 0.0
    shown = f"{found:.2f}" if found else "not measured"
    name = f"prefill D={head_dim}: products a second beside D={BASE.head_dim}"
    return Verdict(name, f">= {wanted:.2f}", shown, found >= wanted)


def _is(row: Row, head_dim: int) -> bool:
    """Ours for that head size, otherwise like BASE."""
    fields = ("op", "q_heads", "kv_heads", "q_len", "kv_len", "causal", "dtype")
    same = all(row[name] == getattr(BASE, name) for name in fields)
    return same and row["head_dim"] == head_dim and row["impl"] == OURS and "refused" not in row
