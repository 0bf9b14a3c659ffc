"""What the kernels cost on M1 and M2, by Mesa's compiler: a table and a picture. Nothing is run or measured.

python -m bench agx                  # compiles what bench/results/agx.json lacks, if the compiler is built
python -m bench agx --update         # and writes that file and its picture

`make agx` builds the compiler. Without it, the recorded rows are printed, those of other kernels than today's
as stale.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..backends import agx
from ..backends.agx import Row
from ..backends.record import read, write
from ..cases.arguments import Parser, output_file, pattern, picture_stem, positive

RESULTS = Path(__file__).resolve().parents[1] / "results" / "agx.json"
# Half registers that leave room for what Apple's compiler may do otherwise, and that do not fit.
_FITS, _TOO_MANY = 208, 320
_PARTS = {"plain": "Plain calls", "option": "Options of ours"}
_COLUMNS = (
    *("kernel", "call", "shape", "needed", "spills", "resident threads", "threadgroup", "code KB"),
    *("products", "issue a product", "cycles a product", "of steps"),
)
_TRUST = f"""\
needed: half registers of the hot loop / the program. Up to {_FITS} should fit in 256 (fits), and from
  {_TOO_MANY} on should not (not); between, Apple's compiler may differ (?). In brackets: by hand
  (csrc/plan/registers.h), without options.
spills: in the hot loop / in all. Exact for Mesa; for Apple's compiler trust only none.
resident threads: of a core, and with one step of registers more and fewer.
code KB: the hot loop / the program. Trust the order, and differences of more than a third.
products, issue: an iteration of the hot loop, every block once. Exact counts, times published cycles.
cycles a product: simulated, in the band of the unknowns. Differences of less than 10 % decide nothing.
of steps: cycles a product of one path through a loop that has several. The lower number is a step that every
  row of a simdgroup sees whole.
No row has been compared with a Mac: softmetal/docs/agx.md."""


def main(arguments: list[str] | None = None) -> int:
    from softmetal.testing import agx as compiler

    parser = Parser(prog="python -m bench agx", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", metavar="REGEX", type=pattern, default="", help="of 'implementation call'")
    parser.add_argument("--jobs", type=positive, default=2, help="compilers at a time (%(default)s)")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the rows")
    parser.add_argument("--picture", type=picture_stem, metavar="STEM", help="draw STEM.png and STEM.svg")
    parser.add_argument("--update", action="store_true", help="write bench/results/agx.json and agx.png")
    options = parser.parse_args(arguments)
    if options.update and options.only.pattern:
        parser.error("--update needs every row: leave --only out")
    if options.update and not compiler.is_built():
        parser.error(f"--update: {compiler.NotBuiltError()}")
    if (options.picture or options.update) and importlib.util.find_spec("matplotlib") is None:
        parser.refuse("a picture needs matplotlib, which is not installed; pip install it")
    recorded = read(RESULTS)["rows"] if RESULTS.exists() else []
    chosen = [one for one in agx.entries() if options.only.search(f"{one.impl} {one.call}")]
    if not chosen:
        parser.error(f"--only: no row is like {options.only.pattern!r}; leave it out to see all")
    rows = agx.measure(chosen, recorded, options.jobs)
    # Rows of a peer that is not installed here stay.
    here = {one.impl for one in chosen}
    rows += [] if options.only.pattern else [row for row in recorded if row["impl"] not in here]
    print("\n".join(table(rows)))
    if options.json:
        write({"rows": rows}, options.json)
    if options.update:
        write({"rows": rows}, RESULTS)
    if options.picture:
        _draw(rows, options.picture, (".png", ".svg"))
    if options.update:
        _draw(rows, RESULTS.with_suffix(""), (".png",))
    return 0


def _draw(rows: Sequence[Row], stem: Path, endings: tuple[str, ...]) -> None:
    from . import agx_picture  # it takes matplotlib

    for path in agx_picture.draw(rows, stem, endings):
        print(f"wrote {path}")


def table(rows: Sequence[Row]) -> Iterator[str]:
    for part, title in _PARTS.items():
        chosen = [row for row in rows if row["part"] == part]
        if not chosen:
            continue
        order = {call: place for place, call in enumerate(dict.fromkeys(row["call"] for row in chosen))}
        chosen.sort(key=lambda row: order[row["call"]])
        yield f"{title}\n"
        yield from _aligned([_COLUMNS, *map(_cells, chosen)])
        yield ""
    yield _TRUST
    if stale := sum("stale" in row for row in rows):
        yield f"\n{stale} rows are stale: `make agx`, then `python -m bench agx --update`."


def _cells(row: Row) -> list[str]:
    name = row["impl"] + (" (stale)" if "stale" in row else "")
    if "refused" in row:
        return [name, row["call"], row["shape"], row["refused"]]
    low, high = row["resident_band"]
    cells = [name, row["call"], row["shape"], "", "", f"{row['resident']} ({low} to {high})"]
    cells += [str(row["threadgroup_bytes"])]
    if "cycles" not in row:
        cells[3], cells[4] = str(row["needed"]), str(row["spills"])
        return [*cells, f"{row['code_bytes'] / 1024:.1f}", "", "", "", ""]
    cells[3] = f"{row['loop_needed']}/{row['needed']} {_verdict(row['loop_needed'])}"
    if row.get("by_hand"):
        cells[3] += f" ({row['by_hand']})"
    cells[4] = f"{row['loop_spills']}/{row['spills']}"
    cells.append(f"{row['loop_bytes'] / 1024:.1f}/{row['code_bytes'] / 1024:.1f}")
    products = row["products"]
    if not products:
        best, likely, worst = row["cycles"]
        return [
            *cells,
            "0",
            f"{sum(row['issue'])} a step",
            f"{likely:.0f} ({best:.0f} to {worst:.0f}) a step",
            "",
        ]
    best, likely, worst = (cycles / products for cycles in row["cycles"])
    return [
        *cells,
        str(products),
        f"{sum(row['issue']) / products:.1f}",
        f"{likely:.1f} ({best:.1f} to {worst:.1f})",
        ", ".join(f"{cycles / products:.1f}" for products, _, cycles in row.get("steps", ())),
    ]


def _verdict(needed: int) -> str:
    return "fits" if needed <= _FITS else "not" if needed >= _TOO_MANY else "?"


def _aligned(lines: Sequence[Sequence[str]]) -> Iterator[str]:
    whole = [line for line in lines if len(line) == len(_COLUMNS)]
    widths = [max(len(line[i]) for line in whole) for i in range(len(_COLUMNS))]
    for line in lines:
        yield "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=False)).rstrip()
