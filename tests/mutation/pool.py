"""Judges mutants in separate processes, each with a time limit, because a mutant may crash or hang."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable, Iterator
from multiprocessing import connection, get_context
from typing import Any

from .judge import Judge, Verdict
from .operators import Mutant

TIMEOUT = 600.0  # seconds for a mutant, most of which take one or two, and survivors more than a minute


def _work(pipe: Any) -> None:
    import torch

    os.setpgid(0, 0)  # its compilers die with it
    torch.set_num_threads(1)
    judge = Judge()
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            pipe.send(judge.judge(pipe.recv()))


class _Worker:
    def __init__(self) -> None:
        context = get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        self.mutant: Mutant | None = None
        self.deadline = 0.0

    def give(self, mutant: Mutant) -> None:
        self.mutant, self.deadline = mutant, time.monotonic() + TIMEOUT
        self.pipe.send(mutant)

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid or 0, signal.SIGKILL)
        self._process.join()
        self.pipe.close()


def verdicts(mutants: Iterable[Mutant], jobs: int) -> Iterator[tuple[Mutant, Verdict]]:
    """Yields verdicts in the order in which they are found."""
    waiting = iter(mutants)
    workers: list[_Worker] = []
    try:
        for mutant in waiting:
            workers.append(_Worker())
            workers[-1].give(mutant)
            if len(workers) == jobs:
                break
        while busy := [worker for worker in workers if worker.mutant is not None]:
            connection.wait([worker.pipe for worker in busy], timeout=1.0)
            for worker in busy:
                verdict = _verdict_of(worker)
                if verdict is None or worker.mutant is None:
                    continue
                yield worker.mutant, verdict
                worker.mutant = None
                if verdict.by in ("timeout", "crash"):
                    worker.end()
                    workers[workers.index(worker)] = worker = _Worker()
                if following := next(waiting, None):
                    worker.give(following)
    finally:
        for worker in workers:
            worker.end()


def _verdict_of(worker: _Worker) -> Verdict | None:
    """None while there is none."""
    try:
        if worker.pipe.poll():
            verdict: Verdict = worker.pipe.recv()
            return verdict
    except (EOFError, ConnectionResetError):
        return Verdict("crash")
    return Verdict("timeout") if time.monotonic() > worker.deadline else None
