"""Predicted times on Apple GPUs, and how wrong such predictions of published times are.

python -m bench model                                     # the errors, and the rows that were left out
python -m bench model --chip M1Max --shapes standard      # our calls on this chip
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

from ..backends.record import read
from ..cases.arguments import Parser
from ..cases.shapes import SHAPES
from ..peers import llama_source, mlx_metal
from . import cost, published
from .apple_figures import CHIPS, Chip
from .cost import Check, Figures, Row
from .published import Measurement

RESULTS = Path(__file__).resolve().parents[1] / "results" / "agx.json"
_NAMES = {chip.name.replace(" ", ""): chip for chip in CHIPS}


def costs() -> list[Row]:
    rows: list[Row] = read(RESULTS)["rows"]
    return rows


def checks(rows: Sequence[Row]) -> list[Check]:
    """The usable published times."""
    chips = {chip.name: chip for chip in CHIPS}
    return [
        _check(measured, chips[measured.chip], rows)
        for measured in published.load()
        if not measured.unusable
    ]


def _check(measured: Measurement, chip: Chip, rows: Sequence[Row]) -> Check:
    impl = llama_source.IMPL if measured.library.startswith("llama.cpp") else mlx_metal.IMPL
    reads_once = "gqa" in measured.library
    demand = cost.peers_demand(impl, measured.attention, chip, rows, reads_once)
    return Check(
        measured.name, measured.kind, chip, measured.seconds, measured.timing, measured.held_out, demand
    )


def error_lines(found: Sequence[Check], figures: Figures) -> Iterator[tuple[str, ...]]:
    """Absolute errors: median, 90th percentile and worst, of both halves and every kind."""
    yield ("rows", "number", "median", "90 %", "worst")
    for words, half in (("fitted", False), ("held out", True)):
        for kind in ("all", *dict.fromkeys(check.kind for check in found)):
            errors = sorted(
                abs(check.error(figures))
                for check in found
                if check.held_out == half and kind in ("all", check.kind)
            )
            if errors:
                tenth = errors[min(len(errors) - 1, int(0.9 * len(errors)))]
                cells = (median(errors), tenth, errors[-1])
                yield (f"{words}, {kind}", str(len(errors)), *(f"{error:.0%}" for error in cells))


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(prog="python -m bench model", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--chip", choices=_NAMES, help="print predicted times of our calls on it")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["standard"], help="with --chip")
    parser.parse_args(arguments)
    rows = costs()
    found = checks(rows)
    figures = cost.fit(found, published.read_share(CHIPS))
    print(figures)
    for check in sorted(found, key=lambda c: (c.held_out)):
        if not check.held_out:
            d = check.demand
            print(f"{check.name:95} {check.seconds*1e6:9.1f} us {check.error(figures):+.0%}  T={d.threadgroups}")
    for line in error_lines([c for c in found if not c.held_out], figures):
        print(line)
    return 0
