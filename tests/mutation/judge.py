"""Tells whether a mutant is detected: by a compile error, a report of the emulator's checks, a wrong result,
or a count above its bound."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from bench.models.bounds import exceeded
from tests.helpers import direct_launch

from .operators import Mutant
from .trial import Counts, Trial
from .trials import all_trials

COUNTS = Path(__file__).with_name("counts.txt")
SURVIVED = "survived"


@dataclass(frozen=True)
class Verdict:
    by: str  # compiler, report, result, counts, timeout, crash; or SURVIVED
    trial: str = ""
    words: str = ""

    @property
    def killed(self) -> bool:
        return self.by != SURVIVED


def load_counts() -> dict[str, Counts]:
    """A table with a line for each trial; its first line has the names of the counts."""
    if not COUNTS.exists():
        return {}
    head, *lines = (line.split() for line in COUNTS.read_text().splitlines())
    return {name: dict(zip(head[1:], map(int, numbers), strict=True)) for name, *numbers in lines}


def write_counts(counts: Mapping[str, Counts]) -> None:
    names = list(next(iter(counts.values())))
    widest = max(map(len, counts))
    lines = ["trial".ljust(widest) + "".join(f" {name:>9}" for name in names)]
    for trial, numbers in counts.items():
        row = (f" {numbers[name]:>{max(len(name), 9)}}" for name in names)
        lines.append(trial.ljust(widest) + "".join(row))
    COUNTS.write_text("\n".join(lines) + "\n")


@cache
def _trials() -> list[tuple[Trial, set[str]]]:
    return [(trial, trial.kernels()) for trial in all_trials()]


@dataclass
class Judge:
    """`bounds` are those of the counts, by trial; `only` are names of trials, empty for all."""

    bounds: Mapping[str, Counts] = field(default_factory=load_counts)
    only: tuple[str, ...] = ()

    def judge(self, mutant: Mutant) -> Verdict:
        with tempfile.TemporaryDirectory(prefix="mutant-") as scratch:
            for trial, kernels in _trials():
                # A file that a kernel does not include does not change its text.
                wanted = not self.only or trial.name in self.only
                if wanted and any(self._changes(mutant, kernel) for kernel in kernels):
                    verdict = self._try(mutant, trial, Path(scratch))
                    if verdict.killed:
                        return verdict
        return Verdict(SURVIVED)

    def judge_kernels(self) -> Verdict:
        """Runs the unmutated kernels, which must pass."""
        for trial, _ in _trials():
            if (verdict := self._try(None, trial, None)).killed:
                return verdict
        return Verdict(SURVIVED)

    @staticmethod
    def _changes(mutant: Mutant, kernel: str) -> bool:
        text = direct_launch.kernel_text(kernel)
        return mutant.apply(text) != text

    def _try(self, mutant: Mutant | None, trial: Trial, scratch: Path | None) -> Verdict:
        from softmetal.testing import KernelError

        try:
            counts = trial.run(mutant.apply if mutant else None, scratch)
        except KernelError as error:
            by = "compiler" if "error:" in str(error) else "report"
            return Verdict(by, trial.name, error.findings[0])
        except AssertionError as error:
            return Verdict("result", trial.name, str(error).split("\n")[0])
        if risen := exceeded(self.bounds.get(trial.name, {}), counts):
            return Verdict("counts", trial.name, risen[0])
        return Verdict(SURVIVED)
