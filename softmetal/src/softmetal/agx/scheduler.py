"""Simulates one of the four schedulers of a core of M1 or M2 on a loop: cycles per iteration, in a band.

Each resident simdgroup issues its instructions in order; the scheduler issues the first that is ready. Cycles
are from philipturner/metal-benchmarks. Three numbers that it lacks are unknown: each combination in
HARDWARE fits the published times that were compared, and the band holds the results of all (docs/agx.md).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from statistics import mean

from .listing import Instruction

SCHEDULERS = 4
SIMDGROUP = 32
_ITERATIONS = 6
_PRODUCT_CYCLES, _PRODUCT_LATENCY, _BARRIER_CYCLES = 18, 36, 30
_COMPLEX = ("transcendental", "slow_int")
_LOADS = ("local_load", "local_store")
_DEVICE = ("device_load", "device_store", "spill", "fill")
# Cycles from issue to result of kinds without a queue.
_LATENCY = {"move": 3, "slow_int": 8, "transcendental": 10, "shuffle": 10, "control": 1, "wait": 1}
_OTHER_LATENCY = 4
_DEVICE_LATENCY, _DEVICE_BYTES = 150, 8  # cycles; bytes per cycle
_STARTS = (
    37.0,
    411.0,
)  # cycles between the starts of two simdgroups: almost together, and spread over a step


@dataclass(frozen=True)
class Hardware:
    """What is not published."""

    issue: float  # cycles of a simple instruction: below 1 where two are issued together
    local_bytes: int  # of threadgroup memory per cycle
    local_latency: int


HARDWARE = (Hardware(0.5, 32, 8), Hardware(1, 32, 8), Hardware(0.75, 16, 8), Hardware(0.5, 16, 8))


@dataclass(frozen=True)
class _Step:
    kind: str
    opcode: str
    written: tuple[int, ...]  # half registers
    read: tuple[int, ...]
    accessed: int  # bytes of a simdgroup


@dataclass(frozen=True)
class Band:
    best: float
    likely: float
    worst: float


def simulate(instructions: list[Instruction], simdgroups: int) -> Band:
    """Cycles of one iteration, of which `simdgroups` on a scheduler take turns."""
    steps = [_step(one) for one in instructions]
    cycles = [mean(_cycles(steps, simdgroups, one, start) for start in _STARTS) for one in HARDWARE]
    return Band(min(cycles), mean(cycles), max(cycles))


_REGISTERS = re.compile(r"\br(\d+)([lh]?)(?:(?:\.\.\.|:)r(\d+)([lh]?))?")


def _halves(text: str) -> tuple[int, ...]:
    """r1 is 2 and 3, r1l is 2, r1h is 3, r1l...r2h or r1:r2 a range."""
    found: list[int] = []
    for first, half, last, last_half in _REGISTERS.findall(text):
        low = 2 * int(first) + (half == "h")
        high = 2 * int(last) + (last_half != "l") if last else 2 * int(first) + (half != "l")
        found += range(low, high + 1)
    return tuple(found)


def _step(instruction: Instruction) -> _Step:
    written, assigns, read = instruction.text.partition(" = ")
    if not assigns:
        written, read = "", instruction.text
    return _Step(
        instruction.kind,
        instruction.opcode,
        _halves(written),
        _halves(read),
        SIMDGROUP * instruction.accessed_bytes,
    )


class _Simdgroup:
    def __init__(self, steps: list[_Step], start: float) -> None:
        self.steps = steps
        self.position = 0
        self.iteration = 0
        self.ready: dict[int, float] = {}  # when the value of a half register is there
        self.pending = 0.0  # when everything that it asked of device memory is there
        self.can_issue = 0.0  # its next instruction, as far as its own registers and loads allow
        self.look_at_next(start)

    @property
    def next(self) -> _Step:
        return self.steps[self.position]

    def advance(self, done: float, issued: float) -> None:
        for half in self.next.written:
            self.ready[half] = done
        self.position += 1
        if self.position == len(self.steps):
            self.position = 0
            self.iteration += 1
        self.look_at_next(issued)

    def look_at_next(self, at: float) -> None:
        step, ready = self.next, self.ready
        for half in step.read if step.kind == "product" else step.read + step.written:
            at = max(at, ready.get(half, 0.0))
        if step.kind == "wait":
            at = max(at, self.pending)
        self.can_issue = at


def _cycles(steps: list[_Step], simdgroups: int, hardware: Hardware, start: float) -> float:
    active = [_Simdgroup(steps, i * start) for i in range(simdgroups)]
    issue = complex_pipe = local = device = 0.0  # when each is free
    ends = []
    while active:
        first, chosen = float("inf"), active[0]
        for group in active:
            earliest = group.can_issue
            if group.next.kind in _COMPLEX:
                earliest = max(earliest, complex_pipe - 4)
            if earliest < first:
                first, chosen = earliest, group
        step = chosen.next
        begin = max(first, issue)
        issue = begin + _issue_cycles(step, hardware)
        done = issue + _LATENCY.get(step.kind, _OTHER_LATENCY)
        if step.kind == "product":
            done = begin + _PRODUCT_LATENCY
        elif step.kind in _COMPLEX:
            complex_pipe = max(complex_pipe, begin) + 4 * hardware.issue
            done = complex_pipe + _LATENCY[step.kind]
        elif step.kind in _LOADS:
            local = max(local, begin) + step.accessed / hardware.local_bytes
            done = local + hardware.local_latency
        elif step.kind in _DEVICE:
            device = max(device, begin) + step.accessed / _DEVICE_BYTES
            done = device + _DEVICE_LATENCY
            chosen.pending = max(chosen.pending, done)
        elif step.kind == "wait":
            chosen.pending = 0.0
        issued = begin + _BARRIER_CYCLES if step.kind == "barrier" else issue
        chosen.advance(done, issued)
        if chosen.position == 0:
            ends.append(issued)
            active = [group for group in active if group.iteration < _ITERATIONS]
    # The middle half: the first iterations fill the pipes, the last ones run alone.
    quarter = len(ends) // 4
    ends.sort()
    return (ends[-1 - quarter] - ends[quarter]) / (len(ends) - 2 * quarter - 1)


def _issue_cycles(step: _Step, hardware: Hardware) -> float:
    if step.kind == "product":
        return _PRODUCT_CYCLES
    if step.opcode == "simd_reduce":
        return 7.25
    return hardware.issue * (2 if step.kind == "shuffle" else 1)
