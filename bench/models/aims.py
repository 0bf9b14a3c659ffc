"""Aims for our kernels on an NVIDIA GPU, and the comparison of a record with them:

    python -m bench --backend cuda --shapes standard decode prefill --json results.json
    python -m bench aims results.json       # exits with 1 if an aim is missed

A call that is missing from the record, or was refused, misses its aim.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..backends import record
from ..cases.arguments import Parser
from ..cases.calls import Call
from ..cases.shapes import SHAPES
from ..peers.launch import OURS, OURS_ON_M1

Row = dict[str, Any]


@dataclass(frozen=True)
class Verdict:
    aim: str
    required: str
    measured: str
    met: bool


def _shown(row: Row | None, text: str) -> str:
    return text if row else "not measured"


# ---- decode

LONGEST = 131072
DECODE_SHARES = ((1, LONGEST, 0.85), (1, 32768, 0.72), (16, 8192, 0.88))  # batch, keys, share of bandwidth
DECODE_SHARE = 0.75  # for every group size, and for other head sizes
PAGED_SPEED = 0.95  # over a dense cache
INT8_SPEED = 1.7  # over a float16 cache
UNEVEN_TIME = 1.3  # over the time of reading the bytes


def decode(rows: Sequence[Row]) -> Iterator[Verdict]:
    ours = [row for row in rows if row["impl"] == OURS]
    for batch, keys, share in DECODE_SHARES:
        yield _decode_share(ours, share, batch=batch, kv_len=keys)
    for group in (1, 4, 8, 16):
        yield _decode_share(ours, DECODE_SHARE, f"group of {group}, ", kv_heads=32 // group)
    for head_dim in (64, 96, 256):
        yield _decode_share(ours, DECODE_SHARE, f"D={head_dim}, ", head_dim=head_dim)
    dense = _find_decode(ours)
    paged = _find_decode(ours, op="paged_decode", options={"block_size": 16})
    int8 = _find_decode(ours, options={"kv_format": "int8"})
    yield _speed("pages of 16 against a dense cache", PAGED_SPEED, paged, dense)
    yield _speed("int8 cache against float16", INT8_SPEED, int8, dense)
    yield _uneven(ours)
    for row in ours:
        if "refused" not in row and row["op"] != "prefill":
            yield from _ahead_of_peers(row, rows)


def _find_decode(rows: Sequence[Row], **fields: Any) -> Row | None:
    """Finds the timed decode with these fields; by default 32/8 heads of 128, B1, N=131072, float16."""
    plain = {"op": "decode", "batch": 1, "q_heads": 32, "kv_heads": 8, "head_dim": 128, "q_len": 1}
    fields = {**plain, "kv_len": LONGEST, "dtype": "float16", "options": {}, **fields}
    for row in rows:
        if "refused" not in row and all(row[name] == value for name, value in fields.items()):
            return row
    return None


def _decode_share(rows: Sequence[Row], required: float, words: str = "", **fields: Any) -> Verdict:
    row = _find_decode(rows, **fields)
    share = row["ceiling_fraction"] if row else 0.0
    name = f"decode {words}B{fields.get('batch', 1)} N={fields.get('kv_len', LONGEST)}"
    aim = f"{name}: share of read bandwidth"
    return Verdict(aim, f">= {required:.0%}", _shown(row, f"{share:.0%}"), share >= required)


def _speed(name: str, required: float, row: Row | None, base: Row | None) -> Verdict:
    speed = base["ms_median"] / row["ms_median"] if row and base else 0.0
    measured = _shown(row and base, f"{speed:.2f}x")
    return Verdict(f"{name}: speed", f">= {required:.2f}x", measured, speed >= required)


def _uneven(rows: Sequence[Row]) -> Verdict:
    lengths = [65536, *[512] * 15]
    row = _find_decode(rows, batch=16, kv_len=lengths[0], options={"seq_lens": lengths})
    time = 1 / row["ceiling_fraction"] if row else 0.0
    aim = "one sequence of 65536 and 15 of 512: time over that of its bytes"
    return Verdict(aim, f"<= {UNEVEN_TIME:.2f}x", _shown(row, f"{time:.2f}x"), 0 < time <= UNEVEN_TIME)


def _ahead_of_peers(ours: Row, rows: Sequence[Row]) -> Iterator[Verdict]:
    """Compares one of our decodes with the fastest peer."""
    same = ("op", "call", "dtype")
    peers = [
        row
        for row in rows
        if row["impl"] not in (OURS, OURS_ON_M1)
        and "refused" not in row
        and all(row[key] == ours[key] for key in same)
    ]
    if peers:
        fastest = min(peers, key=lambda row: float(row["ms_median"]))
        speedup = fastest["ms_median"] / ours["ms_median"]
        aim = f"{ours['op']} {ours['call']}: time of {fastest['impl']} over ours"
        yield Verdict(aim, "> 1.00x", f"{speedup:.2f}x", speedup > 1)


# ---- prefill

SPEEDUP = {OURS: 1.8, OURS_ON_M1: 1.3}  # over the fastest peer
SHORT_SPEEDUP = 1.5  # at most, for prompts of 512 rows
WIDE, WIDE_PEER = (256, 512), "llama-metal"  # head sizes that must be faster than this peer's
LONG_PROMPT = 8192
PREFILL_SHARE = 0.70  # of the measured ceiling of 8x8 products, for LONG_PROMPT rows
# Products per second of a head size, over those of D=128.
RELATIVE_RATE = {40: 0.85, 72: 0.85, 80: 0.85, 96: 0.85, 112: 0.85, 256: 1 / 1.5, 512: 1 / 1.5}
BASE = Call("prefill", 32, 32, 128, 2048, 2048, causal=True)


def prefill(rows: Sequence[Row]) -> Iterator[Verdict]:
    for call in SHAPES["prefill"]:
        timed = _timed(rows, call)
        if call.head_dim in (64, 96, 128):
            peers = [row for impl, row in timed.items() if impl not in SPEEDUP]
            fastest = min(peers, key=lambda row: float(row["ms_median"]), default=None)
            for impl, speedup in SPEEDUP.items():
                required = min(speedup, SHORT_SPEEDUP) if call.kv_len < 2048 else speedup
                yield _speedup(call, fastest, "a peer", timed, impl, required)
        if call.head_dim in WIDE:
            for impl in SPEEDUP:
                yield _speedup(call, timed.get(WIDE_PEER), WIDE_PEER, timed, impl, 1.0)
        if call.head_dim in (64, 96, 128) and call.kv_len == LONG_PROMPT:
            yield _prefill_share(call, timed)
    for head_dim, required in RELATIVE_RATE.items():
        yield _relative_rate(rows, head_dim, required)


def _timed(rows: Sequence[Row], call: Call) -> dict[str, Row]:
    """The timed rows of a call, by implementation."""
    same = {"op": call.op, "call": str(call), "dtype": call.dtype}
    return {
        row["impl"]: row
        for row in rows
        if "refused" not in row and all(row[name] == value for name, value in same.items())
    }


def _speedup(
    call: Call, peer: Row | None, name: str, timed: Mapping[str, Row], impl: str, required: float
) -> Verdict:
    row = timed.get(impl) or timed.get(OURS)  # M1 has no separate row if all chips have the same plan
    speedup = peer["ms_median"] / row["ms_median"] if peer and row else 0.0
    aim = f"prefill {call}: time of {peer['impl'] if peer else name} over {impl}"
    return Verdict(aim, f">= {required:.2f}x", _shown(row and peer, f"{speedup:.2f}x"), speedup >= required)


def _prefill_share(call: Call, timed: Mapping[str, Row]) -> Verdict:
    row = timed.get(OURS)
    share = row["ceiling_fraction"] if row else 0.0
    aim = f"prefill {call}: share of the products"
    return Verdict(aim, f">= {PREFILL_SHARE:.0%}", _shown(row, f"{share:.0%}"), share >= PREFILL_SHARE)


def _relative_rate(rows: Sequence[Row], head_dim: int, required: float) -> Verdict:
    row, base = (next((row for row in rows if _is_ours(row, dim)), None) for dim in (head_dim, BASE.head_dim))
    rate = row["rate"] / base["rate"] if row and base else 0.0
    aim = f"prefill D={head_dim}: products per second over those of D={BASE.head_dim}"
    return Verdict(aim, f">= {required:.2f}", _shown(row and base, f"{rate:.2f}"), rate >= required)


def _is_ours(row: Row, head_dim: int) -> bool:
    """Whether the row is our BASE with another head size."""
    fields = ("op", "q_heads", "kv_heads", "q_len", "kv_len", "causal", "dtype")
    same = all(row[name] == getattr(BASE, name) for name in fields)
    return same and row["head_dim"] == head_dim and row["impl"] == OURS and "refused" not in row


# ---- the command

AIMS = {"decode": decode, "prefill": prefill}


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(prog="python -m bench aims", description="Compares a record of the bench with the aims.")
    parser.add_argument("--of", nargs="+", choices=AIMS, default=list(AIMS), help="default: all")
    parser.add_argument("record", type=Path, metavar="FILE", help="a file that the bench wrote with --json")
    options = parser.parse_args(arguments)
    try:
        rows = record.read(options.record)["rows"]
        verdicts = [verdict for op in options.of for verdict in AIMS[op](rows)]
    except (OSError, ValueError, KeyError) as error:
        parser.refuse(
            f"{str(options.record)!r} is not a record of the bench ({type(error).__name__}); give a "
            "file that `python -m bench --json FILE` wrote"
        )
    width = max(len(verdict.aim) for verdict in verdicts)
    for one in verdicts:
        mark = "met  " if one.met else "SHORT"
        print(f"{mark}  {one.aim:{width}}  {one.measured:>12}  required {one.required}")
    missed = sum(not one.met for one in verdicts)
    print(f"{missed} of {len(verdicts)} aims are missed" if missed else f"all {len(verdicts)} aims are met")
    return int(missed > 0)
