"""Measures how fast the demo's model generates on the GPU with `fattn` and with `sdpa`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from statistics import median
from typing import Any

ROUNDS = 3
IMPLEMENTATIONS = ("fattn", "sdpa")


def speed_of(generate: Callable[[str], list[float]], batch: int) -> tuple[dict[str, Any], list[str]]:
    """The speed of each implementation, or why it was not measured, as data and as lines.
    `generate(implementation)` generates once and returns the seconds of every step, prompt first.

    Software Metal is not timed. On a GPU, the first round of each implementation is discarded, because it
    compiles and allocates; the other rounds alternate, so that both run at the same GPU temperature.
    """
    if sys.platform != "darwin":
        why = (
            f"not timed: Metal is software on {sys.platform}, where time means nothing; "
            "on a Mac, tokens per second of fattn and sdpa"
        )
        return {"not_timed": why}, [f"speed        {why}"]
    rounds: dict[str, list[list[float]]] = {name: [] for name in IMPLEMENTATIONS}
    refused: dict[str, str] = {}
    print(f"timing       {1 + ROUNDS} generations each, {' and '.join(IMPLEMENTATIONS)} in turns", flush=True)
    for _ in range(1 + ROUNDS):
        for name in IMPLEMENTATIONS:
            if name in refused:
                continue
            try:
                rounds[name].append(generate(name))
            except (RuntimeError, ValueError, NotImplementedError) as error:
                refused[name] = f"does not run here: {first_line(error)}"
    speeds = {name: refused.get(name) or _speed(rounds[name][1:], batch) for name in IMPLEMENTATIONS}
    lines = [
        f"{'' if number else 'speed':<13}{name:<6} {_shown(speed)}"
        for number, (name, speed) in enumerate(speeds.items())
    ]
    ours, theirs = (
        speed["tokens_per_second"] if isinstance(speed, dict) else None for speed in speeds.values()
    )
    ratio = ours / theirs if ours and theirs else None
    if ratio is not None:
        lines.append(f"{'':<13}fattn generates {ratio:.2f} times the tokens per second of sdpa")
    return {**speeds, "ratio": ratio}, lines


def _speed(rounds: list[list[float]], batch: int) -> dict[str, float | None]:
    """Medians over the rounds. The rate counts all sequences, and is None for a prompt alone."""
    steps = [median(seconds[1:]) for seconds in rounds if len(seconds) > 1]
    return {
        "prompt_seconds": median(seconds[0] for seconds in rounds),
        "tokens_per_second": batch / median(steps) if steps else None,
    }


def _shown(speed: Any) -> str:
    if isinstance(speed, str):
        return speed
    prompt = f"prompt {1e3 * speed['prompt_seconds']:.1f} ms"
    rate = speed["tokens_per_second"]
    return prompt if rate is None else f"{rate:,.1f} tokens per second; {prompt}"


def first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
