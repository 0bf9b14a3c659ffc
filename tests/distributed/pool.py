"""Processes that stay alive and take functions: a rank each, and a group of the first n for every n."""

from __future__ import annotations

import multiprocessing
import pickle
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

PATIENCE = 120  # seconds for an answer, far more than any takes


@dataclass(frozen=True)
class Failure:
    """What a rank raised."""

    kind: str
    text: str
    trace: str


class EndedError(Exception):
    """A rank ended instead of answering."""


@dataclass(frozen=True)
class World:
    """What a function gets as its first argument."""

    group: Any
    rank: int
    ranks: int
    device: str


def error_of(call: Callable[..., Any], *arguments: Any, **keywords: Any) -> str:
    """The kind and text of what a call raises, for a rank to return; "" if it raises nothing."""
    try:
        call(*arguments, **keywords)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


class Pool:
    """`ranks` processes; `run` calls a function, of a module that they can import, on the first of them."""

    def __init__(
        self, ranks: int, *, backend: str = "gloo", device: str = "cpu", timeout: float = 60.0
    ) -> None:
        # A fork of a process that has imported everything starts at once. Frameworks of macOS and CUDA do not
        # survive one.
        start = "forkserver" if sys.platform == "linux" and device != "cuda" else "spawn"
        context: Any = multiprocessing.get_context(start)
        if start == "forkserver":
            context.set_forkserver_preload(["torch_fattn"])
        self._folder = tempfile.TemporaryDirectory()
        store = Path(self._folder.name, "store").as_uri()
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            arguments = (theirs, rank, ranks, backend, device, store, timeout)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, ranks: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """The results of the first `ranks` ranks. Raises what one of them raised."""
        results = self.outcomes(ranks, function, *arguments)
        for rank, result in enumerate(results):
            if isinstance(result, Failure):
                raise AssertionError(f"rank {rank} of {ranks}: {result.trace}")
            if isinstance(result, EndedError):
                raise result
        return results

    def outcomes(self, ranks: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """The same, with a Failure or an EndedError instead of a missing result."""
        message = pickle.dumps((function, ranks, arguments))
        for pipe in self._pipes[:ranks]:
            pipe.send_bytes(message)
        return [self._answer(rank) for rank in range(ranks)]

    def _answer(self, rank: int) -> Any:
        pipe = self._pipes[rank]
        try:
            if not pipe.poll(PATIENCE):
                raise AssertionError(f"rank {rank} did not answer within {PATIENCE} seconds")
            return pickle.loads(pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            return EndedError(f"rank {rank} ended")

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()


@contextmanager
def pool(ranks: int, **options: Any) -> Iterator[Pool]:
    made = Pool(ranks, **options)
    try:
        yield made
    finally:
        made.close()


def _serve(
    pipe: Connection, rank: int, ranks: int, backend: str, device: str, store: str, timeout: float
) -> None:
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    limit = timedelta(seconds=timeout)
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=ranks, timeout=limit)
    groups = [dist.new_group(range(n), timeout=limit) for n in range(1, ranks + 1)]
    while True:
        try:
            function, size, arguments = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            result = function(World(groups[size - 1], rank, size, device), *arguments)
        except Exception as error:
            result = Failure(type(error).__name__, str(error), traceback.format_exc())
        pipe.send_bytes(pickle.dumps(result))
