"""Records steps, launches and plans while a model generates."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import LogitsProcessor

from ..inspection.planning import Recorder
from ..inspection.plans import Explanation


class Progress:
    """On a terminal, one line that is updated in place; otherwise a line every 12 tokens."""

    def __init__(self, label: str, total: int, note: str) -> None:
        self.label, self.total, self.start = label, total, time.perf_counter()
        self._write(f"  0/{total} tokens  {note}", last=False)

    def show(self, done: int) -> None:
        if sys.stdout.isatty() or done % 12 == 0 or done == self.total:
            seconds = time.perf_counter() - self.start
            self._write(f"{done:3}/{self.total} tokens  {seconds:6.1f} s", last=done == self.total)

    def _write(self, text: str, last: bool) -> None:
        line = f"{self.label:<13}{text}".rstrip()
        if sys.stdout.isatty():
            print(f"\r{line:<79}", end="\n" if last else "", flush=True)
        else:
            print(line, flush=True)


class StepRecorder(LogitsProcessor):
    """Records each step of `generate`. It returns the logits unchanged."""

    def __init__(self, progress: Progress | None, launch_counts: Callable[[], dict[str, int]]) -> None:
        self.progress, self.launch_counts = progress, launch_counts
        self.seconds: list[float] = []
        self.launches: list[dict[str, int]] = []
        self._seen: Counter[str] = Counter()
        self._last = time.perf_counter()

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        counts = Counter(self.launch_counts())
        self.launches.append(dict(counts - self._seen))
        self._seen = counts
        scores[0, 0].item()  # waits for the device: the time must include this step's work
        now = time.perf_counter()
        self.seconds.append(now - self._last)
        self._last = now
        if self.progress is not None:
            self.progress.show(len(self.seconds))
        return scores


@dataclass
class DistinctPlan:
    first: Explanation
    calls: int = 0

    @property
    def kernels(self) -> list[str]:
        return [launch["kernel"] for launch in self.first.passes]

    @property
    def summary(self) -> str:
        """The kernels of the plan, the features of the first and the grid of its first call."""
        launches = self.first.passes
        features = (name for name, value in launches[0]["constants"].items() if value)
        grid = " x ".join(map(str, launches[0]["grid"]))
        return f"{' + '.join(self.kernels)} ({', '.join(features)}), grid {grid} in the first call"


class PlanRecorder(Recorder):
    """Records the plan of every operator call. Two plans are distinct if their kernels, macros or constants
    differ. Grids may differ: they follow the lengths, which change with each step."""

    @property
    def kernels(self) -> Counter[str]:
        return sum((Counter(plan.kernels * plan.calls) for plan in self.distinct), Counter())

    @property
    def distinct(self) -> list[DistinctPlan]:
        found: dict[Any, DistinctPlan] = {}
        for call in self.planned:
            plan = Explanation(call.op, [call])
            identity = tuple(
                (launch["kernel"], *launch["macros"].items(), *launch["constants"].items())
                for launch in plan.passes
            )
            found.setdefault(identity, DistinctPlan(plan)).calls += 1
        return list(found.values())

    @property
    def device_name(self) -> str:
        return self.distinct[0].first.device_name if self.planned else "no GPU was used"
