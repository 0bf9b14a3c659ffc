"""Timing on the GPU. Candidates alternate, so that the GPU's temperature affects all equally."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import torch
import torch.nn.functional as F

from .. import reference
from ..operators import attention
from .candidates import FULL, TINY, Calls, Sizes, Subject, candidates, sizes_of_plan
from .choice import Seconds, Timed
from .tuned_file import Gpu, TunedRow, set_tuning

PROVENANCE = "being tuned"
TORCH = "torch"  # the name of torch's own attention among the candidates
ROUNDS = 7
HOPELESS = 1.25  # after one round, drop candidates this many times slower than the fastest
BATCH_SECONDS = 0.02
ROTATED_BYTES = 128 << 20  # exceeds the system-level cache of every chip
# Largest difference from the float64 reference for operands of about 1.
TOLERANCES = {"float32": 1e-5, "float16": 5e-3, "bfloat16": 4e-2}


class OutOfTimeError(Exception):
    """The time limit of the whole run has passed."""


@dataclass
class Stopwatch:
    """Times calls on this GPU with given sizes. `tiny`: single short calls, for rehearsals."""

    gpu: Gpu
    deadline: float  # in time.monotonic()
    tiny: bool = False
    dropped: list[str] = field(default_factory=list)  # candidates that did not run, and why

    @property
    def calls(self) -> Calls:
        return TINY if self.tiny else FULL

    def lengths(self, subject: Subject) -> range:
        return range(len(self.calls.lengths[subject.op]))

    def measure(self, subject: Subject) -> Timed:
        lengths = self.lengths(subject)
        plans = self.plans(subject, [])  # plans on tensor operations have no candidates
        base_sizes = None
        if subject.op == "prefill" and plans[-1][0]["kernel"] == f"fattn_{subject.kernel}":
            base_sizes = sizes_of_plan(subject.kernel, subject.plan(self.calls, lengths[-1]))
        wanted: dict[str, list[TunedRow]] = {"base": [], "base again": []}
        names: dict[str, Sizes] = {}
        for number, sizes in enumerate(candidates(subject)):
            row = subject.row(sizes)
            self.use([row])
            if [subject.plan(self.calls, i).passes for i in lengths] != plans:
                wanted[str(number)] = [row]
                names[str(number)] = sizes
        seconds = self.medians(subject, wanted)
        return Timed(
            seconds["base"],
            seconds["base again"],
            base_sizes,
            {sizes: seconds[name] for name, sizes in names.items() if name in seconds},
        )

    def plans(self, subject: Subject, rows: list[TunedRow]) -> list[list[dict[str, Any]]]:
        """The passes at every length with these rows. A prefill runs first, since it may trigger the
        self-test of tensor operations."""
        self.use(rows)
        if subject.op == "prefill":
            self._call(subject, 0)()
        return [subject.plan(self.calls, i).passes for i in self.lengths(subject)]

    def medians(self, subject: Subject, wanted: Mapping[str, list[TunedRow]]) -> dict[str, Seconds]:
        """Median times of the candidates that run and are never far slower than the fastest."""
        runs = {i: self._call(subject, i) for i in self.lengths(subject)}
        torchs = {i: self._call(subject, i, torchs=True) for i in runs if TORCH in wanted}
        left = dict(wanted)
        samples: dict[str, dict[int, list[float]]] = {name: {i: [] for i in runs} for name in wanted}
        calls = dict.fromkeys(runs, 1)
        for turn in range(1 if self.tiny else ROUNDS):
            for i in runs:
                for name, rows in list(left.items()):
                    if time.monotonic() > self.deadline:
                        raise OutOfTimeError
                    self.use(rows)
                    run = torchs[i] if name == TORCH else runs[i]
                    try:
                        if turn == 0:
                            batch_seconds(run, 1)  # compiles missing kernels
                        seconds = batch_seconds(run, calls[i])
                    except RuntimeError as error:
                        if name.startswith("base"):
                            raise
                        self.drop(subject, name if name == TORCH else rows, error)
                        del left[name], samples[name]
                        continue
                    if turn == 0 and name == "base" and not self.tiny:
                        calls[i] = max(1, min(500, round(BATCH_SECONDS / seconds)))
                        seconds = batch_seconds(run, calls[i])
                    samples[name][i].append(seconds)
            fastest = {i: min(statistics.median(samples[name][i]) for name in left) for i in runs}
            for name in [name for name in left if not name.startswith("base")]:
                if all(statistics.median(samples[name][i]) > HOPELESS * fastest[i] for i in runs):
                    del left[name]
                    if name != TORCH:  # torch's times so far show that ours is faster
                        del samples[name]
        return {
            name: {i: statistics.median(times) for i, times in of_lengths.items()}
            for name, of_lengths in samples.items()
        }

    def drop(self, subject: Subject, what: object, error: RuntimeError) -> None:
        self.dropped.append(f"{subject}, {what}: {str(error).splitlines()[0]}")

    def _call(self, subject: Subject, i: int, torchs: bool = False) -> Callable[[], object]:
        """A call that rotates through copies of the operands, as the layers of a model do. A training call is
        a forward and its backward."""
        first = subject.operands(self.calls, i, "mps")
        copies = max(1, min(16, ROTATED_BYTES // sum(t.nbytes for t in first)))
        rotating = cycle(
            [first, *([t.clone() for t in first] for _ in range(0 if self.tiny else copies - 1))]
        )
        trains, options = subject.op == "training", subject.options
        op: Callable[..., Any] = getattr(torch.ops.fattn, "attention" if trains else subject.op)
        if torchs:
            op = F.scaled_dot_product_attention
            options = options | {"enable_gqa": first[0].shape[1] != first[1].shape[1]}
        if not trains:
            return lambda: op(*next(rotating), **options)
        grad = torch.ones_like(first[0])

        def step() -> object:
            leaves = [t.detach().requires_grad_() for t in next(rotating)]
            out = op(*leaves, **options)
            return torch.autograd.grad(out if torchs else out[0], leaves, grad)

        return step

    def error(self, subject: Subject, rows: list[TunedRow]) -> float:
        """The largest difference from the float64 reference, in out and lse, with these rows."""
        self.use(rows)
        largest = 0.0
        for i in self.lengths(subject):
            operands = subject.operands(TINY, i, "cpu")
            exact = getattr(reference, subject.op)(*operands, **subject.options)
            op = getattr(attention, subject.op)
            results = op(*(t.to("mps") for t in operands), return_lse=True, **subject.options)
            for mine, true in zip(results, exact, strict=True):
                difference = (mine.cpu().double() - true).abs().max().item()
                largest = max(largest, difference if difference == difference else float("inf"))
        return largest

    def use(self, rows: list[TunedRow]) -> None:
        set_tuning(self.gpu, rows, PROVENANCE)


def batch_seconds(run: Callable[[], object], calls: int) -> float:
    """Seconds per call, from a batch between two synchronisations."""
    torch.mps.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        run()
    torch.mps.synchronize()
    return (time.perf_counter() - start) / calls
