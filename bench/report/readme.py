"""Writes the tables of measurements in README.md and docs/measured.md, and the picture, from bench/results.

python -m bench readme            # exits with 1 if a table differs
python -m bench readme --update
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..backends.record import read
from ..cases.arguments import Parser
from ..peers.launch import OURS, OURS_ON_M1, SAME_PLAN

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
MEASURED = ROOT / "docs" / "measured.md"
RESULTS = ROOT / "bench" / "results" / "nvidia-h200.json"
TENSOR_RESULTS = ROOT / "bench" / "results" / "nvidia-h200-tensor.json"
# One or two calls of each kind, and those where a peer is faster.
IN_THE_README = (
    "decode B1 32/8x128 N=256",
    "decode B1 32/8x128 N=4096",
    "decode B1 32/8x128 N=131072",
    "decode B1 32/32x128 N=131072",
    "decode B16 32/8x128 N=32768",
    "prefill B1 32/32x64 8192x8192 causal",
    "prefill B1 32/32x128 2048x2048 causal",
    "prefill B1 32/32x128 8192x8192 causal",
    "prefill B1 16/16x256 8192x8192 causal",
    "prefill B1 32/8x128 16x32768 causal",
)
TENSOR_IMPLS = {
    "fattn-tensor": "fattn, registers",
    "fattn-tensor-threadgroup": "fattn, threadgroup",
    "fattn": "fattn, simdgroup matrices",
    "mlx-nax": "MLX 0.32 NAX",
    "torch-mpp": "torch 2.15 MPP",
}
TILES = {OURS: "fattn, tiles of M3 and later", OURS_ON_M1: "fattn, tiles of M1 and M2"}
PEERS = {"torch-metal": "torch 2.13 Metal", "mlx-metal": "MLX 0.32 Metal", "llama-metal": "llama.cpp Metal"}


def table(results: dict[str, Any], only: tuple[str, ...] = ()) -> str:
    """Returns one line per call: our time and share of the ceiling, then the peers' times."""
    calls: dict[str, dict[str, dict[str, Any]]] = {}
    for row in (row for row in results["rows"] if row["dtype"] == "float16"):
        # If two sets have a call, the first row counts.
        calls.setdefault(f"{row['op']} {row['call']}", {}).setdefault(row["impl"], row)
    if missing := set(only) - set(calls):
        raise ValueError(
            f"{RESULTS.name} has no row of {', '.join(sorted(missing))}; measure it or remove it"
        )
    calls = {call: calls[call] for call in only or calls}
    measured = {row["impl"] for row in results["rows"]}
    titles = {name: title for name, title in PEERS.items() if name in measured}
    head = ["float16", *TILES.values(), "rate of the first", "of the ceiling", *titles.values()]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for call, rows in calls.items():
        ours = rows["fattn"]
        if "refused" in ours:
            continue
        older, *peers = [_beside(rows.get(name), ours) for name in (OURS_ON_M1, *titles)]
        cells = [
            call,
            f"{ours['ms_median']:.3f} ms",
            older,
            f"{ours['rate']:,.0f} {ours['rate_unit']}",
            f"{ours['ceiling_fraction']:.0%}",
            *peers,
        ]
        lines.append("| " + " | ".join(cells) + " |")
    ceilings = results["ceilings"]
    lines.append("")
    lines.append(
        f"{results['machine']}; {results['date']}, commit {results['versions']['commit']}. Ceilings of the "
        f"same run: {ceilings['read']:,.0f} GB/s of pure reading for decode, {ceilings['products']:.0f} "
        "TFLOP/s of 8x8x8 products from registers for prefill."
    )
    return "\n".join(lines)


def _beside(peer: dict[str, Any] | None, ours: dict[str, Any]) -> str:
    if peer is not None and peer.get("refused") == SAME_PLAN:
        return "the same"
    if peer is None or "refused" in peer:
        return "–"
    return f"{peer['ms_median']:.3f} ms ({peer['ms_median'] / ours['ms_median']:.2f}x)"


def tensor_table(results: dict[str, Any]) -> str:
    """Returns one line per call on tensor operations: our time, the other times, and our rate."""
    calls: dict[str, dict[str, dict[str, Any]]] = {}
    for row in (row for row in results["rows"] if "refused" not in row):
        call = f"{row['op']} {row['call'].removesuffix(' ' + row['dtype'])} {row['dtype']}"
        calls.setdefault(call, {})[row["impl"]] = row
    titles = ["call", *TENSOR_IMPLS.values(), "rate of the first time"]
    lines = ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
    for call, rows in calls.items():
        first = next(rows[impl] for impl in TENSOR_IMPLS if impl in rows)
        cells = [
            f"{first['ms_median']:.3f} ms" if rows.get(impl) is first else _beside(rows.get(impl), first)
            for impl in TENSOR_IMPLS
        ]
        lines.append("| " + " | ".join([call, *cells, f"{first['rate']:,.0f} {first['rate_unit']}"]) + " |")
    lines += ["", f"{results['machine']}; {results['date']}, commit {results['versions']['commit']}."]
    return "\n".join(lines)


@dataclass(frozen=True)
class Block:
    """A table in a document, between two lines with the name."""

    page: Path
    name: str
    text: Callable[[], str]

    @property
    def begin(self) -> str:
        return f"<!-- {self.name}: written by python -m bench readme --update -->"

    @property
    def end(self) -> str:
        return f"<!-- /{self.name} -->"

    def render(self, page: str) -> str:
        """Returns the page with the table of today's results."""
        head, rest = page.split(self.begin)
        tail = rest.split(self.end)[1]
        return f"{head}{self.begin}\n{self.text()}\n{self.end}{tail}"


BLOCKS = (
    Block(README, "MEASURED", lambda: table(read(RESULTS), IN_THE_README)),
    Block(MEASURED, "MEASURED", lambda: table(read(RESULTS))),
    Block(MEASURED, "TENSOR", lambda: tensor_table(read(TENSOR_RESULTS))),
)


def main(arguments: list[str] | None = None) -> int:
    about = "Compares the tables of README and docs with bench/results."
    parser = Parser(prog="python -m bench readme", description=about)
    parser.add_argument("--update", action="store_true", help="write the tables and the pictures")
    options = parser.parse_args(arguments)
    status = 0
    for block in BLOCKS:
        current = block.page.read_text()
        if current.count(block.begin) != 1 or current.count(block.end) != 1:
            parser.refuse(
                f"{block.page.name} must contain one line {block.begin} and one {block.end}; put them back"
            )
        correct = block.render(current)
        if options.update:
            block.page.write_text(correct)
        elif correct != current:
            print(
                f"{block.page.name} differs from bench/results: run python -m bench readme --update",
                file=sys.stderr,
            )
            status = 1
    if options.update:
        from . import pictures

        summary = RESULTS.with_name(RESULTS.stem + "-summary")
        pictures.draw(read(RESULTS), summary, pictures.SUMMARY, (".png",))
    return status
