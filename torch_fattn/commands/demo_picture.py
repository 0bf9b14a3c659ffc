"""Draws the demo's picture: differences of the logits and kernel launches in each step."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.ticker import MaxNLocator  # noqa: E402


def draw(report: dict[str, Any], path: Path) -> None:
    """Draws the report that the demo writes as JSON."""
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(9.5, 7.2), sharex=True, layout="constrained")
    verdict = "the tokens differ" if report["problems"] else "all tokens agree"
    figure.suptitle(f"fattn and eager attention on {report['device']['name']}: {verdict}")
    steps = range(1, len(report["margin_per_step"]) + 1)
    # A logarithmic axis cannot show 0.
    difference = [value or math.nan for value in report["logit_difference_per_step"]]
    top.semilogy(steps, report["margin_per_step"], "s-", label="gap between the best two tokens (eager)")
    top.semilogy(steps[: len(difference)], difference, "o-", label="largest difference, fattn to eager")
    top.set_ylabel("difference of logits")
    top.set_title(
        f"{report['model']}\nA greedy token can only change where the two lines come near each other.",
        fontsize=9,
    )
    base = [0] * len(steps)
    for kernel, total in report["launches"].items():
        counts = [step.get(kernel, 0) for step in report["launches_per_step"]]
        bottom.bar(steps, counts, bottom=base, label=f"{kernel}: {total}")
        base = [below + count for below, count in zip(base, counts, strict=True)]
    bottom.set_ylabel("kernel launches per step")
    bottom.set_xlabel(
        f"step: 1 processes the prompt of {report['prompt_length']} tokens, each other one adds one"
    )
    bottom.xaxis.set_major_locator(MaxNLocator(integer=True))
    top.legend(frameon=False)
    if report["launches"]:
        bottom.legend(loc="lower right")
    figure.savefig(path, dpi=150)
    plt.close(figure)
