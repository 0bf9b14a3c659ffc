"""What the files of seeded faults share: a fault, how it is caught, and the control without it."""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest

from tests import direct_launch, problems
from tests.accuracy import assert_close
from tests.problems import Problem

BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup)"
ORDERS = ("forward", "reverse", "random:3")  # of the threads


@dataclass(frozen=True)
class Mutant:
    name: str
    problem: Problem
    kernel: str
    old: str
    new: str
    finding: str = ""  # words of the report; "": the result alone gives it away
    nth: int = 0

    def apply(self, text: str) -> str:
        pieces = text.split(self.old)
        if len(pieces) <= self.nth + 1:  # not an AssertionError, which would count as caught
            raise LookupError(f"{self.kernel} has no occurrence {self.nth} of {self.old!r}")
        head, tail = pieces[: self.nth + 1], pieces[self.nth + 1 :]
        return self.old.join(head) + self.new + self.old.join(tail)


def removed_barriers(source: str, problem: Problem) -> list[Mutant]:
    """Each barrier of a kernel."""
    return [
        Mutant(f"{source}_without_barrier_{nth}", problem, f"fattn_{source}", BARRIER, "(void)0", "race", nth)
        for nth in range(direct_launch.kernel_text(source).count(BARRIER))
    ]


def assert_caught(mutant: Mutant) -> None:
    from softmetal.testing import KernelError

    case = problems.build(mutant.problem)
    mutate = {mutant.kernel: mutant.apply}
    if not mutant.finding:
        with pytest.raises(AssertionError):
            assert_close(case, *direct_launch.run(case, mutate, checks=""))
        return
    with pytest.raises(KernelError, match=f"(?i){mutant.finding}") as caught:
        direct_launch.run(case, mutate)
    assert mutant.kernel in str(caught.value)
    assert re.search(r"\w\.(metal|h):\d+", str(caught.value)), "the report names the line"


def assert_silent_and_right(problem: Problem, order: str) -> None:
    """The control: without a fault, under every check."""
    case = problems.build(problem)
    assert_close(case, *direct_launch.run(case, order=order))
