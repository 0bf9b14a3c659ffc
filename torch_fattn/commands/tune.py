"""`python -m torch_fattn tune`: times tile sizes and torch's own attention, forward and backward, on this
GPU. What is faster than the built-in choice is saved in a user file that the planner reads.
"""

from __future__ import annotations

import argparse
import datetime
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace

from ..integrations.pytorch.routing import system_and_torch
from ..operators import DTYPES
from ..operators.head_padding import MAX_HEAD_DIM
from ..runtime.settings import cache_folder, tuning_is_off
from ..runtime.versions import VERSION
from ..tuning.candidates import Subject, subjects
from ..tuning.choice import Timed, against_torch, choose, confirmed, faster_on_tensors
from ..tuning.timing import TOLERANCES, TORCH, OutOfTimeError, Stopwatch
from ..tuning.tuned_file import (
    TENSORS,
    BadFileError,
    Gpu,
    TunedFile,
    TunedRoute,
    TunedRow,
    fault_of,
    path_of,
    read,
    set_tuning,
    source_digest,
    write,
)
from .arguments import ArgumentError, Parser, whole
from .doctor import advice_about_device

DEFAULT_SECONDS = 170
CALLS = {
    "prefill": "plain calls",
    "decode": "plain calls",
    "training": "dense calls with gradients",
    "training_causal": "causal calls with gradients",
}


def add_arguments(parser: Parser) -> None:
    parser.add_argument(
        "--seconds",
        type=whole(1, 3600),
        help=f"time limit; calls not reached keep the built-in sizes; default: {DEFAULT_SECONDS}",
    )
    parser.add_argument("--op", choices=("prefill", "decode", "training"), help="only these calls")
    parser.add_argument("--dtype", choices=DTYPES, help="only this dtype")
    parser.add_argument(
        "--head-dim", type=whole(1, MAX_HEAD_DIM), help="only the range of head sizes that contains this one"
    )
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--dry-run", action="store_true", help="time and print, but write nothing")
    action.add_argument("--show", action="store_true", help="print the file of this GPU; nothing is timed")
    action.add_argument("--reset", action="store_true", help="remove the file of this GPU; nothing is timed")
    parser.add_argument(
        "--anyway",
        action="store_true",
        help="run even where Metal is software: tiny calls, meaningless times",
    )


@dataclass
class Outcome:
    """Results of the timing."""

    rows: dict[Subject, list[TunedRow]] = field(default_factory=dict)  # of the calls that were timed
    routes: dict[Subject, list[TunedRoute]] = field(default_factory=dict)
    not_reached: list[Subject] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    @property
    def all_rows(self) -> list[TunedRow]:
        return [row for rows in self.rows.values() for row in rows]

    @property
    def all_routes(self) -> list[TunedRoute]:
        return [route for routes in self.routes.values() for route in routes]


def run(options: argparse.Namespace) -> int:
    """Runs the command. Raises ArgumentError for invalid arguments before anything runs."""
    _check(options)
    if obstacles := advice_about_device():
        print(f"torch_fattn tune needs a GPU: {obstacles[0]}", file=sys.stderr)
        return 1
    gpu = Gpu.this()
    if options.reset:
        return reset(gpu)
    if options.show:
        return show(gpu)
    if not options.dry_run:
        _make_folder()
    chosen = _subjects(options)
    start = time.monotonic()
    stopwatch = Stopwatch(gpu, start + (options.seconds or DEFAULT_SECONDS), tiny=sys.platform != "darwin")
    print(f"device       {gpu}")
    outcome = time_all(stopwatch, chosen)
    print_outcome(outcome, stopwatch, time.monotonic() - start)
    before = _kept(gpu, list(outcome.rows))
    rows, routes = outcome.all_rows + before.rows, outcome.all_routes + before.routes
    file = TunedFile(VERSION, source_digest(), gpu, datetime.date.today().isoformat(), rows, routes)
    set_tuning(gpu, file.rows, file.provenance, file.routes)
    if options.dry_run:
        print("written      nothing (--dry-run)")
    elif not rows and not routes:
        path_of(gpu).unlink(missing_ok=True)
        print(f"written      nothing: {_why_nothing(outcome)}")
    else:
        print(f"written      {write(file)}; `python -m torch_fattn tune --reset` removes it")
    return 1 if outcome.wrong else 0


def _why_nothing(outcome: Outcome) -> str:
    if not outcome.rows:
        return "nothing was timed; give more --seconds"
    return "the built-in choice is as fast as any" + (" that was timed" if outcome.not_reached else "")


def _check(options: argparse.Namespace) -> None:
    timed = not (options.reset or options.show)
    timing = ("seconds", "op", "dtype", "head_dim", "anyway")
    given = [f"--{name.replace('_', '-')}" for name in timing if getattr(options, name)]
    if given and not timed:
        action = "--reset" if options.reset else "--show"
        raise ArgumentError(f"{action} times nothing and takes no {given[0]}; leave it out")
    if tuning_is_off() and timed and not options.dry_run:
        raise ArgumentError(
            "FATTN_TUNING=0 keeps the planner from reading what tune would write; unset it, or give --dry-run"
        )
    if timed and sys.platform != "darwin" and not options.anyway:
        raise ArgumentError(
            f"Metal is software on {sys.platform}, whose times say nothing about a GPU; run it on a Mac, or "
            "give --anyway to rehearse with tiny calls"
        )


def _make_folder() -> None:
    """Checks before timing that the file can be written."""
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ArgumentError(
            f"tuned sizes cannot be written to {folder} ({error.strerror}); set FATTN_CACHE to a folder that "
            "you may write to, or give --dry-run"
        ) from error


def _subjects(options: argparse.Namespace) -> list[Subject]:
    return [
        subject
        for subject in subjects()
        if options.op in (None, subject.op)
        and options.dtype in (None, subject.dtype)
        and (options.head_dim is None or subject.min_dim <= options.head_dim <= subject.max_dim)
    ]


def time_all(stopwatch: Stopwatch, chosen: list[Subject]) -> Outcome:
    outcome = Outcome()
    try:
        for number, subject in enumerate(chosen):
            if sys.stderr.isatty():
                print(f"{number}/{len(chosen)}  {subject}", file=sys.stderr)
            try:
                tuned = _train if subject.op == "training" else _tune
                outcome.rows[subject] = tuned(stopwatch, subject, outcome)
            except OutOfTimeError:
                outcome.not_reached = chosen[number:]
                break
    finally:
        stopwatch.use([])
    return outcome


def _tune(stopwatch: Stopwatch, subject: Subject, outcome: Outcome) -> list[TunedRow]:
    timed = stopwatch.measure(subject)
    rows = _sizes(stopwatch, subject, timed, outcome)
    rows = rows + _tensors(stopwatch, subject, rows, timed.noise, outcome)
    stopwatch.use([])
    lengths = stopwatch.lengths(subject)
    built_in = {i: route.to for i in lengths if (route := subject.plan(stopwatch.calls, i).route)}
    beside = stopwatch.medians(subject, {"base": rows, TORCH: []})
    if TORCH in beside and subject.shares_keys:
        outcome.routes[subject] = against_torch(
            subject, beside["base"], beside[TORCH], built_in, timed.noise, system_and_torch()
        )
    return rows


def _train(stopwatch: Stopwatch, subject: Subject, outcome: Outcome) -> list[TunedRow]:
    """Times forward and backward with the sizes chosen so far; training has no sizes of its own."""
    rows = outcome.all_rows
    try:
        seconds = stopwatch.medians(subject, {"base": rows, "base again": rows, TORCH: []})
    except RuntimeError as error:  # our backward was refused, or out of memory
        stopwatch.drop(subject, "fattn", error)
        return []
    if TORCH in seconds:
        timed = Timed(seconds["base"], seconds["base again"], None, {})
        outcome.routes[subject] = against_torch(
            subject, timed.base, seconds[TORCH], {}, timed.noise, system_and_torch()
        )
    return []


def _sizes(stopwatch: Stopwatch, subject: Subject, timed: Timed, outcome: Outcome) -> list[TunedRow]:
    rows = choose(subject, timed)
    if not rows:
        return []
    again = stopwatch.medians(subject, {"base": [], "base tuned": rows})
    rows = confirmed(rows, again["base"], again["base tuned"], timed.noise)
    return rows if rows and _are_right(stopwatch, subject, rows, outcome) else []


def _tensors(
    stopwatch: Stopwatch, subject: Subject, rows: list[TunedRow], noise: float, outcome: Outcome
) -> list[TunedRow]:
    """The row that enables tensor operations, if it changes a plan and they beat these rows in two timings.
    It changes no plan if they are already on, are off, or fail the self-test."""
    row = subject.tensors(system_and_torch()[0])
    both = [*rows, row]
    if subject.op != "prefill" or fault_of(both):
        return []
    if stopwatch.plans(subject, both) == stopwatch.plans(subject, rows):
        return []
    seconds = stopwatch.medians(subject, {"base": rows, "tensors": both})
    if "tensors" not in seconds or not faster_on_tensors(row, seconds["base"], seconds["tensors"], noise):
        return []
    again = stopwatch.medians(subject, {"base": rows, "base tensors": both})
    found = faster_on_tensors(row, again["base"], again["base tensors"], noise)
    return found if found and _are_right(stopwatch, subject, both, outcome) else []


def _are_right(stopwatch: Stopwatch, subject: Subject, rows: list[TunedRow], outcome: Outcome) -> bool:
    error = stopwatch.error(subject, rows)
    is_right = not fault_of(rows) and error <= TOLERANCES[subject.dtype]
    if not is_right:
        outcome.wrong.append(f"{subject}: the fastest choice, {_tile(rows[-1])}, is off by {error:.1e}")
    return is_right


def print_outcome(outcome: Outcome, stopwatch: Stopwatch, seconds: float) -> None:
    print(f"timed        {len(outcome.rows)} kinds of calls in {seconds:.0f} s\n")
    for subject, rows in outcome.rows.items():
        print(f"  {subject!s:<36}{'built-in' if not rows else _described(rows[0])}")
        for row in rows[1:]:
            print(f"  {'':<36}{_described(row)}")
        for route in outcome.routes.get(subject, []):
            print(f"  {'':<36}{_route_described(route)}")
    print()
    if stopwatch.dropped:
        print(
            f"dropped      {len(stopwatch.dropped)} that this GPU does not run, first {stopwatch.dropped[0]}"
        )
    if outcome.not_reached:
        print(
            f"not reached  {len(outcome.not_reached)}, from {outcome.not_reached[0]} on: they keep what they "
            "have; give more --seconds, or --op, --dtype and --head-dim"
        )
    for line in outcome.wrong:
        print(f"WRONG        {line}; it is not used: please report it with this output")


def _described(row: TunedRow) -> str:
    rows = f"up to {row.max_length} rows: " if row.max_length else ""
    return f"{row.gain:.2f} times as fast  {rows}{_tile(row)}"


def _tile(row: TunedRow) -> str:
    if row.kernel == TENSORS:
        return f"tensor operations (macOS {row.macos})"
    return ", ".join(f"{name} {value}" for name, value in row.sizes.items())


def _route_described(route: TunedRoute) -> str:
    faster, slower = ("torch", "fattn") if route.to == "torch" else ("fattn", "torch")
    most = "" if route.max_length is None else f" to {route.max_length}"
    what = "keys" if route.op == "decode" else "rows"
    return (
        f"{CALLS[route.op]} of D {route.dim} and {route.min_length}{most or ' and more'} {what}: {faster} is "
        f"{route.gain:.2f} times as fast as {slower} (macOS {route.macos}, torch {route.torch})"
    )


def _kept(gpu: Gpu, timed: list[Subject]) -> TunedFile:
    """Rows of the existing file for calls that this run did not time."""
    try:
        before = read(path_of(gpu), VERSION)
    except BadFileError:
        return TunedFile(VERSION, source_digest(), gpu, "")
    return replace(
        before,
        rows=[row for row in before.rows if not any(subject.is_of(row) for subject in timed)],
        routes=[route for route in before.routes if not any(subject.is_of(route) for subject in timed)],
    )


def show(gpu: Gpu) -> int:
    path = path_of(gpu)
    if not path.exists():
        print(f"{gpu} has no tuned sizes: there is no {path}")
        return 0
    try:
        file = read(path, VERSION)
    except BadFileError as fault:
        print(f"{path} is not used: {fault}")
        return 1
    print(f"{path}: {file.provenance}, torch_fattn {file.torch_fattn}")
    for row in file.rows:
        print(f"  {row.kernel} {row.dtype} D {row.min_dim} to {row.max_dim}: {_described(row)}")
    for route in file.routes:
        print(f"  {route.op} {route.dtype}: {_route_described(route)}")
    return 0


def reset(gpu: Gpu) -> int:
    path = path_of(gpu)
    try:
        path.unlink()
        print(f"removed {path}")
    except (FileNotFoundError, NotADirectoryError):
        print(f"{gpu} has no tuned sizes: there is no {path}")
    except OSError as error:
        raise ArgumentError(f"{path} cannot be removed ({error.strerror}); remove it by hand") from error
    set_tuning(gpu, [], "")
    return 0
