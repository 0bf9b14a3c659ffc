"""Random structured programs give each lane the value of an interpreter of single lanes, in every order of
threads, with checks and without."""

from __future__ import annotations

import numpy as np
import pytest
from programs import Program
from random_programs import Generate
from simdgroup_oracle import oracle

from softmetal.simt import KernelError, Library

HEAD = """#include <metal_stdlib>
using namespace metal;
#define IDENTITY(...) (__VA_ARGS__)
"""
SEEDS = (116, 126, 147, 155, 156, 262, 307, 318)
PROGRAMS = {seed: Generate(f"p{seed}", seed, (32, 64, 40)[seed % 3]).program for seed in SEEDS}


@pytest.fixture(scope="module")
def library() -> Library:
    return Library(HEAD + "".join(program.text for program in PROGRAMS.values()))


def run(library: Library, program: Program, order: str, checks: str = "") -> list[int]:
    out = np.zeros(program.threads, np.uint32)
    library.pipeline(program.name).run([out], (1, 1, 1), (program.threads, 1, 1), order=order, checks=checks)
    return out.tolist()


@pytest.mark.parametrize("seed", SEEDS)
def test_values_of_every_lane(library: Library, seed: int) -> None:
    program = PROGRAMS[seed]
    expected, undefined = oracle(program)
    assert len(set(expected)) > 8, "a program that tells lanes apart"
    for order in ("forward", "reverse", "random:1"):
        assert run(library, program, order=order) == expected
        if not undefined:
            assert run(library, program, order=order, checks="race,bounds,uninit") == expected
            continue
        with pytest.raises(KernelError, match="^undefined: "):
            run(library, program, order=order, checks="race,bounds,uninit")


def test_the_programs_have_every_construct() -> None:
    text = "".join(program.text for program in PROGRAMS.values())
    loops = ("; ++", ";; ++", "while (", "do {", "continue;", "break;")
    others = ("switch (", "else", "?", "&&", "||", "IDENTITY(", "template <", "Of_", "return ")
    assert all(construct in text for construct in (*loops, *others))
    assert {oracle(program)[1] for program in PROGRAMS.values()} == {False, True}
