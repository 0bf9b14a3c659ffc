"""Draws a record of times: rates against length, with the ceiling as a line.

The size is for a page of some 800 pixels.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from PIL import Image  # noqa: E402

Row = dict[str, Any]

INK, MUTED, GRID = "#1b1f24", "#8a929c", "#e6e9ed"
COLOURS = {
    "fattn": "#d1495b",
    "fattn-m1": "#e8a0aa",
    "torch-metal": "#2e86ab",
    "mlx-metal": "#edae49",
    "llama-metal": "#66a182",
}
LABELS = {
    "fattn-m1": "fattn, tiles of M1",
    "torch-metal": "torch",
    "mlx-metal": "MLX",
    "llama-metal": "llama.cpp",
}
# The panels in the README.
SUMMARY = (
    "decode, B1, 32/8 heads x 128",
    "decode, B16, 32/8 heads x 128",
    "causal prefill, B1, 32/32 heads x 128",
    "causal prefill, B1, 32/8 heads x 128, 32k keys",
)
SPARE_COLOURS = ("#8d6a9f", "#5c6670")
MARKERS = {"fattn": "o", "fattn-m1": "o", "torch-metal": "s", "mlx-metal": "D", "llama-metal": "v"}
STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.hashsalt": "bench",  # the same picture gives the same file
}


def draw(
    record: dict[str, Any],
    stem: Path,
    panels: tuple[str, ...] = (),
    endings: tuple[str, ...] = (".png", ".svg"),
) -> list[Path]:
    """Writes stem.png and stem.svg. `panels` chooses panels of rates; default: all."""
    rows = [row for row in record["rows"] if "refused" not in row]
    if not rows:
        raise SystemExit("bench: every call was refused, so there is nothing to draw.")
    with plt.rc_context(STYLE):
        figure = _rates(rows, record["ceilings"], panels)
        figure.suptitle("Attention rate", fontweight="bold", x=0.01, ha="left", fontsize=13)
        legend(figure, f"{record['machine']}, {record['date']}")
        return save(figure, stem, endings)


def save(figure: Any, stem: Path, endings: tuple[str, ...]) -> list[Path]:
    paths = [stem.with_name(stem.name + ending) for ending in endings]
    for path in paths:
        metadata = {"Date": None} if path.suffix == ".svg" else None
        figure.savefig(path, dpi=150, bbox_inches="tight", metadata=metadata)
        if path.suffix == ".png":  # a quarter of the bytes
            Image.open(path).convert("RGB").quantize(64).save(path, optimize=True)
    plt.close(figure)
    return paths


def _colour(impl: str) -> str:
    return COLOURS.get(impl) or SPARE_COLOURS[sum(map(ord, impl)) % len(SPARE_COLOURS)]


def _implementations(rows: list[Row]) -> list[str]:
    return list(dict.fromkeys(row["impl"] for row in rows))


def _rates(rows: list[Row], ceilings: dict[str, float], names: tuple[str, ...]) -> Any:
    """Draws one panel for each family of calls of the first dtype that differ only in length. Families of a
    single length are drawn only if there are no others."""
    every: dict[str, list[Row]] = {}
    for row in rows:
        if row["dtype"] == rows[0]["dtype"]:
            every.setdefault(_family(row), []).append(row)
    families = {name: rows for name, rows in every.items() if len(set(map(_length, rows))) > 1} or every
    families = {name: families[name] for name in names or families}
    columns = min(2, len(families))
    lines = -(-len(families) // columns)
    figure, axes = plt.subplots(
        lines, columns, figsize=(4.4 * columns, 2.9 * lines + 0.8), layout="constrained", squeeze=False
    )
    panels = list(axes.flat)
    for panel, (name, family) in zip(panels, families.items(), strict=False):
        _rate_panel(panel, name, family, ceilings)
    for unused in panels[len(families) :]:
        unused.set_visible(False)
    return figure


def legend(figure: Any, machine: str) -> None:
    """Adds one legend for all panels, below them, because the title above may be as wide as the figure."""
    handles: dict[str, Any] = {}
    for panel in figure.axes:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    legend = figure.legend(
        handles.values(),
        handles.keys(),
        loc="outside lower left",
        ncols=min(3, len(handles)),
        frameon=False,
        title=machine,
        title_fontsize=9,
        alignment="left",
    )
    legend.get_title().set_color(MUTED)


def _family(row: Row) -> str:
    heads = f"{row['q_heads']}/{row['kv_heads']} heads x {row['head_dim']}"
    kind = ("causal " if row["causal"] else "full ") if row["op"] == "prefill" else ""
    cache = f", {row['options']['kv_format']}" if "kv_format" in row["options"] else ""
    cache += ", uneven" if "seq_lens" in row["options"] else ""
    cache += f", {_short(row['kv_len'])} keys" if _is_chunk(row) else ""
    return f"{kind}{row['op'].replace('_', ' ')}, B{row['batch']}, {heads}{cache}"


def _is_chunk(row: Row) -> bool:
    """Whether the row is a chunk of a prompt, with fewer rows than keys."""
    return bool(row["op"] == "prefill" and row["q_len"] != row["kv_len"])


def _length(row: Row) -> int:
    return int(row["q_len"] if _is_chunk(row) else row["kv_len"])


def _rate_panel(axes: Any, name: str, rows: list[Row], ceilings: dict[str, float]) -> None:
    for impl in _implementations(rows):
        mine = sorted((row for row in rows if row["impl"] == impl), key=_length)
        lengths = list(map(_length, mine))
        rates = [row["rate"] for row in mine]
        slowest = [row["rate"] * row["ms_median"] / row["ms_max"] for row in mine]
        fastest = [row["rate"] * row["ms_median"] / row["ms_min"] for row in mine]
        style = {"color": _colour(impl), "marker": MARKERS.get(impl, "^"), "ms": 5}
        axes.plot(lengths, rates, lw=2.2 if impl == "fattn" else 1.4, label=LABELS.get(impl, impl), **style)
        axes.fill_between(lengths, slowest, fastest, color=_colour(impl), alpha=0.15, lw=0)
    ceiling = ceilings.get("products" if rows[0]["op"] == "prefill" else "read")
    if ceiling:
        axes.axhline(ceiling, color=INK, lw=1.2, ls=(0, (4, 3)), label="ceiling, same run")
    lengths = sorted(set(map(_length, rows)))
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [_short(n) for n in lengths])
    axes.minorticks_off()
    if len(lengths) == 1:
        axes.set_xlim(lengths[0] / 2, lengths[0] * 2)
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", color=GRID)
    axes.set_axisbelow(True)
    axes.set_xlabel("rows" if _is_chunk(rows[0]) else "keys")
    axes.set_ylabel(rows[0]["rate_unit"])
    axes.set_title(name, loc="left", fontsize=9.5, fontweight="bold")


def _short(length: int) -> str:
    return f"{length // 1024}k" if length % 1024 == 0 else str(length)
