"""Interprets a program of programs.py: runs lanes one at a time, and operations for the lanes at the smallest
place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from programs import BINARY, MASK, Program


def product(values: list[int]) -> int:
    result = 1
    for value in values:
        result = result * value & MASK
    return result


def combine(name: str, values: list[int]) -> int:
    fold: dict[str, Callable[[], int]] = {
        "sum": lambda: sum(values), "max": lambda: max(values), "min": lambda: min(values),
        "product": lambda: product(values),
    }  # fmt: skip
    if name in fold:
        return fold[name]() & MASK
    result = values[0]
    for value in values[1:]:
        result = BINARY[{"and": "&", "or": "|", "xor": "^"}[name]](result, value)
    return result


def source(name: str, lane: int, index: int, width: int) -> int | None:
    """The lane that a shuffle reads, or None beyond the ends, where a lane keeps its own value."""
    first, at = lane // width * width, lane % width
    target = {
        "shuffle": index % width, "shuffle_xor": at ^ index, "shuffle_up": at - index,
        "shuffle_down": at + index, "shuffle_rotate_up": (at - index) % width,
        "shuffle_rotate_down": (at + index) % width,
    }[name]  # fmt: skip
    return first + target if 0 <= target < width else None


def operate(name: str, operands: dict[int, tuple[int, ...]]) -> tuple[dict[int, int], bool]:
    """Returns the lanes' results, and whether one read an inactive lane."""
    group, _, kind = name.partition("_")
    width = 32 if group == "simd" else 4
    results, undefined = {}, False
    for lane, values in operands.items():
        mates = [i for i in sorted(operands) if i // width == lane // width]
        first = lane // width * width
        if kind in ("ballot", "active", "any", "all"):
            bits = {i: operands[i][0] & 1 if operands[i] else 1 for i in mates}
            ballot = sum(bit << (i - first) for i, bit in bits.items())
            results[lane] = {"any": int(any(bits.values())), "all": int(all(bits.values()))}.get(kind, ballot)
        elif kind == "is_first":
            results[lane] = int(lane == mates[0])
        elif kind == "broadcast_first":
            results[lane] = operands[mates[0]][0]
        elif kind.startswith("prefix"):
            before = [operands[i][0] for i in mates if i < lane or (i == lane and "inclusive" in kind)]
            results[lane] = sum(before) & MASK
        elif kind.startswith("shuffle"):
            taken = source(kind, lane, values[1] & (width - 1), width)
            undefined |= taken is not None and taken not in operands
            results[lane] = operands[taken if taken in operands else lane][0]
        else:
            results[lane] = combine(kind, [operands[i][0] for i in mates])
    return results, undefined


def oracle(program: Program) -> tuple[list[int], bool]:
    """The value of each thread, and whether a shuffle had an undefined result."""
    shared = [0] * program.threads
    lanes = [program.lane(t, shared) for t in range(program.threads)]
    waiting: dict[int, Any] = {}
    results = [0] * program.threads
    undefined = False

    def go_on(t: int, value: int | None) -> None:
        try:
            waiting[t] = lanes[t].send(value)  # type: ignore[arg-type]
        except StopIteration as end:
            results[t] = end.value

    for t in range(program.threads):
        go_on(t, None)
    while waiting:
        # Each simdgroup runs separately until its smallest place is a barrier.
        ready = False
        for first in range(0, program.threads, 32):
            mine = {t: waiting[t] for t in range(first, first + 32) if t in waiting}
            if not mine:
                continue
            least = min(place for place, _, _ in mine.values())
            here = {t - first: request for t, request in mine.items() if request[0] == least}
            name = next(iter(here.values()))[1]
            if name == "barrier":
                continue
            ready = True
            values, bad = operate(name, {lane: request[2] for lane, request in here.items()})
            undefined |= bad
            for lane in here:
                del waiting[first + lane]
            for lane in here:
                go_on(first + lane, values[lane])
        if not ready:
            arrived = list(waiting)
            assert len({waiting[t][0] for t in arrived}) == 1 and len(arrived) == program.threads
            waiting.clear()
            for t in arrived:
                go_on(t, 0)
    return results, undefined
