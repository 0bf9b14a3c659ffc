"""Draws the plain prefills of `python -m bench agx`: cycles per product, resident threads and code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..backends.agx import Row
from .pictures import COLOURS, GRID, LABELS, MARKERS, MUTED, STYLE, legend, plt, save

_Values = Callable[[Row], tuple[float, float, float]]  # the low end of the band, the value, the high end


def _cycles(row: Row) -> tuple[float, float, float]:
    best, likely, worst = (cycles / row["products"] for cycles in row["cycles"])
    return best, likely, worst


def _threads(row: Row) -> tuple[float, float, float]:
    low, high = row["resident_band"]
    return low, row["resident"], high


def _code(row: Row) -> tuple[float, float, float]:
    size = row["code_bytes"] / 1024
    return size, size, size


_PANELS: tuple[tuple[str, _Values], ...] = (
    ("cycles per product, fewer are better", _cycles),
    ("resident threads of a core", _threads),
    ("code in KB (the instruction cache has 12)", _code),
)


def draw(rows: Sequence[Row], stem: Path, endings: tuple[str, ...] = (".png", ".svg")) -> list[Path]:
    """Writes the picture to stem.png and stem.svg."""
    drawn = [row for row in rows if row["part"] == "plain" and row["op"] == "prefill" and row.get("products")]
    calls = list(dict.fromkeys(row["call"] for row in drawn))
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(
            1, len(_PANELS), figsize=(12.6, 1.8 + 0.36 * len(calls)), layout="constrained", sharey=True
        )
        for panel, (title, values) in zip(axes, _PANELS, strict=True):
            _panel(panel, title, values, drawn, calls)
        for panel, ticks in ((axes[0], (20, 30, 40, 60, 80, 120)), (axes[-1], (4, 8, 16, 32))):
            panel.set_xscale("log", base=2)
            panel.set_xticks(ticks, [str(tick) for tick in ticks])
            panel.minorticks_off()
        figure.suptitle(
            "Prefill kernels on M1 and M2, by Mesa's compiler", fontweight="bold", x=0.01, ha="left"
        )
        legend(figure, "compiled and simulated, not measured; bars: the bands of trust")
        return save(figure, stem, endings)


def _panel(axes: Any, title: str, values: _Values, rows: Sequence[Row], calls: list[str]) -> None:
    implementations = list(dict.fromkeys(row["impl"] for row in rows))
    for place, impl in enumerate(implementations):
        mine = [row for row in rows if row["impl"] == impl]
        heights = [
            len(calls) - 1 - calls.index(row["call"]) + 0.18 * ((len(implementations) - 1) / 2 - place)
            for row in mine
        ]
        bands = [values(row) for row in mine]
        axes.hlines(
            heights,
            [one[0] for one in bands],
            [one[2] for one in bands],
            color=COLOURS[impl],
            lw=1.6,
            alpha=0.55,
        )
        axes.plot(
            [one[1] for one in bands],
            heights,
            MARKERS[impl],
            color=COLOURS[impl],
            ms=5,
            label=LABELS.get(impl, impl),
        )
    axes.set_yticks(range(len(calls)), [call.removeprefix("prefill ") for call in reversed(calls)])
    axes.set_ylim(-0.6, len(calls) - 0.4)
    axes.grid(axis="x", color=GRID)
    axes.set_axisbelow(True)
    axes.tick_params(axis="y", length=0, colors=MUTED)
    axes.set_title(title, loc="left", fontsize=9.5, fontweight="bold")
