"""The bench's commands: wrong arguments are refused before anything runs, and a run writes its files."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("softmetal.testing", reason="the counts come from softmetal, which is for Linux")

from bench import __main__ as bench
from bench.backends import counting, record, samples
from bench.cases.calls import Call
from bench.report import readme
from bench.report import run as bench_run
from tests.bench import cuda_problems
from tests.conftest import needs_emulator
from tests.helpers.command_line import refusal_of, status_of
from torch_fattn import __main__ as command_line


@pytest.fixture
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accepted arguments end here, with an empty record."""
    empty: dict[str, Any] = {"rows": []}
    monkeypatch.setattr(bench_run, "measure", lambda *_: empty)
    monkeypatch.setattr(bench_run.table, "render", lambda _: "")


@needs_emulator
@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize(
    ("refused", "message", "accepted"),
    [
        ("--op paged_decode", "no such call in --shapes standard", "--op paged_decode --shapes all"),
        ("--shapes whisper --op decode", "no such call in --shapes whisper", "--shapes whisper --op prefill"),
        ("--peers torch", "--peers torch: not on the backend 'counts'", "--peers torch-metal"),
        ("--peers fattn", "--peers fattn: not on the backend 'counts'", "--peers"),
        ("--backend metal", "metal times an Apple GPU, and this machine has none", "--backend counts"),
        ("--json nowhere/x.json", "'nowhere/x.json' is in a folder that does not exist", "--json x.json"),
        ("--json=", "'' names no file", "--json x.json"),
        ("--json folder", "'folder' is a folder", "--json folder/x.json"),
        ("--picture nowhere/x", "is in a folder that does not exist", ""),
        ("--picture taken", "'taken.png' is a folder", ""),
        ("--picture folder/", "'folder/' names no file", ""),
        ("--picture x", "--picture draws times, and --backend counts has none", "--json x.json"),
    ],
)  # fmt: skip
def test_bench(
    refused: str,
    message: str,
    accepted: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "taken.png").mkdir()
    assert message in refusal_of(command_line.main, f"bench {refused}", capsys)
    assert status_of(command_line.main, f"bench {accepted}") == 0


@needs_emulator
@pytest.mark.usefixtures("nothing_runs")
def test_torch_fattn_runs_the_bench_of_its_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command_line.main(["bench"]) == 0
    assert capsys.readouterr().out.startswith(f"the bench of the source checkout {readme.ROOT}\n")
    # A wheel: the folder above the package has no checkout, but perhaps another package of that name.
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "__main__.py").touch()
    monkeypatch.setattr(command_line, "__file__", str(tmp_path / "torch_fattn" / "__main__.py"))
    assert command_line.main(["bench"]) == 1
    assert "clone the repository" in capsys.readouterr().err


@pytest.mark.host_only
@pytest.mark.parametrize(
    ("main", "refused", "message"),
    [
        (bench.main, "bounds --allow-raise", "--allow-raise needs --update"),
        (bench.main, "cuda-build --cores 0", "'0' is not a positive whole number"),
        (bench.main, "cuda-build --shapes gemma-3", "the adapters do not take a window of 1024 keys"),
        (
            bench.main,
            "agx --only (",
            "'(' is not a regular expression (missing ), unterminated subpattern at",
        ),
        (bench.main, "agx --only nobody", "no row is like 'nobody'; leave it out to see all"),
        (bench.main, "agx --update --only fattn", "--update needs every row: leave --only out"),
        (bench.main, "cuda-check --folder nowhere", "contains no manifest.json; copy the folder"),
        (cuda_problems.main, "--folder nowhere", "contains no problems.pt; make it with --build"),
    ],
)
def test_other_commands(
    main: Callable[[list[str]], int], refused: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refusal_of(main, refused, capsys)


@pytest.mark.parametrize(("module", "runs"), [("bench.report.run", True), ("torch_fattn", False)])
def test_an_nvidia_machine_needs_no_torch_fattn(module: str, runs: bool) -> None:
    """bench/_cuda has all that the GPU machine needs. The control imports a module that is missing there."""
    code = f"import sys; sys.modules['torch_fattn'] = None; import {module}"
    root = Path(__file__).resolve().parents[2]
    assert (
        subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True).returncode == 0
    ) == runs


@needs_emulator
def test_a_whole_prefill_is_counted_exactly() -> None:
    """Counts extrapolated from a shorter, ragged call with heads and sequences equal the full count, as do
    those of one of the heads that share a latent vector."""
    calls = [
        Call("prefill", copies, 1, 64, length, length, batch=copies, causal=causal)
        for length, causal, copies in ((640, True, 2), (700, False, 1), (530, True, 1))
    ]
    for call in (*calls, Call("prefill", 2, 1, 576, 130, 130, causal=True, latent_dim=512)):
        direct = counting.count_ours(call)
        whole = samples.count_prefill(call, counting.count_ours)
        assert whole.as_json()["dispatches"][0] | {"grid": ()} == direct.as_json()["dispatches"][0] | {
            "grid": ()
        }
        assert (whole.cache_ratio, whole.products_ratio) == (direct.cache_ratio, direct.products_ratio)


def counted_with(products: Callable[[int], int]) -> Callable[[Call], counting.Counts]:
    """A count of which only the products are not zero."""

    def count(call: Call) -> counting.Counts:
        roles = dict.fromkeys(counting.ROLES, 0)
        zeros = {field.name: 0 for field in dataclasses.fields(counting.Dispatch) if field.type == "int"}
        zeros["products"] = products(call.q_len)
        traffic = dict.fromkeys(("read", "written", "distinct"), roles)
        dispatch = counting.Dispatch(kernel="k", grid=(1,), threads=(32,), **traffic, **zeros)
        return counting.Counts(call, (dispatch,))

    return count


@pytest.mark.host_only
def test_counts_off_the_polynomial_are_noticed() -> None:
    call = Call("prefill", 6, 3, 64, 8192, 8192)
    assert samples.count_prefill(call, counted_with(lambda n: n * n)).total("products") == 3 * 8192**2
    with pytest.raises(RuntimeError, match="not values of a quadratic polynomial"):
        samples.count_prefill(call, counted_with(lambda n: n * n + (n == 256)))


@pytest.mark.host_only
def test_lengths_of_other_kernels_are_skipped() -> None:
    """One head alone is cut into parts, but the heads of the whole call are not."""
    call = Call("prefill", 6, 3, 64, 8192, 8192)

    def count(one: Call, split: tuple[int, ...]) -> counting.Counts:
        counts = counted_with(lambda n: n * n + 7 * (n in split))(one)
        parts = counts.dispatches[0], dataclasses.replace(counts.dispatches[0], kernel="merge")
        return counting.Counts(one, parts) if one.q_len in split else counts

    found = samples.count_prefill(call, lambda one: count(one, (256, 512)))
    assert found.total("products") == 3 * 8192**2 and len(found.dispatches) == 1
    with pytest.raises(RuntimeError, match=r"only \[128, 1024\] take the same kernels"):
        samples.count_prefill(call, lambda one: count(one, tuple(range(256, 1024, 128))))


@pytest.mark.host_only
def test_a_record_has_one_call_per_line(tmp_path: Path) -> None:
    calls = [{"call": "B1", "options": {}}, {"call": "B2", "options": {"seq_lens": [1, 2]}}]
    found = [{"impl": "fattn", "ms_median": 1 / 3}, {"impl": "torch-metal", "refused": "no kernel"}]
    rows = [call | one for call in calls for one in found]
    path = tmp_path / "record.json"
    record.write({"machine": "none", "ceilings": {"read": 2 / 3}, "rows": rows}, path)
    lines = path.read_text().splitlines()
    impls = {"fattn": {"ms_median": 0.3333333}, "torch-metal": {"refused": "no kernel"}}
    assert len(lines) == 8
    assert [json.loads(line.rstrip(",")) for line in lines[4:6]] == [{**one, "impls": impls} for one in calls]
    rounded = [call | {"impl": impl} | one for call in calls for impl, one in impls.items()]
    assert record.read(path) == {"machine": "none", "ceilings": {"read": 0.6666667}, "rows": rounded}
    assert readme.RESULTS.read_text() == record.text(record.read(readme.RESULTS))
