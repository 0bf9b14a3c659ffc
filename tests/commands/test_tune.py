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
from torch_fattn.commands import tune
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


def chosen(times: Mapping[Sizes, tuple[float, float]], noise: float = 0.0) -> list[tuple[Any, ...]]:
    """(sizes, max_length, gain) of the rows of prefill, where the built-in sizes take a second."""
    base = {0: 1.0, 1: 1.0}
    again = {0: 1.0, 1: 1.0 + noise}
    timed = Timed(base, again, BASE, {sizes: {0: a, 1: b} for sizes, (a, b) in times.items()})
    return [(tuple(row.sizes.items()), row.max_length, row.gain) for row in choose(PREFILL, timed)]


@pytest.mark.host_only
def test_the_fastest_is_chosen() -> None:
    assert chosen({SAME_ORDER: (0.8, 0.8), OTHER_ORDER: (0.9, 0.9)}) == [(SAME_ORDER, None, 1.25)]
    assert chosen({SAME_ORDER: (0.9, 0.9), OTHER_ORDER: (0.8, 0.8)}) == [(OTHER_ORDER, None, 1.25)]
    assert chosen({}) == [] == chosen({SAME_ORDER: (1.2, 1.1)})


@pytest.mark.host_only
def test_gain_below_noise_is_ignored() -> None:
    assert chosen({SAME_ORDER: (0.96, 0.96)}) == [(SAME_ORDER, None, 1.042)]
    assert chosen({SAME_ORDER: (0.98, 0.98)}) == []
    assert chosen({SAME_ORDER: (0.9, 0.9)}, noise=0.06) == []
    assert chosen({SAME_ORDER: (0.86, 0.86)}, noise=0.06) != []


@pytest.mark.host_only
def test_a_gain_at_one_length_only() -> None:
    """If the order of sums is the same, each length has its own sizes; otherwise no length may get slower."""
    assert chosen({SAME_ORDER: (0.8, 1.5)}) == [(SAME_ORDER, 512, 1.25), (BASE, None, 1.0)]
    assert chosen({SAME_ORDER: (1.5, 0.8)}) == [(BASE, 512, 1.0), (SAME_ORDER, None, 1.25)]
    assert chosen({OTHER_ORDER: (0.5, 1.1)}) == []
    assert chosen({OTHER_ORDER: (0.5, 1.0)}) == [(OTHER_ORDER, None, 1.414)]


@pytest.mark.host_only
def test_decode_has_one_row_for_all_lengths() -> None:
    sizes = [
        (("tile_keys", n), ("simdgroups", 4), ("least_chunk", 128), ("threadgroups_per_core", 3))
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


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, install: Install) -> Path:
    monkeypatch.setenv("FATTN_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FATTN_TUNING", raising=False)
    return tmp_path / "cache"


def made_up(
    monkeypatch: pytest.MonkeyPatch, factor: Factor, torchs: float = 1.0, training: float = 1.0
) -> None:
    """Times, instead of measured ones: `factor` of the built-in ones', those of torch's attention, and those
    of our forward and backward."""

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

    monkeypatch.setattr(Stopwatch, "medians", medians)


def half_with_eight(_: Subject, sizes: Sizes) -> float:
    return 0.5 if ("simdgroups", 8) in sizes else 1.0


ONE = "--anyway --dtype float16 --head-dim 64"


def test_the_planner_reads_its_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made_up(monkeypatch, half_with_eight)
    assert "tuned" not in plan_of("prefill", 40, 40, 64).data["tuning"]
    assert status_of(command_line.main, f"tune {ONE}") == 0
    message = capsys.readouterr().out
    path = path_of(this_chip())
    assert str(path) in message and message.count("2.00 times as fast") == 3 and str(this_chip()) in message
    rows = json.loads(path.read_text())["rows"]
    kernels = ("prefill", "decode", "decode_vector")
    assert [(row["kernel"], row["sizes"]["simdgroups"]) for row in rows] == [(name, 8) for name in kernels]
    plan = plan_of("prefill", 40, 40, 64)
    assert plan.data["tuning"].startswith("tuned on") and plan.passes[0]["macros"]["FATTN_SIMDGROUPS"] == "8"

    assert status_of(command_line.main, "tune --show") == 0
    assert capsys.readouterr().out.count("2.00 times as fast") == 3
    assert status_of(command_line.main, "tune --reset") == 0
    assert not path.exists() and "tuned" not in plan_of("prefill", 40, 40, 64).data["tuning"]
    for action in ("--show", "--reset"):
        assert status_of(command_line.main, f"tune {action}") == 0
        assert "has no tuned sizes" in capsys.readouterr().out


def test_torchs_attention_is_among_the_candidates(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The control is before it: a route that is not faster is not written."""

    def to() -> str:
        route = plan_of("prefill", 600, 600, 64).route
        assert route is not None
        return route.to

    def tune_dtype(dtype: str, torchs: float) -> list[tuple[str, str, int, int | None]]:
        made_up(monkeypatch, half_with_eight, torchs)
        arguments = f"tune --anyway --dtype {dtype} --head-dim 64 --op prefill"
        assert status_of(command_line.main, arguments) == 0
        routes = json.loads(path_of(this_chip()).read_text())["routes"]
        return [(r["dtype"], r["to"], r["min_length"], r["max_length"]) for r in routes]

    assert tune_dtype("float16", 0.5) == [] and to() == "fattn"
    capsys.readouterr()
    both = [("float16", "torch", 64, 512), ("float16", "torch", 513, None)]
    assert tune_dtype("float16", 0.4) == both and to() == "torch"
    assert "513 and more rows: torch is 1.25 times as fast as fattn" in capsys.readouterr().out
    assert tune_dtype("float32", 0.5) == both, "what was not timed now is kept"
    assert status_of(command_line.main, "tune --show") == 0
    assert capsys.readouterr().out.count("torch is 1.25 times as fast") == 2
    assert tune_dtype("float16", 0.5) == [] and to() == "fattn"
    tune_dtype("float16", 0.4)
    assert status_of(command_line.main, "tune --reset") == 0 and to() == "fattn"


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


def test_earlier_rows_are_kept(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made_up(monkeypatch, half_with_eight)
    for dtype in ("float16", "float32"):
        assert status_of(command_line.main, f"tune --anyway --dtype {dtype} --op decode --head-dim 64") == 0
    rows = json.loads(path_of(this_chip()).read_text())["rows"]
    assert {row["dtype"] for row in rows} == {"float16", "float32"}
    made_up(monkeypatch, lambda *_: 1.0)  # and what gains no more is not
    assert status_of(command_line.main, "tune --anyway --dtype float16 --op decode --head-dim 64") == 0
    rows = json.loads(path_of(this_chip()).read_text())["rows"]
    assert {row["dtype"] for row in rows} == {"float32"}
    capsys.readouterr()
    assert status_of(command_line.main, "tune --anyway --op decode --head-dim 64") == 0
    assert not path_of(this_chip()).exists()
    assert "nothing: the built-in choice is as fast as any\n" in capsys.readouterr().out


def test_a_dry_run_writes_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made_up(monkeypatch, half_with_eight)
    assert status_of(command_line.main, f"tune {ONE} --dry-run") == 0
    assert not folder.exists()


def test_sizes_with_wrong_results_are_not_written(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """test_the_planner_reads_its_file is the control."""
    made_up(monkeypatch, half_with_eight)
    exact = timing.reference.prefill
    monkeypatch.setattr(timing.reference, "prefill", lambda *a, **k: tuple(1.01 * x for x in exact(*a, **k)))
    assert status_of(command_line.main, f"tune {ONE}") == 1
    assert "WRONG        prefill float16" in capsys.readouterr().out
    rows = json.loads(path_of(this_chip()).read_text())["rows"]
    assert [row["kernel"] for row in rows] == ["decode", "decode_vector"]


def test_it_stops_when_the_time_is_over(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The clock advances by an hour when it is first read."""
    clock = iter([0.0, *([3600.0] * 1000)])
    monkeypatch.setattr(tune.time, "monotonic", lambda: next(clock))
    assert status_of(command_line.main, f"tune {ONE}") == 0
    message = capsys.readouterr().out
    assert (
        "not reached  5, from prefill float16 D 1 to 64 on" in message and "timed        0 kinds" in message
    )
    assert "nothing: nothing was timed; give more --seconds" in message and "as fast as any" not in message
    assert "tuned" not in plan_of("prefill", 40, 40, 64).data["tuning"]


def test_end_to_end(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The times of an emulator mean nothing, but every row written must be legal. A candidate that the GPU
    refuses is dropped, for example because its threads need too many registers."""
    two = [sizes for sizes in candidates(PREFILL) if dict(sizes)["early_loads"] == 0][:2]
    monkeypatch.setattr(timing, "candidates", lambda _: two)
    refused = dict(two[1])
    run = timing.batch_seconds

    def batch_seconds(call: Callable[[], object], calls: int) -> float:
        if plan_of("prefill", 40, 40, 64).passes[0]["macros"]["FATTN_SIMDGROUPS"] == str(
            refused["simdgroups"]
        ):
            raise RuntimeError("fattn_prefill needs 256 threads per threadgroup")
        return run(call, calls)

    monkeypatch.setattr(timing, "batch_seconds", batch_seconds)
    with counted_launches() as launches:
        assert status_of(command_line.main, f"tune {ONE} --op prefill") == 0
    message = capsys.readouterr().out
    assert (
        "timed        1 kinds of calls" in message and "dropped      1 that this GPU does not run" in message
    )
    assert launches["fattn_prefill"] >= 2 * 3
    assert status_of(command_line.main, "tune --show") == 0


@pytest.mark.host_only
@pytest.mark.parametrize(
    ("refused", "message"),
    [
        ("tune now", "unrecognized arguments: now"),
        ("tune --seconds 0", "--seconds: '0' is below 1"),
        ("tune --seconds 9999", "--seconds: '9999' is above 3,600"),
        ("tune --seconds soon", "--seconds: 'soon' is not a whole number"),
        ("tune --op merge", "--op: invalid choice: 'merge'"),
        ("tune --dtype int8", "--dtype: invalid choice: 'int8'"),
        ("tune --head-dim 577", "--head-dim: '577' is above 576"),
        ("tune --show --reset", "--reset and --show cannot be combined"),
        ("tune --show --dry-run", "--show and --dry-run cannot be combined"),
        ("tune --reset --seconds 3", "--reset times nothing and takes no --seconds"),
        ("tune --show --anyway", "--show times nothing and takes no --anyway"),
    ],
)
def test_wrong_arguments(
    refused: str, message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tests above have those that are accepted."""
    with counted_launches() as launches:
        assert message in refusal_of(command_line.main, refused, capsys)
    assert not launches and not folder.exists()


@pytest.mark.host_only
def test_software_is_not_timed_unless_asked(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tune.sys, "platform", "linux")
    assert "Metal is software on linux" in refusal_of(command_line.main, "tune --seconds 5", capsys)


@pytest.mark.host_only
def test_a_file_that_would_not_be_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FATTN_TUNING", "0")
    assert "FATTN_TUNING=0" in refusal_of(command_line.main, "tune --anyway", capsys)


def test_it_finds_out_first_that_it_cannot_write(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made_up(monkeypatch, half_with_eight)
    folder.write_text("")
    with counted_launches() as launches:
        assert "sizes cannot be written" in refusal_of(command_line.main, f"tune {ONE}", capsys)
    assert not launches
    assert status_of(command_line.main, f"tune {ONE} --dry-run") == 0


def test_a_file_that_cannot_be_removed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path_of(this_chip()).mkdir(parents=True)
    assert "cannot be removed" in refusal_of(command_line.main, "tune --reset", capsys)


def test_nothing_to_remove_where_the_folder_is_a_file(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.write_text("")
    assert status_of(command_line.main, "tune --reset") == 0
    assert "has no tuned sizes" in capsys.readouterr().out


@pytest.mark.host_only
def test_without_a_gpu(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tune, "advice_about_device", lambda: ["torch finds no Metal device"])
    assert status_of(command_line.main, "tune --anyway") == 1
    assert "needs a GPU: torch finds no Metal device" in capsys.readouterr().err
