"""The calls that mutants are tried on: the suite's random problems, each kept if it reaches something new,
which is a value of a macro, or two options together, in a kernel; and a few more."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from tests.helpers import (
    backward_problems,
    cache_problems,
    drawing,
    linear_problems,
    logits_problems,
    problems,
    rms_norm_problems,
    rotary_problems,
    tensor_kernels,
)
from tests.helpers.backward_problems import BackwardProblem
from tests.helpers.cache_problems import WriteProblem
from tests.helpers.logits_problems import LogitsProblem
from tests.helpers.problems import Problem

from .trial import (
    BACKWARD_CHANGES,
    CHANGES,
    ON_TENSORS,
    SEED,
    SMALLEST,
    Device,
    Trial,
    bf16,
    f16,
    f32,
    of_backward,
    of_linear,
    of_logits,
    of_map,
    of_merge,
    of_norm,
    of_probe,
    of_problem,
    of_rotary,
    of_write,
)

WORK = 3e6  # multiply-adds of a problem
# Head dims of query and value.
NARROW, WIDE = (64, 32), (152, 200)
# Windows that begin one key behind the first of a step.
EDGE = BackwardProblem(0, Problem(0, "prefill", f16, 1, 1, 1, 64, 64, 64, 64, window_left=46))
# All rows see the same keys.
ALIKE: dict[str, Any] = {"window_left": -1, "mask": torch.bool, "mask_broadcast": (False, False, True, False)}
# Steps in place behind one that a window makes the kernel stage.
STAGED = Problem(0, "prefill", bf16, 1, 1, 1, 16, 160, 576, 512, causality="bottom_right", window_left=75)


def _in_turn(drawn: Iterable[Problem | BackwardProblem], device: Device = SMALLEST) -> Iterator[Trial]:
    """Each with another of the changes."""
    for number, problem in enumerate(drawn):
        if isinstance(problem, BackwardProblem):
            yield of_backward(problem, device, BACKWARD_CHANGES[number % len(BACKWARD_CHANGES)])
        else:
            yield of_problem(problem, device, CHANGES[number % len(CHANGES)])


def _with_head(problem: Problem, head: tuple[int, int], dtype: torch.dtype = f16) -> Problem:
    kv_format = problem.kv_format if head == NARROW else "float"  # groups of int4 need such heads
    dims: dict[str, Any] = {"head_dim": head[0], "value_dim": head[1]}
    return replace(problem, dtype=dtype, **dims, kv_format=kv_format, value_in_key=False)


def _of_one_head() -> Iterator[Iterator[Trial]]:
    for head, dtype, count in ((NARROW, f16, 60), (WIDE, f16, 30), (WIDE, f32, 20)):
        for op in problems.OPS:
            drawn = drawing.draw(count, SEED, ops=(op,), work=WORK, of=6)
            yield _in_turn(map(partial(_with_head, head=head, dtype=dtype), drawn))
    for device in (SMALLEST, Device(9)):
        backwards = [EDGE, *backward_problems.draw(80, SEED)[1:]]
        yield _in_turn(
            (replace(each, forward=_with_head(each.forward, NARROW)) for each in backwards), device
        )


def _on_tensors() -> Iterator[Iterator[Trial]]:
    heads = [tensor_kernels.HEADS[number % 3 if number % 4 == 3 else 0] for number in range(180)]
    for device in ON_TENSORS:
        yield _in_turn(itertools.chain((STAGED,), tensor_kernels.problems(SEED, 120)), device)
        drawn = (tensor_kernels.backward_problem(number, heads[number]) for number in range(1, len(heads)))
        backwards = itertools.chain((EDGE,), drawn)
        numbered = (replace(each, index=n, out="remainder") for n, each in enumerate(backwards))
        yield _in_turn(numbered, device)


def _of_all_heads() -> Iterator[Iterator[Trial]]:
    for device in (SMALLEST, Device(9)):
        yield _in_turn(drawing.draw(100, SEED + 1, work=WORK, of=6), device)
        yield _in_turn(backward_problems.draw(40, SEED + 1), device)


def _probes() -> Iterator[Trial]:
    narrow, room = (64, 32, 64), tensor_kernels.ROOM
    yield of_probe("random:2", narrow, True, room)
    yield of_probe("random:2", narrow, False, room)
    yield of_probe("random:4", narrow, True, 502)
    yield of_probe("random:2", (576, 16, 128), False, room)


def _merges() -> Iterator[Trial]:
    for dtype, parts, columns in ((f32, 9, 200), (f16, 40, 24), (f16, 12, 128), (bf16, 12, 300)):
        yield of_merge(dtype, parts, columns)


def _writes() -> Iterator[Trial]:
    yield of_write(WriteProblem(0, "float", bf16, 23, 3, 192, 96, 3, 5, value_in_key=True))
    yield of_write(WriteProblem(0, "int4", f32, 23, 3, 64, 64, 3, 5, special=True))  # rounded minima
    yield of_write(WriteProblem(0, "float", bf16, 40, 3, 64, 64, 7, 5), block=2**30)  # slots of 33 bits
    yield from map(of_write, cache_problems.draw(40, SEED))


def _rotaries() -> Iterator[Trial]:
    yield from map(of_rotary, rotary_problems.draw(60))
    for norm in rms_norm_problems.draw(72):
        if len(norm.outer) < 4:  # of more dimensions, the operator makes a copy
            yield of_norm(norm)


def _linear() -> Iterator[Trial]:
    for op in ("gated_delta_rule", "causal_conv1d"):
        yield from map(of_linear, linear_problems.draw(op, 90, SEED))


def _steps() -> Iterator[Trial]:
    yield from map(of_linear, linear_problems.draw("gated_delta_step", 60))


def _logits() -> Iterator[Trial]:
    for problem in logits_problems.draw(40, SEED):
        problem = replace(problem, shape=problem.shape[-7:])  # of more dimensions, the operators make a copy
        yield of_logits(problem, slice_size=(0, 0, 3)[problem.index % 3])
    # The first threadgroups of more than 2^32 elements.
    yield of_logits(LogitsProblem(7, "softcap", f32, (1, 2048), "every_other", 5.0), columns=2**32 + 64)


def _maps() -> Iterator[Trial]:
    for dtype, layout in itertools.product((f32, torch.bool, f16, bf16), ("padded_rows", "every_other")):
        yield of_map(dtype, 2, 3, 100, 600, slice_size=7 if dtype == f32 else 0, layout=layout)


def _candidates() -> Iterator[Trial]:
    """One of each kind in turn. Most have few pipelines, because compiling takes longer than running."""
    others = (_probes(), _merges(), _writes(), _rotaries(), _linear(), _steps(), _logits(), _maps())
    for trials in itertools.zip_longest(*_of_one_head(), *_on_tensors(), *_of_all_heads(), *others):
        yield from filter(None, trials)


def _selected() -> Iterator[Trial]:
    reached: set[Any] = set()
    for trial in _candidates():
        if new := trial.reached() - reached:
            reached |= new
            yield trial
    yield of_problem(replace(EDGE.forward, head_dim=80))  # whole steps whose rows do not divide the threads
    yield of_problem(STAGED, Device(9))  # whole steps with early loads
    for device in (SMALLEST, *ON_TENSORS):  # NaN in all rows leaves the keys that none sees
        unseen = replace(EDGE, forward=replace(EDGE.forward, **ALIKE), out="remainder")
        yield of_backward(unseen, device, "bad key")


_trials = _selected()


def all_trials() -> Iterator[Trial]:
    """Made when they are first needed, and once: to plan all takes a minute."""
    global _trials
    _trials, again = itertools.tee(_trials)
    return again
