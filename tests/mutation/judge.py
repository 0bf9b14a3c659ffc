"""Tells whether a mutant is detected: by a compile error, a report of the emulator's checks, a wrong result,
or a count above that of the kernels as they are. One that changes the code of no trial's pipeline is no
survivor.

Mutants are judged in separate processes, each with a time limit, because they may crash or hang.
"""

from __future__ import annotations

import hashlib
import signal
import struct
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import cache, partial
from multiprocessing import get_context
from multiprocessing.pool import ThreadPool
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

from bench.models.bounds import exceeded
from tests.helpers import direct_launch

from .operators import Mutant
from .trials import Trial, all_trials

SURVIVED, SAME = "survived", "same code"
TIMEOUT = 3600  # seconds for a mutant, most of which take one or two, and survivors minutes


@dataclass(frozen=True)
class Verdict:
    by: str  # compiler, report, result, counts, crash or timeout; SAME or SURVIVED
    trial: str = ""
    words: str = ""

    @property
    def killed(self) -> bool:
        return self.by not in (SURVIVED, SAME)


_counts_of = cache(Trial.run)  # of the kernels as they are


def judge(mutant: Mutant | None, trials: Iterable[Trial] | None = None) -> Verdict:
    """Without a mutant: whether the kernels as they are fail a trial."""
    from softmetal.testing import KernelError

    mutate = mutant.apply if mutant else None
    same: dict[Any, bool] = {}  # by pipeline
    with tempfile.TemporaryDirectory(prefix="mutant-") as scratch:
        for trial in all_trials() if trials is None else trials:
            try:
                steps = zip(trial.pipelines, trial.plan["passes"], strict=True)
                if mutate and all(_is_same(*step, mutate, Path(scratch), same) for step in steps):
                    continue
                found = trial.run(mutate, Path(scratch))
            except KernelError as error:
                by = "compiler" if "error:" in str(error) else "report"
                return Verdict(by, trial.name, error.findings[0])
            except AssertionError as error:
                return Verdict("result", trial.name, str(error).split("\n")[0])
            if risen := exceeded(_counts_of(trial) if mutant else found, found):
                return Verdict("counts", trial.name, risen[0])
    return Verdict(SAME if all(same.values()) else SURVIVED)


def _is_same(
    pipeline: Any, step: dict[str, Any], mutate: direct_launch.Mutate, scratch: Path, known: dict[Any, bool]
) -> bool:
    """Whether the mutant's code of this pass is that of the kernel as it is."""
    if pipeline not in known:
        text = direct_launch.kernel_text(step["source"])
        modules = (direct_launch.library(step, change, cache=scratch) for change in (mutate, None))
        known[pipeline] = (
            mutate(text) == text or len({_code(each.module("checked")) for each in modules}) == 1
        )
    return known[pipeline]


def _code(path: Path) -> str:
    """What a launch reads of a module (ELF): no debug information, which has columns of the text."""
    module = path.read_bytes()
    (table,), (count,) = struct.unpack_from("<Q", module, 40), struct.unpack_from("<H", module, 60)
    digest = hashlib.sha256()
    for section in range(table, table + 64 * count, 64):
        _, kind, flags, _, offset, size = struct.unpack_from("<IIQQQQ", module, section)
        if flags & 2 and kind != 7:  # in memory, and no note
            digest.update(module[offset : offset + size] if kind != 8 else struct.pack("<Q", size))
    return digest.hexdigest()


# ---- apart


def _judge_apart(mutant: Mutant) -> Verdict:
    signal.alarm(TIMEOUT)  # ends this process
    verdict = judge(mutant)
    signal.alarm(0)
    return verdict


def verdicts(mutants: Iterable[Mutant], jobs: int) -> Iterator[tuple[Mutant, Verdict]]:
    """Yields verdicts in the order in which they are found."""
    start = partial(ProcessPoolExecutor, 1, get_context("spawn"), torch.set_num_threads, (1,))
    idle: SimpleQueue[ProcessPoolExecutor] = SimpleQueue()
    for _ in range(jobs):
        idle.put(start())

    def verdict_of(mutant: Mutant) -> tuple[Mutant, Verdict]:
        process = idle.get()
        try:
            return mutant, process.submit(_judge_apart, mutant).result()
        except BrokenProcessPool:
            process = start()
            return mutant, Verdict("crash or timeout")
        finally:
            idle.put(process)

    with ThreadPool(jobs) as threads:
        yield from threads.imap_unordered(verdict_of, mutants)
    for _ in range(jobs):
        idle.get().shutdown(wait=False)
