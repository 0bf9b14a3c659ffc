"""In random structured programs, the lanes that reach an operation take part in it, in every order of
threads, with checks and without."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
from random_programs import ENTRIES, HEAD, Program, value_of

from softmetal.simt import Library

SEEDS = range(8)
PROGRAMS = {seed: Program(seed) for seed in SEEDS}


@pytest.fixture(scope="module")
def library() -> Library:
    source = HEAD + "".join(program.text for program in PROGRAMS.values())
    return Library(source, defines={"ENTRIES": str(ENTRIES)})


def wrong(library: Library, name: str, threads: int, order: str, checks: str) -> tuple[int, int, int]:
    """The numbers of wrong values, of values, and of values of some of the lanes only."""
    log, counts = np.zeros((threads, ENTRIES, 4), np.uint32), np.zeros(threads, np.uint32)
    library.pipeline(name).run([log, counts], (1, 1, 1), (threads, 1, 1), order=order, checks=checks)
    assert counts.max() < ENTRIES
    lanes: dict[int, list[int]] = defaultdict(list)
    entries = [(t % 32, *entry) for t in range(threads) for entry in log[t, : counts[t], :3].tolist()]
    for lane, place, _, _ in entries:
        lanes[place].append(lane)
    bad = [value != value_of(op, lane, lanes[place]) for lane, place, op, value in entries]
    return sum(bad), len(bad), sum(len(one) < 32 for one in lanes.values())


@pytest.mark.parametrize("seed", SEEDS)
def test_the_lanes_that_reach_an_operation_take_part(library: Library, seed: int) -> None:
    threads = (32, 64, 40)[seed % 3]
    for order in ("forward", "reverse", "random:1"):
        for checks in ("", "race,bounds,uninit"):
            bad, count, partial = wrong(library, f"p{seed}", threads, order, checks)
            assert bad == 0 and count > 500 and partial > 10, (order, checks, bad, count, partial)


def test_an_operation_with_the_lanes_of_another_iteration_is_noticed() -> None:
    """The control: in places without iterations, others reach an operation than take part in it."""
    program = Program(1, iterations=False)
    library = Library(HEAD + program.text, defines={"ENTRIES": str(ENTRIES)})
    assert wrong(library, "p1", 64, "forward", "")[0] > 0


def test_the_programs_have_every_construct() -> None:
    text = "".join(program.text for program in PROGRAMS.values())
    loops = ("; ++", ";; ++", "while (", "do {", "continue;", "break;")
    others = ("switch (", "else", "?", "&&", "||", "IDENTITY(", "<3>(", "Of_", "return ")
    assert all(construct in text for construct in (*loops, *others))
