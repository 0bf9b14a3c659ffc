"""Predicted times on Apple GPUs, and how wrong such predictions of published times are.

python -m bench model                                    # the errors, and the rows that were left out
python -m bench model --chip M1Max --shapes standard     # our calls on this chip as well
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from torch_fattn.inspection.chips import CHIPS, Chip

from ..backends.record import read
from ..cases.arguments import Parser
from ..cases.calls import Call
from ..cases.shapes import SHAPES
from ..peers import llama_source, mlx_metal
from . import cost, published
from .cost import Check, Figures, Row
from .published import Measurement

RESULTS = Path(__file__).resolve().parents[1] / "results" / "agx.json"
_CHIPS = {chip.name.replace(" ", ""): chip for chip in CHIPS}
_IMPLS = {"MLX": mlx_metal.IMPL, "llama.cpp": llama_source.IMPL}  # by the first word of the library
_HALVES = {False: "fitted", True: "held out"}
BAND = """\
The cycles are those of M1 and M2, by Mesa's compiler. M3 and later allocate registers dynamically: their
clock includes all that differs. M4 has that of M3, and our calls are predicted with the tiles of M1 and M2.
M5's is fitted to decodes, so none of its prefills are predicted. The only decodes of M1 or M2 that were
compared are llama.cpp's on an M2 Ultra, with the largest errors. None of our kernels was compared. The
simulator's unknowns were chosen by M1 Max prefills (softmetal/docs/agx.md), held-out ones too."""


@functools.cache
def costs() -> list[Row]:
    rows: list[Row] = read(RESULTS)["rows"]
    return rows


@functools.cache
def checks() -> list[Check]:
    """The usable published times."""
    return [_check(one, costs()) for one in published.load() if not one.unusable]


def _check(measured: Measurement, rows: Sequence[Row]) -> Check:
    chips = {chip.name: chip for chip in CHIPS}
    library = measured.library.partition(" ")[0]
    for column, value, known in (
        ("library", library, _IMPLS),
        ("chip", measured.chip, chips),
        ("dtype", measured.dtype, published.DTYPES),
        ("timing", measured.timing, published.TIMINGS),
    ):
        if value not in known:
            raise ValueError(
                f"{measured.name}: the model knows no {column} {value!r}, only {', '.join(known)}; write one "
                "of them, or in `unusable` why the row cannot check it"
            )
    impl, chip = _IMPLS[library], chips[measured.chip]
    reads_once = "gqa" in measured.library
    demand = cost.peers_demand(impl, measured.attention, chip, rows, reads_once)
    return Check(
        measured.name, measured.kind, chip, measured.seconds, measured.timing, measured.held_out, demand
    )


@functools.cache
def figures() -> Figures:
    return cost.fit(checks(), published.read_share(CHIPS))


def predicted(call: Call, chip: Chip, compiles: bool = False) -> tuple[float, cost.Demand] | None:
    """Seconds of our call among queued ones, or None if no published time is like it."""
    if not call.is_decode and chip.family > cost.LATER or figures().clock(chip) is None:
        return None
    demand = cost.our_demand(call, chip, costs(), compiles)
    return cost.seconds(demand, chip, figures()), demand


# ---- tables, as rows of cells


def figure_rows(found: Figures) -> Iterator[tuple[str, str]]:
    yield (
        f"{found.bandwidth:.0%}",
        "of the specified bandwidth: the median of programs that only read; not fitted",
    )
    yield f"{found.overlap:.0%}", "of the shorter of compute and memory is hidden by the longer"
    yield f"{found.launch_us:.1f} us", "a dispatch, among queued calls"
    yield f"{found.wait_us:.0f} us", "a call that the host waits for"
    yield f"{found.rest_7:.2f}", "cycles of M1 and M2 besides those of products, over the simulated ones"
    yield f"{found.clock_9:.2f} GHz", "the clock at which M3 and M4 would take M1's simulated cycles"
    yield f"{found.clock_10:.2f} GHz", "the same of M5, by decodes only"


def error_rows(found: Sequence[Check], fitted: Figures) -> Iterator[tuple[str, ...]]:
    yield "rows", "number", "median error", "nine of ten below", "worst"
    groups = {check: ("all", check.kind, f"{check.kind} on {check.chip.name}") for check in found}
    names = dict.fromkeys(itertools.chain.from_iterable(zip(*groups.values(), strict=True)))
    for half, words in _HALVES.items():
        for name in names:
            chosen = [check for check in found if check.held_out == half and name in groups[check]]
            errors = sorted(abs(check.error(fitted)) for check in chosen)
            if errors:
                nine = errors[min(len(errors) - 1, int(0.9 * len(errors)))]
                cells = (f"{error:.0%}" for error in (median(errors), nine, errors[-1]))
                yield f"{words}, {name}", str(len(errors)), *cells


def published_rows(found: Sequence[Check], fitted: Figures) -> Iterator[tuple[str, ...]]:
    yield "published time", "half", "published ms", "predicted ms", "error"
    for check in sorted(found, key=lambda check: not check.held_out):
        ms = 1e3 * check.seconds
        error = check.error(fitted)
        yield check.name, _HALVES[check.held_out], f"{ms:.3f}", f"{ms * (1 + error):.3f}", f"{error:+.0%}"


def left_out_rows() -> Iterator[tuple[str, str]]:
    reasons = Counter(one.unusable for one in published.load() if one.unusable)
    yield "rows", "why they were left out"
    for reason, number in reasons.most_common():
        yield str(number), reason


def call_rows(calls: Sequence[Call], chip: Chip) -> Iterator[tuple[str, ...]]:
    yield "call", "predicted ms", "binds", "threads of a core", "code KB", "costs of"
    for call in calls:
        words = f"{call.op} {call}"
        try:
            found = predicted(call, chip, compiles=True)
        except (LookupError, NotImplementedError) as refusal:
            yield words, "", str(refusal), "", "", ""
            continue
        if found is None:
            yield words, "", "no published prefill of this family is usable", "", "", ""
            continue
        time, demand = found
        compute, memory = cost.parts(demand, chip, figures())
        binds = "compute" if compute > memory else "memory"
        code = f"{demand.row['loop_bytes'] / 1024:.1f}/{demand.row['code_bytes'] / 1024:.1f}"
        kernel = "this pipeline" if demand.exact else "one like it"
        yield words, f"{1e3 * time:.3f}", binds, str(demand.row["resident"]), code, kernel


def print_rows(rows: Iterator[tuple[str, ...]]) -> None:
    lines = list(rows)
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    print()


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(prog="python -m bench model", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--chip", choices=_CHIPS, help="predict our calls on this chip")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, help="of them; default: standard")
    options = parser.parse_args(arguments)
    if options.shapes and options.chip is None:
        parser.error("--shapes needs --chip")
    print_rows(figure_rows(figures()))
    if options.chip is None:
        print_rows(published_rows(checks(), figures()))
        print_rows(left_out_rows())
    else:
        named = itertools.chain.from_iterable(SHAPES[name] for name in options.shapes or ["standard"])
        calls = dict.fromkeys(replace(call, model="") for call in named)  # sets share calls
        print_rows(call_rows(list(calls), _CHIPS[options.chip]))
    print_rows(error_rows(checks(), figures()))
    print(BAND)
    return 0
