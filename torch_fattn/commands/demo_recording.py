"""Records steps, launches and plans while a model generates."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LogitsProcessor

from ..inspection.plans import Explanation
from ..operators import OPERATORS


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
    def summary(self) -> str:
        """The kernels of the plan, the features of the first and the grid of its first call."""
        launches = self.first.passes
        kernels = " + ".join(launch["kernel"] for launch in launches)
        features = (name for name, value in launches[0]["constants"].items() if value)
        grid = " x ".join(map(str, launches[0]["grid"]))
        return f"{kernels} ({', '.join(features)}), grid {grid} in the first call"


class PlanRecorder(TorchDispatchMode):
    """Records the plan of every operator call. Two plans are distinct if their kernels, macros or constants
    differ. Grids may differ: they follow the lengths, which change with each step."""

    def __init__(self) -> None:
        super().__init__()
        self.planned: Counter[str] = Counter()
        self._distinct: dict[Any, DistinctPlan] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        namespace, _, name = func._schema.name.partition("::")
        if namespace == "fattn" and name in OPERATORS:
            self._record(Explanation(name, getattr(torch.ops.fattn, f"_plan_{name}")(*args, **kwargs)))
        return func(*args, **kwargs)

    def _record(self, plan: Explanation) -> None:
        self.planned.update(launch["kernel"] for launch in plan.passes)
        identity = tuple(
            (launch["kernel"], *launch["macros"].items(), *launch["constants"].items())
            for launch in plan.passes
        )
        self._distinct.setdefault(identity, DistinctPlan(plan)).calls += 1

    @property
    def distinct(self) -> list[DistinctPlan]:
        return list(self._distinct.values())

    @property
    def device_name(self) -> str:
        return self.distinct[0].first.device_name if self._distinct else "no GPU was used"
