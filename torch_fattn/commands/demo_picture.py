"""Draws the demo's picture: differences of the logits and kernel launches in each step."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.ticker import MaxNLocator  # noqa: E402

INK, MUTED, ACCENT = "#1b1f24", "#8a929c", "#d1495b"
KERNEL_COLOURS = {"fattn_prefill": "#d1495b", "fattn_decode": "#2e86ab", "fattn_merge": "#8fc0a9"}


def draw(report: dict[str, Any], path: Path) -> None:
    """Draws the report that the demo writes as JSON."""
    plt.rcParams.update({"font.size": 10, "axes.edgecolor": MUTED, "text.color": INK})
    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(9.5, 7.2), sharex=True, height_ratios=(3, 2), layout="constrained"
    )
    verdict = "all tokens agree" if report["agree"] else "TOKENS DIFFER"
    device = report["device"]["name"] if report["device"] else "no GPU"
    title = f"fattn on {device}\nagainst eager attention on the same device: {verdict}"
    figure.suptitle(title, fontweight="bold", x=0.01, ha="left")
    _draw_logits(top, report)
    _draw_launches(bottom, report)
    for axes in (top, bottom):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#e6e8eb", lw=0.8)
        axes.set_axisbelow(True)
        axes.margins(x=0.01)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _draw_logits(axes: Any, report: dict[str, Any]) -> None:
    margin = report["margin_per_step"]
    # A logarithmic axis cannot show 0.
    difference = [value or math.nan for value in report["logit_difference_per_step"]]
    steps = range(1, len(margin) + 1)
    axes.semilogy(
        steps, margin, "s-", ms=2, lw=1.2, color=MUTED, label="gap between the best two tokens (eager)"
    )
    label = "largest difference, fattn to eager"
    axes.semilogy(steps[: len(difference)], difference, "o-", ms=3.5, lw=1, color=ACCENT, label=label)
    axes.set_ylabel("difference of logits")
    note = "A greedy token can only change where the red line comes near the grey one."
    title = f"{report['model']}\n{_speed(report['speed'])}\n{note}"
    axes.set_title(title, fontsize=9, color=MUTED, loc="left")
    low, high = axes.get_ylim()
    axes.set_ylim(low / 3, high * 8)
    axes.legend(loc="upper right", frameon=False, ncols=2)


def _draw_launches(axes: Any, report: dict[str, Any]) -> None:
    launches = report["launches_per_step"]
    steps, base = range(1, len(launches) + 1), [0] * len(launches)
    for kernel, total in report["launches"].items():
        counts = [step.get(kernel, 0) for step in launches]
        colour, label = KERNEL_COLOURS.get(kernel), f"{kernel}: {total}"
        axes.bar(steps, counts, bottom=base, color=colour, width=0.8, label=label)
        base = [below + count for below, count in zip(base, counts, strict=True)]
    axes.set_ylabel("kernel launches per step")
    axes.set_xlabel(
        f"step: 1 processes the prompt of {report['prompt_length']} tokens, each other one adds a token"
    )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if len(launches) == 1:
        axes.set_xlim(0, 2)
    axes.set_ylim(0, max(1, *base) * 1.6)
    axes.set_title(_about_launches(report), fontsize=9, color=MUTED, loc="left")
    if report["launches"]:
        axes.legend(loc="upper right", frameon=False, ncols=3)


def _about_launches(report: dict[str, Any]) -> str:
    """Explains why steps differ: kernels of the prompt, of a token, and of a split cache."""
    merges = [number for number, step in enumerate(report["launches_per_step"]) if step.get("fattn_merge")]
    if not merges:
        return "One launch per layer."
    keys = report["prompt_length"] + merges[0]
    return (
        "One prefill or decode launch per layer. "
        f"From {keys} keys on, threadgroups share a sequence's keys and fattn_merge joins their results."
    )


def _speed(speed: dict[str, Any]) -> str:
    if "not_timed" in speed:
        return "Not timed: Metal is software here."
    rates = [
        f"{name} {speed[name]['tokens_per_second']:,.1f}"
        for name in ("fattn", "sdpa")
        if isinstance(speed[name], dict) and speed[name]["tokens_per_second"]
    ]
    return f"Tokens per second: {', '.join(rates)}." if rates else "No tokens per second."
