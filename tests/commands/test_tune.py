"""`python -m torch_fattn tune`: its choices from given times, and the command itself. The times are invented,
except in one short run."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import counted_launches
from tests.helpers.command_line import refusal_of, status_of
from tests.helpers.tuned import Install, install, plan_of, this_chip
from torch_fattn import __main__ as command_line
from torch_fattn.commands import tune as command
from torch_fattn.tuning import timing
from torch_fattn.tuning.candidates import Sizes, Subject, candidates, subjects
from torch_fattn.tuning.choice import Seconds, Timed, against_torch, choose, confirmed
from torch_fattn.tuning.timing import Stopwatch
from torch_fattn.tuning.tuned_file import TunedRoute, TunedRow, path_of

__all__ = ["install"]

PREFILL = Subject("prefill", "float16", 1, 64, 64)
DECODE = Subject("decode", "float16", 1, 64, 64)
BASE: Sizes = (("row_fragments", 2), ("tile_keys", 32), ("simdgroups", 4))
SAME_ORDER: Sizes = (("row_fragments", 1), ("tile_keys", 32), ("simdgroups", 8))
OTHER_ORDER: Sizes = (("row_fragments", 1), ("tile_keys", 16), ("simdgroups", 8))


# ---- the choice


BETTER: dict[str, tuple[dict[Sizes, tuple[float, float]], float, list[tuple[Any, ...]]]] = {
    "no candidate": ({}, 0, []),
    "slower": ({SAME_ORDER: (1.2, 1.1)}, 0, []),
    "the fastest": ({SAME_ORDER: (0.8, 0.8), OTHER_ORDER: (0.9, 0.9)}, 0, [(SAME_ORDER, None, 1.25)]),
    "the other": ({SAME_ORDER: (0.9, 0.9), OTHER_ORDER: (0.8, 0.8)}, 0, [(OTHER_ORDER, None, 1.25)]),
    "enough": ({SAME_ORDER: (0.96, 0.96)}, 0, [(SAME_ORDER, None, 1.042)]),
    "too little": ({SAME_ORDER: (0.98, 0.98)}, 0, []),
    "below noise": ({SAME_ORDER: (0.9, 0.9)}, 0.06, []),
    "above noise": ({SAME_ORDER: (0.86, 0.86)}, 0.06, [(SAME_ORDER, None, 1.163)]),
    # With one order of sums each length has its own sizes; otherwise no length may get slower.
    "short calls": ({SAME_ORDER: (0.8, 1.5)}, 0, [(SAME_ORDER, 512, 1.25), (BASE, None, 1.0)]),
    "long calls": ({SAME_ORDER: (1.5, 0.8)}, 0, [(BASE, 512, 1.0), (SAME_ORDER, None, 1.25)]),
    "another order, slower": ({OTHER_ORDER: (0.5, 1.1)}, 0, []),
    "another order": ({OTHER_ORDER: (0.5, 1.0)}, 0, [(OTHER_ORDER, None, 1.414)]),
}


@pytest.mark.host_only
@pytest.mark.parametrize("name", BETTER)
def test_choice(name: str) -> None:
    """(sizes, max_length, gain) of the rows of prefill, where the built-in sizes take a second."""
    times, noise, rows = BETTER[name]
    candidates = {sizes: {0: a, 1: b} for sizes, (a, b) in times.items()}
    timed = Timed({0: 1.0, 1: 1.0}, {0: 1.0, 1: 1.0 + noise}, BASE, candidates)
    found = choose(PREFILL, timed)
    assert [(tuple(row.sizes.items()), row.max_length, row.gain) for row in found] == rows


@pytest.mark.host_only
def test_decode_has_one_row_for_all_lengths() -> None:
    sizes = [
        (("tile_keys", n), ("simdgroups", 4), ("min_chunk", 128), ("threadgroups_per_core", 3))
        for n in (8, 16)
    ]
    times = {sizes[0]: {0: 0.5, 1: 0.99}, sizes[1]: {0: 0.99, 1: 0.4}}
    (row,) = choose(DECODE, Timed({0: 1.0, 1: 1.0}, {0: 1.0, 1: 1.0}, None, times))
    assert tuple(row.sizes.items()) == sizes[1] and row.max_length is None


@pytest.mark.host_only
def test_candidates_timed_once_more() -> None:
    rows = [PREFILL.row(SAME_ORDER, 512), PREFILL.row(BASE)]
    base = {0: 1.0, 1: 1.0}
    assert [row.gain for row in confirmed(rows, base, {0: 0.8, 1: 1.0}, 0.01)] == [1.25, 1.0]
    assert confirmed(rows, base, {0: 0.99, 1: 1.0}, 0.01) == [], "it was luck"
    assert confirmed(rows, base, {0: 0.8, 1: 1.05}, 0.01) == [], "it loses at the other length"
    (one,) = confirmed(rows[:1], base, {0: 0.8, 1: 0.8}, 0.01)
    assert one.gain == 1.25


@pytest.mark.host_only
def test_faster_by_more_than_the_noise() -> None:
    """A row that equals the built-in table is not kept."""

    def kept(
        ours: float, torchs: float, built_in: str = "fattn", noise: float = 0.0
    ) -> list[tuple[str, float]]:
        seconds, table = ({0: x, 1: 1.0} for x in (ours, torchs)), {0: built_in, 1: "fattn"}
        routes = against_torch(PREFILL, *seconds, table, noise, ("26.2", "2.14"))
        assert all((route.min_length, route.max_length) == (64, 512) for route in routes)
        return [(route.to, route.gain) for route in routes]

    assert kept(1.0, 0.8) == [("torch", 1.25)] and kept(1.0, 0.8, built_in="torch") == []
    assert kept(0.8, 1.0, built_in="torch") == [("fattn", 1.25)] and kept(0.8, 1.0) == []
    assert kept(1.0, 0.98) == [] == kept(0.98, 1.0, built_in="torch")
    assert kept(1.0, 0.8, noise=0.11) == [] and kept(1.0, 0.77, noise=0.11) != []


@pytest.mark.host_only
def test_subjects_do_not_overlap() -> None:
    every = subjects()
    for one in every:
        if one.op == "training":
            route = TunedRoute(one.kernel, one.dtype, one.dim, 64, None, "fattn", "26.2", "2.14")
            assert [s for s in every if s.is_of(route)] == [one] and one.dim <= 256
        else:
            assert [s for s in every if s.is_of(one.row(candidates(one)[0]))] == [one]
        if one.op == "prefill":
            assert [s for s in every if s.is_of(one.tensors("26.2"))] == [one]


# ---- the command

Factor = Callable[[Subject, Sizes], float]


class Tune:
    """The command in this process, with its file in a folder of the test."""

    def __init__(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self.folder, self.monkeypatch, self.capsys = folder, monkeypatch, capsys

    def __call__(self, arguments: str, status: int = 0) -> str:
        """What it prints."""
        assert status_of(command_line.main, f"tune {arguments}") == status
        return self.capsys.readouterr().out

    def refusal(self, arguments: str) -> str:
        return refusal_of(command_line.main, f"tune {arguments}", self.capsys)

    def kept(self, what: str) -> list[dict[str, Any]]:
        """The "rows" or "routes" of the file."""
        path = path_of(this_chip())
        return json.loads(path.read_text())[what] if path.exists() else []

    def made_up(self, factor: Factor, torchs: float = 1.0, training: float = 1.0) -> None:
        """Times, instead of measured ones: `factor` of the built-in ones', those of torch's attention, and
        those of our forward and backward."""

        def one(subject: Subject, name: str, rows: list[TunedRow]) -> float:
            if name == timing.TORCH:
                return torchs
            if subject.op == "training":
                return training
            return factor(subject, tuple(rows[0].sizes.items())) if rows else 1.0

        def medians(
            stopwatch: Stopwatch, subject: Subject, wanted: Mapping[str, list[TunedRow]]
        ) -> dict[str, Seconds]:
            return {
                name: {i: one(subject, name, rows) for i in stopwatch.lengths(subject)}
                for name, rows in wanted.items()
            }

        self.monkeypatch.setattr(Stopwatch, "medians", medians)


@pytest.fixture
def tune(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], install: Install
) -> Tune:
    monkeypatch.setenv("FATTN_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FATTN_TUNING", raising=False)
    return Tune(tmp_path / "cache", monkeypatch, capsys)


def half_with_eight(_: Subject, sizes: Sizes) -> float:
    return 0.5 if ("simdgroups", 8) in sizes else 1.0


ONE = "--anyway --dtype float16 --head-dim 64"


def tuning() -> str:
    """Where the planner's sizes of a short prefill are from."""
    return plan_of("prefill", 40, 40, 64).data["tuning"]


def test_the_planner_reads_its_file(tune: Tune) -> None:
    tune.made_up(half_with_eight)
    assert "tuned" not in tuning()
    message = tune(ONE)
    path = path_of(this_chip())
    assert str(path) in message and message.count("2.00 times as fast") == 3 and str(this_chip()) in message
    rows = [(row["kernel"], row["sizes"]["simdgroups"]) for row in tune.kept("rows")]
    assert rows == [(name, 8) for name in ("prefill", "decode", "decode_vector")]
    assert tuning().startswith("tuned on")
    assert plan_of("prefill", 40, 40, 64).passes[0]["macros"]["FATTN_SIMDGROUPS"] == "8"

    assert tune("--show").count("2.00 times as fast") == 3
    tune("--reset")
    assert not path.exists() and "tuned" not in tuning()
    for action in ("--show", "--reset"):
        assert "has no tuned sizes" in tune(action)


def test_torchs_attention_is_among_the_candidates(tune: Tune) -> None:
    """The control is before it: a route that is not faster is not written."""

    def to() -> str:
        return plan_of("prefill", 600, 600, 64).route.to

    def routes(dtype: str, torchs: float) -> list[tuple[str, str, int, int | None]]:
        tune.made_up(half_with_eight, torchs)
        said.append(tune(f"--anyway --dtype {dtype} --head-dim 64 --op prefill"))
        found = tune.kept("routes")
        return [(r["dtype"], r["to"], r["min_length"], r["max_length"]) for r in found]

    said: list[str] = []
    both = [("float16", "torch", 64, 512), ("float16", "torch", 513, None)]
    assert routes("float16", 0.5) == [] and to() == "fattn"
    assert routes("float16", 0.4) == both and to() == "torch"
    assert "513 and more rows: torch is 1.25 times as fast as fattn" in said[-1]
    assert routes("float32", 0.5) == both, "what was not timed now is kept"
    assert {row["dtype"] for row in tune.kept("rows")} == {"float16", "float32"}
    assert tune("--show").count("torch is 1.25 times as fast") == 2
    assert routes("float16", 0.5) == [] and to() == "fattn"
    routes("float16", 0.4)
    tune("--reset")
    assert to() == "fattn"


def test_a_much_slower_torch_is_a_result(monkeypatch: pytest.MonkeyPatch, install: Install) -> None:
    """It is not timed for long. A candidate as slow is dropped."""
    monkeypatch.setattr(Stopwatch, "_call", lambda _, subject, i, torchs=False: torchs)
    torchs_turns = []

    def batch_seconds(torchs: bool, calls: int) -> float:
        torchs_turns.extend([calls] * torchs)
        return 2.0 if torchs or plan_of("prefill", 40, 40, 64).data["tuning"] == timing.PROVENANCE else 1.0

    monkeypatch.setattr(timing, "batch_seconds", batch_seconds)
    stopwatch = Stopwatch(this_chip(), deadline=float("inf"))
    slow = [PREFILL.row(candidates(PREFILL)[0])]
    medians = stopwatch.medians(PREFILL, {"base": [], timing.TORCH: [], "0": slow})
    assert medians == {"base": {0: 1.0, 1: 1.0}, timing.TORCH: {0: 2.0, 1: 2.0}}
    assert len(torchs_turns) == 2 * 2, "once to compile and once for the clock, at each length"


def test_a_dry_run_writes_nothing(tune: Tune) -> None:
    tune.made_up(half_with_eight)
    tune(f"{ONE} --dry-run")
    assert not tune.folder.exists()


def test_sizes_with_wrong_results_are_not_written(tune: Tune, monkeypatch: pytest.MonkeyPatch) -> None:
    """test_the_planner_reads_its_file is the control."""
    tune.made_up(half_with_eight)
    exact = timing.reference.prefill
    monkeypatch.setattr(timing.reference, "prefill", lambda *a, **k: tuple(1.01 * x for x in exact(*a, **k)))
    assert "WRONG        prefill float16" in tune(ONE, status=1)
    assert [row["kernel"] for row in tune.kept("rows")] == ["decode", "decode_vector"]


def test_it_stops_when_the_time_is_over(tune: Tune, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock advances by an hour when it is first read."""
    clock = iter([0.0, *([3600.0] * 1000)])
    monkeypatch.setattr(command.time, "monotonic", lambda: next(clock))
    message = tune(ONE)
    for words in (
        "not reached  5, from prefill float16 D 1 to 64 on",
        "timed        0 kinds",
        "nothing: nothing was timed; give more --seconds",
    ):
        assert words in message
    assert "as fast as any" not in message and "tuned" not in tuning()


def test_end_to_end(tune: Tune, monkeypatch: pytest.MonkeyPatch) -> None:
    """The times of an emulator mean nothing, but every row written must be legal. A candidate that the GPU
    refuses is dropped, for example because its threads need too many registers."""
    two = [sizes for sizes in candidates(PREFILL) if dict(sizes)["early_loads"] == 0][:2]
    monkeypatch.setattr(timing, "candidates", lambda _: two)
    refused = str(dict(two[1])["simdgroups"])
    run = timing.batch_seconds

    def batch_seconds(call: Callable[[], object], calls: int) -> float:
        if plan_of("prefill", 40, 40, 64).passes[0]["macros"]["FATTN_SIMDGROUPS"] == refused:
            raise RuntimeError("fattn_prefill needs 256 threads per threadgroup")
        return run(call, calls)

    monkeypatch.setattr(timing, "batch_seconds", batch_seconds)
    with counted_launches() as launches:
        message = tune(f"{ONE} --op prefill")
    assert "timed        1 kinds of calls" in message
    assert "dropped      1 that this GPU does not run" in message
    assert launches["fattn_prefill"] >= 2 * 3
    tune("--show")


@pytest.mark.host_only
@pytest.mark.parametrize(
    ("refused", "message"),
    [
        ("now", "unrecognized arguments: now"),
        ("--seconds 0", "--seconds: '0' is below 1"),
        ("--seconds 9999", "--seconds: '9999' is above 3,600"),
        ("--seconds soon", "--seconds: 'soon' is not a whole number"),
        ("--op merge", "--op: invalid choice: 'merge'"),
        ("--dtype int8", "--dtype: invalid choice: 'int8'"),
        ("--head-dim 577", "--head-dim: '577' is above 576"),
        ("--show --reset", "argument --reset: not allowed with argument --show"),
        ("--show --dry-run", "argument --dry-run: not allowed with argument --show"),
        ("--reset --seconds 3", "--reset times nothing and takes no --seconds"),
        ("--show --anyway", "--show times nothing and takes no --anyway"),
    ],
)
def test_wrong_arguments(refused: str, message: str, tune: Tune) -> None:
    """The tests above have those that are accepted."""
    with counted_launches() as launches:
        assert message in tune.refusal(refused)
    assert not launches and not tune.folder.exists()


@pytest.mark.host_only
def test_software_is_not_timed_unless_asked(tune: Tune, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command.sys, "platform", "linux")
    assert "Metal is software on linux" in tune.refusal("--seconds 5")


@pytest.mark.host_only
def test_a_file_that_would_not_be_read(tune: Tune, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FATTN_TUNING", "0")
    assert "FATTN_TUNING=0" in tune.refusal("--anyway")


def test_where_the_folder_is_a_file(tune: Tune) -> None:
    """The command finds out before it times anything."""
    tune.made_up(half_with_eight)
    tune.folder.write_text("")
    with counted_launches() as launches:
        assert "sizes cannot be written" in tune.refusal(ONE)
    assert not launches
    tune(f"{ONE} --dry-run")
    assert "has no tuned sizes" in tune("--reset")


def test_a_file_that_cannot_be_removed(tune: Tune) -> None:
    path_of(this_chip()).mkdir(parents=True)
    assert "cannot be removed" in tune.refusal("--reset")


@pytest.mark.host_only
def test_without_a_gpu(tune: Tune, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "advice_about_device", lambda: ["torch finds no Metal device"])
    assert status_of(command_line.main, "tune --anyway") == 1
    assert "needs a GPU: torch finds no Metal device" in tune.capsys.readouterr().err
