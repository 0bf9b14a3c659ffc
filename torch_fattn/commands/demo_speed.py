"""Measures how fast the demo's model generates on the GPU with `fattn` and with `sdpa`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

ROUNDS = 3
IMPLEMENTATIONS = ("fattn", "sdpa")
Seconds = list[float]


@dataclass(frozen=True)
class Speed:
    """Medians over the rounds."""

    prompt_seconds: float
    tokens_per_second: float | None  # of all sequences together; None if there was nothing but the prompt


@dataclass(frozen=True)
class Comparison:
    """The speed of each implementation, or the reason why it has none, or why nothing was timed."""

    speeds: dict[str, Speed | str]
    why_not: str | None = None

    @property
    def lines(self) -> list[str]:
        if self.why_not is not None:
            return [f"speed        {self.why_not}"]
        lines = [
            f"{'speed' if not number else '':<13}{name:<6} {_shown(speed)}"
            for number, (name, speed) in enumerate(self.speeds.items())
        ]
        if (ratio := self.ratio) is not None:
            lines.append(f"{'':<13}fattn generates {ratio:.2f} times the tokens per second of sdpa")
        return lines

    @property
    def ratio(self) -> float | None:
        ours, theirs = (getattr(self.speeds.get(name), "tokens_per_second", None) for name in IMPLEMENTATIONS)
        return ours / theirs if ours and theirs else None

    @property
    def data(self) -> dict[str, Any]:
        speeds = {n: s if isinstance(s, str) else asdict(s) for n, s in self.speeds.items()}
        return {"not_timed": self.why_not} if self.why_not is not None else {**speeds, "ratio": self.ratio}


def compare(generate: Callable[[str], Seconds], batch: int) -> Comparison:
    """`generate(implementation)` generates once and returns the seconds of every step, the prompt first.

    Nothing is timed where Metal is software. On a GPU, the first round of each implementation is discarded
    because it compiles and allocates; the other rounds alternate, so that both see the same GPU temperature.
    """
    if sys.platform != "darwin":
        return Comparison(
            {},
            f"not timed: Metal is software on {sys.platform}, where time means nothing; "
            "on a Mac, tokens per second of fattn and sdpa",
        )
    rounds: dict[str, list[Seconds]] = {name: [] for name in IMPLEMENTATIONS}
    refused: dict[str, str] = {}
    print(f"timing       {1 + ROUNDS} generations each, {' and '.join(IMPLEMENTATIONS)} in turns", flush=True)
    for number in range(1 + ROUNDS):
        for name in IMPLEMENTATIONS:
            if name in refused:
                continue
            try:
                seconds = generate(name)
            except (RuntimeError, ValueError, NotImplementedError) as error:
                refused[name] = f"does not run here: {next(iter(str(error).splitlines()), error)}"
                continue
            if number:
                rounds[name].append(seconds)
    return Comparison({name: refused.get(name) or _speed(rounds[name], batch) for name in IMPLEMENTATIONS})


def _speed(rounds: list[Seconds], batch: int) -> Speed:
    steps = [median(seconds[1:]) for seconds in rounds if len(seconds) > 1]
    return Speed(median(seconds[0] for seconds in rounds), batch / median(steps) if steps else None)


def _shown(speed: Speed | str) -> str:
    if isinstance(speed, str):
        return speed
    prompt = f"prompt {1e3 * speed.prompt_seconds:.1f} ms"
    rate = speed.tokens_per_second
    return prompt if rate is None else f"{rate:,.1f} tokens per second; {prompt}"
